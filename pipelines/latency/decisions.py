"""How long decisions take, with their features: in real decoding of a pair, and for the requests of
an engine's step.

An untrained network decides, because the time depends on its size alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice, repeat

import torch

from data_gen import timing
from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import Overruled
from data_gen.features.root import DrafterKnowledge, features_of
from data_gen.models.pair import ModelPair
from data_gen.verification import get_verifier
from pipelines.config import Config
from pipelines.pair import stage as pairs
from pipelines.pair.log import LogSource
from pipelines.terminal import watched
from selector.actions import ActionSpace
from selector.decision import LookupRule, Setting
from selector.export.writer import config_of
from selector.latency import LatencyProfile
from selector.runtime.network import Network
from selector.runtime.selector import Policy, Selector
from selector.runtime.tokens import TokenStatistics
from selector.sampling import Sampling
from selector.schema import DRAFTER, FEATURES, FULL, LIGHT, LOG, MATCH, InputError
from selector.train.module import SelectorModule

SPACE = ActionSpace.of_pairs()
DRAFTED = 6  # tokens of every step in which a decision is timed
DECISIONS = (MATCH, *FEATURES)  # what the decisions see that are timed with a pair
DECISIONS_OF_LOGS = (MATCH, *LOG.levels)
RULE = LookupRule(2, SPACE.lookups[-1])
CONTEXT = 8000  # tokens of all requests' contexts together at which their decisions are timed
LEAST_CONTEXT = 500  # of each request
STEPS = 5  # at least, in one round
MOST_DECISIONS = 200  # in a round, where the steps are more than that
ROUNDS = 3  # the fastest one counts: other programs can only make a decision slower


def decision_seconds(
    config: Config, pair: ModelPair, profile: LatencyProfile, level: str, prompt: list[int]
) -> float:
    """Seconds of a decision in real decoding, features included: the mean without the slowest
    tenth. The lookup rule decides at the level `match`, else an untrained network, which may choose
    chains and lookups. `data.tokens` new tokens are decoded, and every step drafts `DRAFTED` of
    them. InputError where they end too early."""
    verifier = config.train.verifier
    network_level = FULL if level == FULL else LIGHT
    hidden_widths = pairs.hidden_widths(config) if level == FULL else []
    module = SelectorModule(
        "regressor", network_level, hidden_widths, config.train.network, space=SPACE.to_json()
    ).eval()
    chains = [SPACE.index(SPACE.chain(length)) for length in range(SPACE.depth + 1)]
    lookups = range(len(SPACE.trees), len(SPACE))
    setting = Setting(
        Sampling(), SPACE.chain(4), (level,), 100.0, allowed=(*chains, *lookups), rule=None
    )
    if level == MATCH:
        setting = replace(setting, feature_levels=(), rule=RULE)
    chooser = Overruled(
        Policy(setting, _selector(module, verifier, setting, profile)), repeat(SPACE.chain(DRAFTED))
    )
    decoder = Decoder(pair, Sampling(), get_verifier(verifier), chooser, timed=True)
    generator = torch.Generator(device=pair.device).manual_seed(0)
    steps = decoder.decode(prompt, config.data.tokens, generator).steps[2:]
    if not steps:
        raise InputError(
            "prompts: their continuations end before a third decoding step, which could be timed"
        )
    return timing.usual([step.seconds["select"] for step in steps])


def with_decisions(config: Config, source: LogSource, profile: LatencyProfile) -> LatencyProfile:
    """An engine's profile with the times of the decisions of all requests of a step, by batch
    size."""
    batches = profile.batches
    assert batches is not None
    space = source.labeller.space
    module = SelectorModule(
        "regressor", DRAFTER, [], config.train.network, schema=LOG.name, space=space.to_json()
    ).eval()
    tokens = cycle(token for text in source.logs.all for token in text.tokens)
    decide = []
    for batch in watched(batches.sizes, "timing decisions"):
        setting = Setting(source.labeller.sampling, space.chain(0), speed=100.0, batch=batch)
        seconds = {}
        for level in DECISIONS_OF_LOGS:
            if level == MATCH:
                deciding = replace(setting, rule=RULE)
            else:
                joint = 100.0 if batch > 1 else 0.0
                deciding = replace(setting, feature_levels=(level,), joint=joint)
            selector = _selector(module, config.train.verifier, deciding, profile)
            policy = Policy(deciding, selector)
            seconds[level] = min(_step_seconds(policy, tokens) for _ in range(ROUNDS))
        decide.append(seconds)
    return replace(profile, batches=replace(batches, decide=decide))


def _selector(
    module: SelectorModule, verifier: str, setting: Setting, profile: LatencyProfile
) -> Selector:
    selector_config = config_of(module, verifier, setting.action, [setting])
    return Selector(Network(module.state_dict(), selector_config), profile, [setting])


def _step_seconds(policy: Policy, coming: Iterator[int]) -> float:
    """Median seconds that the decisions of all requests of a step take together, features included,
    with a further token of each request's text."""
    setting = policy.setting
    batch = setting.batch
    (level,) = setting.asked
    requests = []
    for _ in range(batch):
        prompt = list(islice(coming, max(CONTEXT // batch, LEAST_CONTEXT)))
        requests.append(DrafterKnowledge(prompt, setting.sampling, TokenStatistics.empty(), batch))
    features_of(requests, level)  # the histories of the prompts
    step_seconds = []
    for _ in range(max(STEPS, MOST_DECISIONS // batch)):
        tokens = list(islice(coming, batch))
        hits = [1.0] if level == DRAFTER else []
        begin = time.perf_counter()
        for request, token in zip(requests, tokens, strict=True):
            request.committed([token], hits)
        policy.select_jointly(features_of(requests, level))
        step_seconds.append(time.perf_counter() - begin)
    return statistics.median(step_seconds)
