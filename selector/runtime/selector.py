"""A loaded selector: it makes the decisions of an artefact directory and needs only torch and
NumPy.

At one root it decides over NumPy arrays, by the forward pass of `selector.train.network` and the
rule of `selector.decision`, because the dozens of calls cost torch ten times as much.

Requests that are decoded together share the draft's forward passes. A step in which nothing is
drafted takes f seconds; drafting adds c once, each of the draft's forward passes p, and each
verified token of one request t:

    T = f(contexts) + c [max_b passes_b > 0] + p max_b passes_b + t sum_b drafted_b.

At the speed g of the whole batch, a verified token costs `g t` tokens, and a pass of the draft
`g p`. For each number m of passes, every request takes its best action with up to m passes. The m
with the largest sum minus `g (c + p m)` is chosen.

Legend: B roots or requests, A actions, K those that may be chosen, T trees, F scalars, D hidden
width, I inputs and O outputs of a layer, S survivals, L context lengths, C contexts, V verified
tokens.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selector.actions import Action
from selector.decision import NETWORK, NEVER, STATIC, Mode, nearest
from selector.latency import LatencyProfile
from selector.runtime import artefact
from selector.runtime.artefact import ArtefactConfig, Features, checked
from selector.runtime.tokens import TokenStatistics
from selector.sampling import Sampling
from selector.schema import DRAFTER, LOG, MATCH, SCALARS_KEY, TEXT, InputError

Array = NDArray[Any]
ASKED_BY = ("temperature", "top_p", "batch")  # scalars that tell which mode decides
EPSILON = 1e-5  # of torch's layer norm


class StepClock(NamedTuple):
    """Times of the steps of a batch of one size, in seconds."""

    contexts_C: Array  # context lengths, ascending, at least two
    draft_C: Array  # one forward pass of the draft
    drafting_C: Array  # once in a step that drafts
    verified_V: Array  # mean verified tokens of a request, ascending
    target_CV: Array  # the rest of a step, by verified tokens

    def prices(self, context: float, batch: int) -> list[float]:
        """Seconds of one more verified token of one request, of one forward pass of the draft over
        all, and of drafting once, at a mean context."""
        times = self.token_C / batch, self.draft_C, self.drafting_C
        return [float(np.interp(context, self.contexts_C, seconds_C)) for seconds_C in times]

    @property
    def token_C(self) -> Array:
        """Seconds of one more verified token of every request."""
        more_tokens = self.verified_V[-1] - self.verified_V[0]
        return (self.target_CV[:, -1] - self.target_CV[:, 0]) / more_tokens


def step_clock(profile: LatencyProfile, batch: int) -> StepClock:
    """The clock of a batch size; InputError where the profile holds times of one request alone."""
    batch_profile = profile.at_batch(batch)
    draft = batch_profile.draft
    target = batch_profile.target
    lengths = target.lengths
    if len(lengths) == 1:  # a clock has at least two
        lengths = [*lengths, lengths[0] + 1]
    draft_rows = []
    target_rows = []
    for length in lengths:
        draft_rows.append([draft.at(length, 1), draft.at(length, 2)])
        target_rows.append([target.at(length, size) for size in target.sizes])
    draft_C2 = np.array(draft_rows)
    return StepClock(
        contexts_C=np.array(lengths, float),
        draft_C=draft_C2[:, 0],
        drafting_C=draft_C2[:, 1] - draft_C2[:, 0],
        verified_V=np.array(target.sizes, float),
        target_CV=np.array(target_rows),
    )


class Shapes(NamedTuple):
    """Drafted tokens of chains and lookups, and the draft's forward passes for them."""

    drafted_A: Array
    passes_A: Array
    copies_A: Array  # whether the action is a lookup

    @classmethod
    def of(cls, actions: Collection[Action]) -> Shapes:
        """Raises ValueError where an action has branches."""
        if any(action.K > 1 for action in actions):
            raise ValueError("requests of one batch draft chains or lookups, not trees")
        drafted_A = np.array([action.nodes for action in actions])
        copies_A = np.array([action.copies for action in actions])
        return cls(drafted_A, np.where(copies_A, 0, drafted_A), copies_A)


def joint_choice(
    tokens_BA: Array,
    shapes: Shapes,
    speed: float,
    token_seconds: float,
    pass_seconds: float,
    once_seconds: float = 0.0,
) -> Array:
    """Positions of the requests' actions, int64 [B], from predicted block efficiencies, float64;
    `speed` is g, and the times are those of `StepClock.prices`. Replay compiles it."""
    order_A = np.argsort(shapes.passes_A, kind="mergesort")  # stable: ties keep their order
    passes_A = shapes.passes_A[order_A]
    worth_AB = (tokens_BA - speed * token_seconds * shapes.drafted_A).T.copy()[order_A]
    best_AB = worth_AB.copy()  # running maximum: the best action with at most as many passes
    for a in range(1, len(best_AB)):
        best_AB[a] = np.maximum(best_AB[a - 1], best_AB[a])
    shared_A = speed * (pass_seconds * passes_A + once_seconds * (passes_A > 0))
    last = (best_AB.sum(axis=1) - shared_A).argmax()
    return order_A[worth_AB[: last + 1].argmax(axis=0)]


class Selector:
    """A loaded selector.

    Attributes:
        actions: the action table; `scores` follows its order.
        feature_levels: the level of the features that `select` and `scores` take: `light`, `full`
            or `drafter`.
        fallback: the action for a root without features.
        latency: the profile that the decisions are based on.
        tokens: statistics by token, for the features of a log's selector.
        weights: of the network, arrays or tensors, by the names in `model.safetensors`.
        widths: of the features, by name.
    """

    def __init__(
        self,
        weights: Mapping[str, Any],
        config: ArtefactConfig,
        latency: LatencyProfile,
        modes: Sequence[Mode],
        tokens: TokenStatistics | None = None,
    ) -> None:
        self.weights = weights
        self.config = config
        self.latency = latency
        self.modes = list(modes)
        self.space = config.space
        self.schema = config.schema
        self.verifier = config.verifier
        self.actions = config.space.actions
        self.fallback = config.fallback
        self.feature_levels: tuple[str, ...] = (config.feature_level,)
        self.tokens = TokenStatistics.empty() if tokens is None else tokens
        self.widths = {SCALARS_KEY: len(config.schema.scalars), **config.hidden_states}
        self._known: dict[tuple[float, float, float, str], Tuned] = {}

    def __repr__(self) -> str:
        config = self.config
        settings = dict.fromkeys(str(mode.sampling) for mode in self.modes)
        return (
            f"Selector({config.pair['target']} / {config.pair['draft']}, {self.verifier}; "
            f"a {config.objective} with {config.feature_level} features, "
            f"{len(self.actions)} actions; {'; '.join(settings)})"
        )

    def select(self, features: Features | None) -> Action:
        """The action for one root; `fallback` without features. The mode that is nearest to the
        features' sampling setting and number of requests decides, as `Tuned.select`.

        `features` are `{name: tensor}` as in the schema, float32 [F] and [D], or the scalars of its
        first level alone. Raises InputError where one is missing, of another shape or dtype, or not
        finite, or a setting is out of range.
        """
        if features is None:
            return self.fallback
        tuned = self._tuned_of(checked(features, self.widths, 1, self.schema.first))
        chosen = tuned.select(features, final=True)
        assert chosen is not None
        return chosen

    def scores(self, features: Features) -> Tensor:
        """Scores of all actions, float32 [A], or [B, A] for a batch. The highest is chosen.

        Those of a regressor are `E - price T` in tokens. Actions that may not be chosen have
        `decision.NEVER`. Raises InputError as `select`.
        """
        read = checked(features, self.widths, 2, self.schema.first)
        if read[SCALARS_KEY].dim() == 1:
            return torch.from_numpy(self._tuned_of(read).scores(read))
        scores = []
        for values in zip(*read.values(), strict=True):
            root = dict(zip(read, values, strict=True))
            scores.append(self.scores(root))
        return torch.stack(scores)

    def _tuned_of(self, read: Features) -> Tuned:
        scalars_F = read[SCALARS_KEY].numpy()
        temperature, top_p, batch = (scalars_F[self.schema.index(name)].item() for name in ASKED_BY)
        level = ""
        if self.schema == LOG:
            first_level, second_level = self.schema.levels
            level = second_level if len(scalars_F) > self.schema.first else first_level
        asked = temperature, top_p, batch, level
        if asked not in self._known:
            modes = [mode for mode in self.modes if mode.level == level]
            if not modes:
                modes = self.modes
            mode = nearest(modes, Sampling(temperature, top_p), batch)
            self._known[asked] = Tuned(mode, self)
        return self._known[asked]

    def at(
        self,
        temperature: float,
        top_p: float = 1.0,
        shapes: Iterable[tuple[Any, ...]] | None = None,
        batch: int = 1,
        level: str | None = None,
        top_k: int = 0,
        min_p: float = 0.0,
    ) -> Tuned:
        """The selector under the mode that is nearest to a sampling setting and a number of
        requests.

        Where no mode covers the setting (`Sampling.covers`), the lookup rule and the static tree of
        the nearest one decide: they lose less there than a network outside of its training data. A
        warning says so, once.

        Args:
            shapes: the actions that an engine can draft, `(K, L1, L2)` or `(K, L1, L2, style)`;
                None for all.
            level: `text` or `drafter`, for a log's selector; None to use the level of the features
                that are given.

        Raises:
            InputError: the setting, the batch or the level is out of range, no tree is left, or a
                shape is not in the action space.
        """
        asked = Sampling(temperature, top_p, top_k, min_p)
        less: Tuned | None = None
        if self.schema == LOG and level is None:
            if shapes is not None:
                shapes = list(shapes)  # they are read twice
            less = self.at(temperature, top_p, shapes, batch, TEXT, top_k, min_p)
            level = DRAFTER
        modes = [mode for mode in self.modes if level is None or mode.level == level]
        if not modes:
            raise InputError(f"level {level}: this selector has none of that level")
        mode = nearest(modes, asked, batch)
        if not covered(mode, asked):
            mode = mode.without_network()
        if shapes is not None:
            mode = self._restricted(mode, shapes)
        return Tuned(mode, self, less)

    def _restricted(self, mode: Mode, shapes: Iterable[tuple[Any, ...]]) -> Mode:
        try:
            positions = {self.space.index(Action.of(shape)) for shape in shapes}
        except (ValueError, TypeError) as error:
            raise InputError(f"shapes: {error}") from error
        if min(positions, default=len(self.actions)) >= len(self.space.trees):
            raise InputError("shapes: no tree is left")
        speed_T = self.config.static_speeds(mode, self.latency)
        return mode.restricted(self.space, positions, speed_T)

    def check_pair(
        self, target: str, draft: str, device: str = "", weights: Sequence[str] = ()
    ) -> None:
        """Warn, once, where the models or the machine are not those that the selector was trained
        for.

        Args:
            target, draft: directories or hub ids of the models that decode. Of paths the last part
                is compared, and only where the weights are not known.
            device: as `LatencyProfile.device`, of which the part before the first comma is
                compared; "" if not known.
            weights: as `LatencyProfile.weights`, of the models that decode.
        """
        trained = [str(self.config.pair.get(role)) for role in ("target", "draft")]
        decoding = [target, draft]
        if weights and self.latency.weights:
            same = list(weights) == self.latency.weights
            for i, name in enumerate(decoding):
                if name in trained:  # or the warning would name the same models twice
                    decoding[i] = f"{name} with other weights"
        else:
            same = [Path(name).name for name in trained] == [Path(name).name for name in decoding]
        if not same:
            warn_once(
                f"the selector was trained for {' and '.join(trained)}; "
                f"{' and '.join(decoding)} decode"
            )
        timed_on = self.latency.device.partition(",")[0]
        decodes_on = device.partition(",")[0]
        if decodes_on not in ("", timed_on):
            warn_once(f"the selector has the step times of {timed_on}; {decodes_on} decodes")


def load_selector(
    folder: str | Path, latency: str | Path | LatencyProfile | None = None
) -> Selector:
    """Reads an artefact directory.

    Args:
        folder: the directory, the id of a repository on the hub, or `models:/name/version` or
            `models:/name@alias` of MLflow's registry.
        latency: another machine's profile, whose step times, static trees and price of time are
            used; all actions are then allowed. None for the directory's own.

    Raises:
        InputError: a file is missing, damaged or of another schema version, the download fails, or
            the profile is of another pair or lacks the verifier.
    """
    folder = artefact.local_folder(folder)
    artefact.check_files(folder)
    config = artefact.read_config(folder / "config.json")
    artefact_profile = LatencyProfile.load(folder / "latency.json")
    profile = artefact_profile
    if isinstance(latency, LatencyProfile):
        profile = latency
    elif latency is not None:
        profile = LatencyProfile.load(Path(latency))
    if profile.pair != config.pair["fingerprint"]:
        raise InputError(f"{folder}: the latency profile was measured with another pair")
    modes = list(config.modes)
    if profile != artefact_profile:
        modes = [_moved(config, mode, profile, artefact_profile) for mode in modes]
    weights = artefact.read_weights(folder / "model.safetensors", config)
    return Selector(weights, config, profile, modes, TokenStatistics.load(folder))


def _moved(
    config: ArtefactConfig, mode: Mode, latency: LatencyProfile, before: LatencyProfile
) -> Mode:
    if config.verifier not in latency.verify:
        raise InputError(
            f"the latency profile of {latency.device} has no times for {config.verifier}"
        )
    speed_T = config.static_speeds(mode, latency)
    speed_before_T = config.static_speeds(mode, before)
    best = int(speed_T.argmax())
    ratio = float(speed_T[best] / speed_before_T[config.space.index(mode.action)])
    return replace(mode.faster(ratio), action=config.space.trees[best], allowed=())


class Tuned:
    """A selector under one sampling setting, for one root or several; a lookup rule or a static
    tree needs no selector.

    Call `select` with the features of each of `feature_levels` in turn until it returns an action.
    On texts of more than `longest` tokens, if it is not 0, a network's mode needs the match alone.
    Where only features of the schema's first level are given, `less` decides instead, if there is
    one.
    """

    def __init__(
        self, mode: Mode, selector: Selector | None = None, less: Tuned | None = None
    ) -> None:
        if mode.decider == NETWORK and selector is None:
            raise InputError("a network's decisions need its selector")
        self.mode = mode
        self.feature_levels = mode.asked
        self.longest = mode.longest
        self._decider = mode.decider
        self._sees_all = mode.sees_all
        self._selector = selector
        self._less = less
        self._at_root: dict[bool, OneRoot] = {}
        self._covers = lru_cache(self._covers_setting)

    def select(self, features: Features | None, final: bool = False) -> Action | None:
        """The action at a root; the static tree without features; None where only features of the
        first level are given and the decision needs all, which are known after the draft's forward
        pass over the root. If these are `final`, there will be no more features at this root, and
        it decides by them.

        Outside the text lengths and the sampling settings of the training, the lookup rule and the
        static tree decide; outside the settings a warning says so, once. Raises InputError where a
        feature is missing, of another shape or dtype, or not finite.
        """
        mode = self.mode
        if features is None or self._decider == STATIC:
            return mode.action
        if MATCH in features and (mode.rule is not None or mode.longest > 0):
            match = float(features[MATCH])
            if not math.isfinite(match):
                raise InputError("features: match is not finite")
            return mode.copied(match)
        if self._only_first(features):
            return self._less.select(features, final)  # type: ignore[union-attr]
        read = self._read(features)
        if self._is_beyond(read):
            return mode.copied(self._scalar(read, MATCH))
        at_root = self._root_of(read)
        worth_K = at_root.worth(read, self._allowed_K)
        action = self._own.actions[self._allowed_K[worth_K.argmax()]]
        asked_again = at_root.early and len(mode.feature_levels) > 1 and not final
        if asked_again and action.drafts:
            return None
        return action

    def scores(self, features: Features) -> NDArray[np.float32]:
        """What each action is worth at one root, [A]: as `Selector.scores`. Raises InputError as
        `select`."""
        if self._only_first(features):
            return self._less.scores(features)  # type: ignore[union-attr]
        read = self._read(features)
        positions_K = self._allowed_K
        if self._is_beyond(read):
            action = self.mode.copied(self._scalar(read, MATCH))
            positions_K = np.array([self._own.space.index(action)])
        scores_A = np.full(len(self._own.actions), NEVER, np.float32)
        scores_A[positions_K] = self._root_of(read).worth(read, positions_K)
        return scores_A

    def select_jointly(self, features: Sequence[Features]) -> list[Action]:
        """The choices of requests that share draft passes, from the features of each; InputError as
        `select`."""
        mode = self.mode
        if not features:
            return []
        if all(map(self._only_first, features)):
            return self._less.select_jointly(features)  # type: ignore[union-attr]
        if not mode.joint:
            choices = []
            for request_features in features:
                choice = self.select(request_features)
                if choice is not None:
                    choices.append(choice)
            return choices
        shapes, clock = self._shared
        tokens_BA, length = self._predicted(features)
        tokens_BK = tokens_BA[:, self._allowed_K].astype(np.float64)
        prices = clock.prices(length, mode.batch)
        chosen_B = joint_choice(tokens_BK, shapes, mode.joint, *prices)
        return [self._own.actions[a] for a in self._allowed_K[chosen_B]]

    def _predicted(self, features: Sequence[Features]) -> tuple[Array, float]:
        # block efficiencies of all actions for each request, [B, A], and the mean context length
        stacked: Features = {}
        try:
            for name in self._own.widths:
                if all(name in request_features for request_features in features):
                    values_B = [request_features[name] for request_features in features]
                    stacked[name] = torch.stack(values_B)
        except (TypeError, RuntimeError) as error:
            for request_features in features:
                self._read(request_features)  # the one that is wrong says so
            raise InputError("features: requests of one batch know different ones") from error
        read = checked(stacked, self._own.widths, 2, self._own.schema.first)
        at_root = self._root_of(read)
        tokens_BA = at_root.tokens(read)
        mean_length = float(read[SCALARS_KEY][:, at_root.length_at].mean())
        return tokens_BA, mean_length

    @property
    def _own(self) -> Selector:
        if self._selector is None:
            raise InputError("features: match is missing")
        return self._selector

    @cached_property
    def _allowed_K(self) -> Array:
        return np.array(self.mode.allowed or range(len(self._own.actions)))

    @cached_property
    def _shared(self) -> tuple[Shapes, StepClock]:
        shapes = Shapes.of([self._own.actions[a] for a in self._allowed_K])
        return shapes, step_clock(self._own.latency, self.mode.batch)

    def _only_first(self, features: Features) -> bool:
        return (
            self._less is not None and len(features.get(SCALARS_KEY, ())) == self._own.schema.first
        )

    def _root_of(self, read: Features) -> OneRoot:
        # for the features' level, or the mode's where that is lower
        selector = self._own
        early = read[SCALARS_KEY].shape[-1] == selector.schema.first or not self._sees_all
        if early not in self._at_root:
            self._at_root[early] = OneRoot(selector, self.mode, early)
        return self._at_root[early]

    def _read(self, features: Features) -> Features:
        return checked(features, self._own.widths, 1, self._own.schema.first)

    def _scalar(self, read: Features, name: str) -> float:
        return float(read[SCALARS_KEY][self._own.schema.index(name)])

    def _is_beyond(self, read: Features) -> bool:
        if self._decider != NETWORK:
            return True
        temperature = self._scalar(read, "temperature")
        top_p = self._scalar(read, "top_p")
        if not self._covers(temperature, top_p):
            return True
        return 0 < self.longest < self._scalar(read, "context_length")

    def _covers_setting(self, temperature: float, top_p: float) -> bool:
        asked = replace(self.mode.sampling, temperature=temperature, top_p=top_p)
        return covered(self.mode, asked, "features: ")


def covered(mode: Mode, asked: Sampling, where: str = "") -> bool:
    """Whether a mode was trained for a setting like this one; a warning says, once, where it was
    not."""
    near = mode.sampling.covers(asked)
    if not near:
        words = f"{where}{asked}: too far from the trained {mode.sampling}"
        warn_once(f"{words}; its lookup rule and {mode.action} decide")
    return near


@cache
def warn_once(message: str) -> None:
    """A warning that a process gives once, whatever its filters are."""
    warnings.warn(message, stacklevel=3)


class OneRoot:
    """What actions are worth at one root, or at those of a batch, under one mode, from the early
    features or all."""

    def __init__(self, selector: Selector, mode: Mode, early: bool) -> None:
        config = selector.config
        schema = selector.schema
        self.early = early
        self._mode = mode
        self._regressor = config.regressor
        if early:
            self._F = schema.first
            self._hidden_states: list[str] = []
            self._passed = np.ones(0, np.float32)
        else:
            self._F = len(schema.scalars)
            self._hidden_states = list(config.hidden_states)
            self._passed = np.ones(1, np.float32)  # the input that says so
        self.length_at = schema.index("context_length")
        self._read_weights(selector)
        self._factors_SS = config.space.survival_factors().numpy()
        self._sums_SA = config.space.sums_SA.numpy()
        asked = [level for level in mode.feature_levels if not early or level == schema.levels[0]]
        times = selector.latency.at_batch(mode.batch)
        lengths_L, seconds_LA = times.table(
            selector.actions, selector.verifier, asked, mode.sampling
        )
        self._lengths_L = lengths_L.double().numpy()
        self._seconds_LA = seconds_LA.double().numpy()

    def _read_weights(self, selector: Selector) -> None:
        arrays: dict[str, Array] = {}
        for name, entry in selector.weights.items():
            arrays[name.removeprefix(selector.config.prefix)] = np.asarray(entry)
        self._count_F = arrays["count_F"][: self._F]
        self._low_F = arrays["low_F"][: self._F]
        self._high_F = arrays["high_F"][: self._F]
        self._mean_F = arrays["mean_F"][: self._F]
        self._scale_F = arrays["scale_F"][: self._F]
        parts = ("0.weight", "0.bias", "1.weight", "1.bias")  # a linear map and a layer norm
        self._blocks: list[list[Array]] = []
        for i in range(len(self._hidden_states)):
            self._blocks.append([arrays[f"blocks.{i}.{part}"] for part in parts])
        numbers = sorted({int(name.split(".")[1]) for name in arrays if name.startswith("mlp.")})
        self._layers = [(arrays[f"mlp.{i}.weight"], arrays[f"mlp.{i}.bias"]) for i in numbers]
        if self.early:
            weight_OI, bias_O = self._layers[0]
            self._layers[0] = weight_OI[:, : self._F], bias_O

    def worth(self, features: Features, actions_K: Array) -> Array:
        """`E - price T` of some actions in tokens, or a policy's logits, [K]; from float32 tensors
        on the CPU."""
        values_K = self.tokens(features)[actions_K]
        if not self._regressor:
            return values_K
        # `selector.decision.net_tokens` at the root's context length
        lengths_L = self._lengths_L
        length = float(features[SCALARS_KEY][self.length_at])
        length = min(max(length, lengths_L[0]), lengths_L[-1])
        above = max(1, int(np.searchsorted(lengths_L, length)))
        share = (length - lengths_L[above - 1]) / (lengths_L[above] - lengths_L[above - 1])
        low_K, high_K = self._seconds_LA[above - 1 : above + 1, actions_K]
        seconds_K = low_K + share * (high_K - low_K)
        rho = self._mode.rho
        price = self._mode.speed ** (1 - rho) * (values_K / seconds_K).max() ** rho
        net_K: Array = values_K - price * seconds_K
        return net_K

    def tokens(self, features: Features) -> Array:
        """Predicted block efficiencies of all actions, or a policy's logits, [A]; of a batch [B,
        A]."""
        scalars_F = features[SCALARS_KEY].numpy()[..., : self._F]
        scalars_F = np.clip(scalars_F, self._low_F, self._high_F)
        scalars_F = np.where(self._count_F, np.log1p(np.maximum(scalars_F, 0)), scalars_F)
        rows = scalars_F.shape[:-1]
        parts = [
            (scalars_F - self._mean_F) / self._scale_F,
            np.broadcast_to(self._passed, (*rows, len(self._passed))),
        ]
        for name, (weight_OI, bias_O, scale_O, shift_O) in zip(
            self._hidden_states, self._blocks, strict=True
        ):
            values_O = features[name].numpy() @ weight_OI.T + bias_O
            centred_O = values_O - values_O.mean(-1, keepdims=True)
            deviation = np.sqrt(values_O.var(-1, keepdims=True) + EPSILON)
            parts.append(centred_O / deviation * scale_O + shift_O)
        values_I = np.concatenate(parts, axis=-1)
        for number, (weight_OI, bias_O) in enumerate(self._layers):
            if number > 0:
                values_I = np.maximum(values_I, 0) if self._regressor else _gelu(values_I)
            values_I = values_I @ weight_OI.T + bias_O
        if not self._regressor:
            return values_I
        # survivals are products of the probabilities whose logits are the outputs
        # (`SurvivalNetwork`)
        survivals_S = np.exp(-np.logaddexp(0, -values_I) @ self._factors_SS)
        tokens_A: Array = 1 + survivals_S @ self._sums_SA
        return tokens_A


def _gelu(values_I: Array) -> Array:
    cubic_I: Array = values_I + np.float32(0.044715) * values_I**3
    inner_I: Array = np.float32(np.sqrt(2 / np.pi)) * cubic_I
    return np.float32(0.5) * values_I * (1 + np.tanh(inner_I))
