"""What a decision takes in real decoding."""

from __future__ import annotations

import torch

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import Features
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.timing import usual
from data_gen.verification import get_verifier
from pipelines.config import Config
from pipelines.pair.loading import hidden_widths
from selector.actions import Action, ActionSpace, Choice
from selector.decision import Mode
from selector.export.deployed import DeployedSelector, config_of
from selector.latency import LatencyProfile
from selector.runtime.selector import Selector, Tuned
from selector.schema import FULL, LIGHT, InputError
from selector.train.module import SelectorModule


class _Timed:
    """A selector that is asked, and a tree that is drafted whatever it says."""

    def __init__(self, tuned: Tuned, action: Action) -> None:
        self.tuned, self.action, self.feature_levels = tuned, action, tuned.feature_levels

    def select(self, features: Features | None) -> Choice:
        self.tuned.select(features)
        return self.action


def decision_seconds(
    config: Config, pair: ModelPair, profile: LatencyProfile, verifier: str, level: str, prompt: list[int]
) -> float:
    """Usual time of a decision in real decoding, features included.

    The weights of the network do not matter for that, so it is not trained. Chains and lookups may be chosen, as on
    most machines.
    """
    space = ActionSpace.with_lookups()
    widths = hidden_widths(config) if level == FULL else []
    module = SelectorModule("regressor", FULL if widths else LIGHT, widths, config.train.network, 1.0, 0.0).eval()
    chains = [space.index(space.chain(length)) for length in range(space.depth + 1)]
    allowed = (*chains, *range(len(space.trees), len(space)))
    mode = Mode(1.0, 1.0, space.chain(4), feature_levels=(level,), speed=100.0, allowed=allowed)
    made = DeployedSelector(module, profile, [mode], verifier)
    selector = Selector(made, config_of(module, verifier, mode.action, [mode]), profile, [mode])
    chooser = _Timed(Tuned(mode, selector), space.chain(6))
    decoder = Decoder(pair, Sampling(), get_verifier(verifier), chooser, timed=True)
    generator = torch.Generator(device=pair.device).manual_seed(0)
    steps = [step for _ in range(3) for step in decoder.decode(prompt, config.data.tokens, generator).steps[2:]]
    if not steps:
        raise InputError("prompts: their continuations end before a second decoding step, which could be timed")
    return usual([step.seconds["select"] for step in steps])
