"""The rule "copy where the match has m tokens or more, else draft L tokens", as settings of engines that have it.

transformers has the second half alone: assisted generation drafts, or copies, but not one after the other.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipelines.config import SamplingSetting
from pipelines.export.engines import samples
from selector.actions import ActionSpace
from selector.decision import LookupRule, Mode
from selector.latency import LatencyProfile
from selector.train.data import Texts, Timed
from selector.train.replay import Ratio, ratio_of_speeds
from selector.train.tuning import StaticTable, best_static, replay_mode, static_replay, tune_lookup_rule


class Rule(NamedTuple):
    """Lengths of the rule: the shortest match, the tokens that are copied (both 0 where nothing is), and L."""

    least: int
    copied: int
    drafted: int


@dataclass(frozen=True)
class RuleEngine:
    """One engine.

    Attributes:
        read: the version whose source the file follows.
        copies: whether it copies.
        refusal: why it cannot serve a setting as its labels suppose; empty if it can.
        write: the content of its file, from the rule and the names of target and draft.
        command: how a file is used, a program in the language `language`.
        limits: what a user of the file must know, in Markdown.
        suffix: of its file.
    """

    read: str
    copies: bool
    refusal: Callable[[SamplingSetting], str]
    write: Callable[[Rule, str, str], str]
    command: Callable[[str], str]
    limits: str
    suffix: str
    language: str = "sh"


def _llama_server(rule: Rule, target: str, draft: str) -> str:
    """The command line; a type that stands first in `--spec-type` is asked first."""
    types = ["ngram-simple"] * (rule.copied > 0) + ["draft-simple"] * (rule.drafted > 0)
    command = ["llama-server", "--model", f"{target}.gguf", "--spec-type", ",".join(types)]
    if rule.copied:
        command += ["--spec-ngram-simple-size-n", str(rule.least), "--spec-ngram-simple-size-m", str(rule.copied)]
    if rule.drafted:
        command += ["--spec-draft-model", f"{draft}.gguf", "--spec-draft-n-max", str(rule.drafted)]
        command += ["--spec-draft-n-min", "0", "--spec-draft-p-min", "0"]
    return shlex.join(command) + "\n"


def _transformers(rule: Rule, target: str, draft: str) -> str:
    """Entries of the draft's `generation_config`, which assisted generation reads."""
    constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    return json.dumps({"num_assistant_tokens": rule.drafted, **constant}, indent=1) + "\n"


def _greedy_drafts(setting: SamplingSetting) -> str:
    return "the engine drafts the most probable tokens: make labels with draft_temperature: 0" * samples(setting)


def _one_temperature(setting: SamplingSetting) -> str:
    own = setting.draft_temperature in (None, setting.temperature)
    return "" if own else "assisted generation has no draft temperature"


RULES = {
    "llama-server": RuleEngine(
        read="of llama.cpp 0c1e570",
        copies=True,
        refusal=_greedy_drafts,
        write=_llama_server,
        command=lambda file: f"sh {file}",
        limits="""\
- The models are expected as GGUF files beside their folders: change the two paths.
- It copies after the latest place where the last m tokens occur; this rule was tuned with the longest match. It copies
  only where at least m tokens are left to copy, so the file never asks for fewer, and only in texts of more than
  m + copied + 1 tokens.
- Drafts are the most probable tokens, and the target's own draw verifies them.
- Each request drafts for itself; the times are those of the smallest batch size that was timed.""",
        suffix="sh",
    ),
    "transformers": RuleEngine(
        read="5.23.0",
        copies=False,
        refusal=_one_temperature,
        write=_transformers,
        command=lambda file: (
            f"""\
import json

draft.generation_config.update(**json.load(open("{file}")))
target.generate(**inputs, assistant_model=draft)"""
        ),
        limits="""\
- Assisted generation drafts `num_assistant_tokens` tokens in every step. By default it stops earlier where the draft
  is unsure (`assistant_confidence_threshold`), which these settings turn off.
- It decodes one text at a time; the times are those of the smallest batch size that was timed.""",
        suffix="json",
        language="python",
    ),
}


class Tuned(NamedTuple):
    """The fastest rule that an engine can follow, and its speed over plain decoding and over the best fixed length."""

    rule: Rule
    over_plain: Ratio
    over_fixed: Ratio


def tuned(engine: RuleEngine, texts: Texts, verifier: str, profile: LatencyProfile) -> Tuned:
    """The rule for the texts of one sampling setting, by replay of these."""
    lookups = ActionSpace.with_lookups().lookups
    space = replace(ActionSpace.default(), max_K=1, lookups=lookups)
    timed = Timed(texts, verifier, profile, space)
    fixed = best_static(timed, StaticTable.of(timed))
    mode = _served(tune_lookup_rule(timed, fixed), lookups) if engine.copies else fixed
    own, source_X = replay_mode(timed, {}, mode), timed.texts.source_number_X
    plain, best = (static_replay(timed, tree) for tree in (space.chain(0), fixed.action))
    least, copied = mode.rule or (0, 0)
    ratios = (ratio_of_speeds(own, other, source_X) for other in (plain, best))
    return Tuned(Rule(least, copied, mode.action.nodes), *ratios)


def _served(mode: Mode, lookups: tuple[int, ...]) -> Mode:
    """The mode with a lookup that is at least as long as its match must be."""
    assert mode.rule is not None
    least = min(mode.rule.least, lookups[-1])
    length = next(each for each in lookups if each >= max(least, mode.rule.length))
    return replace(mode, rule=LookupRule(least, length))
