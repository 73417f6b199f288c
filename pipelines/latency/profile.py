"""The run's latency profile, its kind of decoder, and the time of a selector's decision."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat
from pathlib import Path

import torch

from data_gen import timing
from data_gen.decoding import Rehearsal, decoder_for
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import get_verifier
from pipelines.config import Config
from pipelines.pair.loading import all_prompts, hidden_widths, tokenizer_of
from pipelines.run import verify
from selector.actions import ActionSpace
from selector.decision import LookupRule, Mode
from selector.export.deployed import config_of
from selector.latency import LatencyProfile
from selector.runtime.selector import Selector, Tuned
from selector.schema import FEATURES, FULL, LIGHT, MATCH, InputError
from selector.train.module import SelectorModule

DECISIONS = (MATCH, *FEATURES)  # what the decisions that are timed see
ENDED = "prompts: their continuations end before a second decoding step, which could be timed"


def profile_path(config: Config) -> Path:
    return config.folder / "latency.json"


def context_lengths(config: Config) -> tuple[int, ...]:
    """The contexts that are timed, ascending: a short prompt, one of mean length half-way through its text, and the end
    of the longest text. Times are linear in between."""
    tokenizer, form, new = tokenizer_of(config), config.prompts.form, config.data.tokens
    kept, _ = form.fit(tokenizer, all_prompts(config))
    ordered = sorted(len(form.cut(tokenizer, ids)) for ids in form.whole(tokenizer, kept))
    short, mean = max(1, ordered[len(ordered) // 10]), sum(ordered) // len(ordered) + new // 2
    return tuple(sorted({short, max(short, mean), max(short, ordered[-1]) + new}))


def load_profile(config: Config, pair: ModelPair | None = None) -> LatencyProfile:
    """The run's profile; sets `pair.decoder` to the kind of decoder that was timed. InputError where it was measured on
    another machine or with another pair."""
    path = profile_path(config)
    verify(config, "latency")
    profile = LatencyProfile.load(path)
    here = timing.device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    if profile.device != here:
        raise InputError(f"{path} was measured on {profile.device}; this is {here}: run the latency stage again")
    if pair is not None:
        if profile.pair != pair.fingerprint:
            raise InputError(f"{path} was measured with another pair: run the latency stage again")
        pair.decoder = profile.decoder
    return profile


def decision_seconds(
    config: Config,
    pair: ModelPair,
    profile: LatencyProfile,
    level: str,
    prompt: list[int],
    tokens: int,
    texts: int,
    drafted: int = 6,
) -> float:
    """Mean time of a decision in real decoding, features included: by the lookup rule for the level `match`, else by an
    untrained network, which may choose chains and lookups, as on most machines. Each of so many texts has so many new
    tokens, and every step drafts `drafted` tokens."""
    space, verifier = replace(pair.trees, lookups=ActionSpace.with_lookups().lookups), config.train.verifier
    widths = hidden_widths(config) if level == FULL else []
    level_of = FULL if widths else LIGHT
    module = SelectorModule("regressor", level_of, widths, config.train.network, space=space.to_json()).eval()
    chains = map(space.index, map(space.chain, range(space.depth + 1)))
    allowed = (*chains, *range(len(space.trees), len(space)))
    rule = LookupRule(2, space.lookups[-1]) if level == MATCH else None
    mode = Mode(Sampling(), space.chain(4), () if rule else (level,), 100.0, allowed=allowed, rule=rule)
    selector = Selector(module.state_dict(), config_of(module, verifier, mode.action, [mode]), profile, [mode])
    chooser = Rehearsal(Tuned(mode, selector), repeat(space.chain(drafted)))
    length = len(prompt) + tokens
    decoder = decoder_for(pair, Sampling(), get_verifier(verifier), chooser, length, timed=True)
    generator = torch.Generator(device=pair.device).manual_seed(0)
    steps = [step for _ in range(texts) for step in decoder.decode(prompt, tokens, generator).steps[2:]]
    if not steps:
        raise InputError(ENDED)
    return timing.usual([step.seconds["select"] for step in steps])
