"""How much `quick` does: what its parts cost on this machine, from a few measurements, and what fits into its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil

import torch

from data_gen.models.pair import CachedModel, ModelPair
from data_gen.text_labels.labels import block_rows, label_text
from data_gen.texts.labelled import BEYOND, DEPTH
from data_gen.timing import now
from data_gen.verification import VERIFIERS
from pipelines.config import Config
from pipelines.latency.profile import NODES, WIDTHS
from selector.actions import ActionSpace, Choice, choice_of

UNLABELLED, SLOW = ("khisti", "greedy_block"), ("priority", "lifted_priority")  # without labels; with costly ones
USUAL = tuple(name for name in VERIFIERS if name not in (*UNLABELLED, *SLOW))
DEPTHS, BRANCHES = (1, 16), (1, 4)  # of the trees whose verification is timed: it is nearly linear in between
SHAPES = ((1, 0, 0), (1, 2, 0), (1, 8, 8), (2, 2, 4), (4, 8, 8), (4,), (1, 8, 0), (2, 8, 8), (4, 0, 4))
STEPS: list[Choice] = list(map(choice_of, SHAPES))  # whose steps are timed: the largest ones bound what is fitted
CONTEXT = 16  # tokens of a pass over a prompt that is timed
REPEATS, COUNTS = (1, 12), (1, 8)  # fewest and most measurements of a pass, and of a step with each action
ACTIONS = 5, len(STEPS)  # fewest and most actions whose steps are timed
PASSES, REAL = 0.2, 0.15  # the shares of the time that may go to them
ANSWER = 3.0  # seconds to replay the texts of one sampling setting
TIMED = 16  # tokens of such a prompt where time is short
LONG = 0.5  # seconds that are long enough to be measured once
LEAST, ENOUGH = 4, 16  # texts: there are never fewer, and with so many no further saving is made


@dataclass(frozen=True)
class Prices:
    """Seconds on this machine.

    Attributes:
        target, draft: of a pass over one token.
        target_token, draft_token: of each further token of a pass.
        row: of the features of one row of a text, and its labels for the verifiers of `USUAL` together.
        slow: of its labels, by verifier of `SLOW`; empty where there is no time for them in any case.
    """

    target: float
    draft: float
    target_token: float
    draft_token: float
    row: float
    slow: dict[str, float] = field(default_factory=dict)

    @classmethod
    @torch.inference_mode()
    def measured(cls, pair: ModelPair, new: int) -> Prices:
        """From some passes of each model, and the labels of some rows."""
        tokens = torch.arange(CONTEXT).remainder(pair.vocabulary).tolist()
        passes = []
        for model in (CachedModel(pair.target), CachedModel(pair.draft)):
            one, many = (_seconds(pair, partial(model.extend, part)) for part in (tokens[:1], tokens))
            passes.append((one, max(0.0, many - one) / (CONTEXT - 1)))
        (target, target_token), (draft, draft_token) = passes
        return cls(target, draft, target_token, draft_token, _label_seconds(pair, new, USUAL))

    def with_slow(self, pair: ModelPair, new: int) -> Prices:
        """With the prices of costly verifiers, which take long to measure, too."""
        base = _label_seconds(pair, new, USUAL[:1])
        return replace(self, slow={name: max(0.0, _label_seconds(pair, new, [name]) - base) for name in SLOW})

    def texts(self, sizes: Sizes, lengths: Sequence[int], batch: int) -> float:
        """To write and label the texts of one sampling setting; `lengths` of the prompts, `batch` texts at once."""
        prompt, rows = sum(min(length, sizes.prompt) for length in lengths) / len(lengths), sizes.tokens + DEPTH
        together = min(batch, sizes.texts)
        a_step = self.target + (together - 1) * self.target_token
        written = sizes.texts * prompt * self.target_token
        written += ceil(sizes.texts / batch) * (sizes.tokens + BEYOND) * a_step
        row = self.target_token + self.draft_token
        labels = self.row + sum(self.slow.get(name, 0.0) for name in sizes.verifiers)
        few, roots = sizes.compared
        a_root = 1 + ActionSpace.default().max_L2
        compared = few * (prompt * self.draft_token + roots * a_root * (self.draft + 3 * self.draft_token))
        return written + compared + sizes.texts * ((prompt + rows) * row + rows * labels)

    def passes(self, verifiers: int) -> float:
        """To measure every pass and verification once: before each of them the other model passes."""
        cells = (verifiers * len(BRANCHES) + 1) * len(DEPTHS) + 2
        drafts = len(WIDTHS) * (self.target + 4 * self.draft)
        targets = sum(self.draft + self.target + nodes * self.target_token for nodes in NODES)
        return cells * 1.2 * self.target + drafts + targets

    def steps(self, sizes: Sizes) -> float:
        """To time steps with each action after a slow one, those of plain decoding once more, and decisions."""
        step = self.target + 10 * self.draft + 20 * self.target_token
        filled = sizes.context * (self.target_token + self.draft_token)
        decisions = 2 * (filled + sizes.decision * (self.target + self.draft))
        return sizes.prompts * (sizes.actions + 3) * (filled + (sizes.count + 1) * step) + decisions

    def machine(self, sizes: Sizes) -> float:
        """To measure everything that does not depend on texts."""
        return sizes.repeats * self.passes(len(sizes.verifiers)) + self.steps(sizes)


@torch.inference_mode()
def _label_seconds(pair: ModelPair, new: int, names: Sequence[str]) -> float:
    """Of a random row's labels: of a block of them, or of a text with `new` labelled tokens if that is less."""
    rows = min(new + DEPTH, block_rows(pair.vocabulary))
    generator = torch.Generator(device=pair.device).manual_seed(0)
    logits = 3 * torch.randn(2, rows, pair.vocabulary, generator=generator, device=pair.device)

    def work() -> None:
        p_TV, q_TV = logits[0].softmax(-1), logits[1].softmax(-1)
        tokens_T, siblings = p_TV.argmax(-1).roll(1), torch.Generator().manual_seed(0)
        label_text(tokens_T, p_TV, q_TV, names, generator=siblings, space=ActionSpace.recorded())

    return _seconds(pair, work) / rows


def _seconds(pair: ModelPair, work: Callable[[], object]) -> float:
    """The quicker one of two runs, or of one that takes long, after one that warms up and compiles."""
    seconds = []
    for _ in range(3):
        start = now(pair)
        work()
        seconds.append(now(pair) - start)
        if len(seconds) > 1 and seconds[-1] > LONG:
            break
    return min(seconds[1:])


@dataclass(frozen=True)
class Sizes:
    """What is done under each sampling setting, and how often the machine is measured.

    Attributes:
        texts, tokens: how many texts, and labelled tokens of each.
        prompt: tokens of the longest prompt.
        repeats, count: measurements of every pass, and of a step with each of the first `actions` of `STEPS`.
        seconds: that all of it is expected to take.
        least: that it takes with one sampling setting alone.
    """

    texts: int
    tokens: int
    prompt: int
    verifiers: tuple[str, ...] = (*USUAL, *SLOW)
    repeats: int = REPEATS[1]
    count: int = COUNTS[1]
    actions: int = ACTIONS[1]
    seconds: float = 0.0
    least: float = 0.0

    @property
    def prompts(self) -> int:
        """After how many prompts steps are timed."""
        return 2 if self.count == COUNTS[1] else 1

    @property
    def context(self) -> int:
        """Tokens of the longest prompt after which steps are timed."""
        return self.prompt if self.count == COUNTS[1] else min(self.prompt, TIMED)

    @property
    def decision(self) -> int:
        """Tokens of the texts on which a decision is timed."""
        return 12 if self.count == COUNTS[1] else 6

    @property
    def compared(self) -> tuple[int, int]:
        """Of how many texts, and at how many roots of each, branches are compared."""
        return (2, 8) if self.count == COUNTS[1] else (1, 4)

    def left_out(self, config: Config, lengths: Sequence[int], written: Sequence[int]) -> list[str]:
        """In words, what is not done because there is no time for it.

        Args:
            written: the texts under each sampling setting that there was time for.
        """
        found = []
        wanted, longer = min(config.quick.texts, len(lengths)), sum(length > self.prompt for length in lengths)
        if skipped := config.sampling[len(written) :]:
            found.append(f"the sampling settings {', '.join(str(each.build()) for each in skipped)}")
        if any(texts < wanted for texts in written):
            each = " under each sampling setting" if len(written) > 1 else ""
            found.append(f"{wanted - min(written)} of {wanted} texts{each}")
        if self.tokens < config.data.tokens:
            found.append(f"{config.data.tokens - self.tokens} of {config.data.tokens} tokens of each text")
        if longer:
            what = "left out" if config.prompts.longer == "drop" else f"cut to their {config.prompts.longer}"
            found.append(f"prompts of more than {self.prompt} tokens: {longer} of {len(lengths)} are {what}")
        if dropped := [name for name in SLOW if name not in self.verifiers]:
            found.append(f"the verifiers {' and '.join(dropped)}, whose labels take longest")
        if self.actions < ACTIONS[1]:
            found.append(f"decoding steps with {ACTIONS[1] - self.actions} of {ACTIONS[1]} trees, which are not timed")
        return found


def fitting(
    config: Config, prices: Prices, lengths: Sequence[int], seconds: float, timed: Sizes | None = None
) -> Sizes:
    """What fits into some seconds. Costly verifiers are given up first; then long prompts, long texts, and texts.

    Args:
        lengths: of the prompts, in tokens; there are no more texts than prompts.
        timed: with these sizes the machine has been measured already.
    """
    tokens, longest = config.data.tokens, max(lengths)
    kept = tuple(name for name in (*USUAL, *SLOW) if name in USUAL or name == config.train.verifier)
    # a prompt in a chat template cannot be cut, so the limit leaves enough of them
    least = sorted(lengths)[: config.quick.texts][-1] if config.prompts.longer == "drop" else 0
    rungs = [Sizes(0, tokens, longest)] if prices.slow else []
    rungs += [Sizes(0, tokens, longest, kept)]
    rungs += [
        Sizes(0, min(tokens, new), min(longest, max(prompt, least)), kept)
        for prompt, new in ((512, 128), (256, 64), (128, 48), (128, 32), (64, 16), (32, 16), (32, 8))
    ]
    if timed is not None:
        rungs = [replace(rung, verifiers=timed.verifiers) for rung in rungs]
    wanted = min(config.quick.texts, len(lengths))
    for rung in rungs:
        found = _most_texts(config, prices, lengths, seconds, rung, timed)
        if found.seconds <= seconds and found.texts >= min(ENOUGH, wanted):
            break
    return found


def _most_texts(
    config: Config, prices: Prices, lengths: Sequence[int], seconds: float, rung: Sizes, timed: Sizes | None
) -> Sizes:
    """As many texts as there is time for, but at least `LEAST`."""
    wanted = min(config.quick.texts, len(lengths))
    if timed is None:
        rung = _measurements(prices, seconds, rung)
        machine = prices.machine(rung)
    else:
        rung, machine = replace(rung, repeats=timed.repeats, count=timed.count, actions=timed.actions), 0.0
    for texts in range(wanted, 0, -1):
        found = replace(rung, texts=texts)
        each = prices.texts(found, lengths, config.data.texts_per_shard) + ANSWER
        found = replace(found, seconds=machine + len(config.sampling) * each, least=machine + each)
        if found.seconds <= seconds or texts <= LEAST:
            break
    return found


def _measurements(prices: Prices, seconds: float, rung: Sizes) -> Sizes:
    """As many measurements of the machine as there is time for."""
    repeats = min(max(int(PASSES * seconds / prices.passes(len(rung.verifiers))), REPEATS[0]), REPEATS[1])
    few, most = ACTIONS
    tried = [replace(rung, repeats=repeats, count=count) for count in range(COUNTS[1], COUNTS[0] - 1, -1)]
    tried = [each for each in tried if each.count > COUNTS[0]] + [replace(tried[-1], actions=n) for n in (most, few)]
    return next((each for each in tried if prices.steps(each) < REAL * seconds), tried[-1])
