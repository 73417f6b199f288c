"""Where the texts of a run come from: a pair of models, or an engine's log in its place.

This is the one place that knows which it is; stages ask a `Source` for what they need. Every part
of it raises InputError where a file or a model cannot be read.

    schema          what is known at a root, by level of features
    decodes         whether there are models, which decode held-out prompts and are timed; else
                    held-out texts are replayed, with an engine's step times
    drafts          whether there is a drafter; else lookups alone are chosen
    selectors       objective and feature level of those that are trained
    squared_weight  of the squared error in a regressor's loss
    drafting_lead   how many times the speed of copies alone a policy must have that drafts
    processes       how many make rows at once
    why_untrained   why no selector can be trained on the texts; empty where it can
    fingerprint     what stands for the source in traces, latency profiles and artefacts
    names           what an artefact says of its target and draft
    depends()       everything that the rows of traces depend on; JSON values
    plan()          what the data stage would do
    work()          all texts, by split and sampling setting
    make(work)      the rows of some texts
    texts(folder)   the texts of a trace store, by split
"""

from __future__ import annotations

from pipelines.config import Config
from pipelines.pair.log import LogSource, log_source
from pipelines.pair.models import PairSource

Source = PairSource | LogSource


def source_of(config: Config) -> Source:
    return log_source(config) if config.logs.files else PairSource(config)
