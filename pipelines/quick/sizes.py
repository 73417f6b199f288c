"""How much `quick` does: what its parts cost on this machine, from a few measurements, and what fits into its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
SHAPES = ((1, 0, 0), (1, 2, 0), (1, 8, 0), (1, 8, 8), (2, 2, 4), (2, 8, 8), (4, 0, 4), (4, 8, 8), (4,))
STEPS: list[Choice] = list(map(choice_of, SHAPES))  # whose steps are timed: the largest ones bound what is fitted
CONTEXT = 64  # tokens of a pass over a prompt that is timed
REPEATS, COUNTS = (2, 12), (3, 8)  # fewest and most measurements of a pass, and of a step with each action
PASSES, REAL = 0.2, 0.15  # the shares of the time that may go to them
TEXTS, ROOTS = 2, 8  # texts, and roots of each, at which branches are compared
DECISION = 12  # tokens of the texts on which a decision is timed
ANSWER = 3.0  # seconds to replay the texts of one sampling setting
LEAST, ENOUGH = 8, 16  # texts: there are never fewer, and with so many no further saving is made


@dataclass(frozen=True)
class Prices:
    """Seconds on this machine.

    Attributes:
        target, draft: of a pass over one token.
        target_token, draft_token: of each further token of a pass.
        row: of the features of one row of a text, and its labels for the verifiers of `USUAL` together.
        slow: of its labels, by verifier of `SLOW`.
    """

    target: float
    draft: float
    target_token: float
    draft_token: float
    row: float
    slow: dict[str, float]

    @classmethod
    @torch.inference_mode()
    def measured(cls, pair: ModelPair, new: int) -> Prices:
        """From some passes of each model, and the labels of random rows: of a block of them, or of a text with `new`
        labelled tokens if that is less."""
        generator = torch.Generator(device=pair.device).manual_seed(0)
        tokens = torch.arange(CONTEXT).remainder(pair.vocabulary).tolist()
        passes = []
        for model in (CachedModel(pair.target), CachedModel(pair.draft)):
            one, many = (_seconds(pair, partial(model.extend, part)) for part in (tokens[:1], tokens))
            passes.append((one, max(0.0, many - one) / (CONTEXT - 1)))
        (target, target_token), (draft, draft_token) = passes
        rows = min(new + DEPTH, block_rows(pair.vocabulary))
        logits = 3 * torch.randn(2, rows, pair.vocabulary, generator=generator, device=pair.device)

        def labels(names: Sequence[str]) -> float:
            def work() -> None:
                p_TV, q_TV = logits[0].softmax(-1), logits[1].softmax(-1)
                label_text(p_TV.argmax(-1).roll(1), p_TV, q_TV, names, generator=torch.Generator().manual_seed(0))

            return _seconds(pair, work) / rows

        base = labels(USUAL[:1])
        slow = {name: max(0.0, labels([name]) - base) for name in SLOW}
        return cls(target, draft, target_token, draft_token, labels(USUAL), slow)

    def texts(self, sizes: Sizes, lengths: Sequence[int], batch: int) -> float:
        """To write and label the texts of one sampling setting; `lengths` of the prompts, `batch` texts at once."""
        prompt, rows = sum(min(length, sizes.prompt) for length in lengths) / len(lengths), sizes.tokens + DEPTH
        together = min(batch, sizes.texts)
        a_step = self.target + (together - 1) * self.target_token
        written = sizes.texts * prompt * self.target_token
        written += ceil(sizes.texts / batch) * (sizes.tokens + BEYOND) * a_step
        row = self.target_token + self.draft_token
        labels = self.row + sum(self.slow.get(name, 0.0) for name in sizes.verifiers)
        a_root = 1 + ActionSpace.default().max_L2
        compared = TEXTS * (prompt * self.draft_token + ROOTS * a_root * (self.draft + 3 * self.draft_token))
        return written + compared + sizes.texts * ((prompt + rows) * row + rows * labels)

    def passes(self, verifiers: int) -> float:
        """To measure every pass and verification once: before each of them the other model passes."""
        cells = (verifiers * len(BRANCHES) + 1) * len(DEPTHS) + 2
        drafts = len(WIDTHS) * (self.target + 4 * self.draft)
        targets = sum(self.draft + self.target + nodes * self.target_token for nodes in NODES)
        return cells * 1.2 * self.target + drafts + targets

    def steps(self, count: int, prompt: int) -> float:
        """To time `count` steps with each action, after two slow ones; those of plain decoding once more."""
        step = self.target + 10 * self.draft + 20 * self.target_token
        return (len(STEPS) + 3) * (prompt * (self.target_token + self.draft_token) + (count + 2) * step)

    def decisions(self, prompt: int) -> float:
        return 2 * (prompt * (self.target_token + self.draft_token) + DECISION * (self.target + self.draft))


def _seconds(pair: ModelPair, work: Callable[[], object]) -> float:
    """The quicker one of two runs, after one that warms up and compiles."""
    seconds = []
    for _ in range(3):
        start = now(pair)
        work()
        seconds.append(now(pair) - start)
    return min(seconds[1:])


@dataclass(frozen=True)
class Sizes:
    """What is done under each sampling setting, and how often the machine is measured.

    Attributes:
        texts, tokens: how many texts, and labelled tokens of each.
        prompt: tokens of the longest prompt.
        repeats, count: measurements of every pass, and of a step with each action.
        seconds: that all of it is expected to take.
    """

    texts: int
    tokens: int
    prompt: int
    verifiers: tuple[str, ...] = (*USUAL, *SLOW)
    repeats: int = REPEATS[1]
    count: int = COUNTS[1]
    seconds: float = 0.0

    def left_out(self, config: Config, prices: Prices, lengths: Sequence[int]) -> list[str]:
        """In words, what is not done because there is no time for it."""
        found = []
        wanted, longer = min(config.quick.texts, len(lengths)), sum(length > self.prompt for length in lengths)
        if self.texts < wanted:
            found.append(f"{wanted - self.texts} of {wanted} texts under each sampling setting")
        if self.tokens < config.data.tokens:
            found.append(f"{config.data.tokens - self.tokens} of {config.data.tokens} tokens of each text")
        if longer:
            what = "left out" if config.prompts.longer == "drop" else f"cut to their {config.prompts.longer}"
            found.append(f"prompts of more than {self.prompt} tokens: {longer} of {len(lengths)} are {what}")
        for name in (name for name in SLOW if name not in self.verifiers):
            cost = (self.tokens + DEPTH) * prices.slow[name]
            found.append(f"the verifier {name}, whose labels take {cost:.1f} s a text")
        return found


def fitting(config: Config, prices: Prices, lengths: Sequence[int], seconds: float) -> Sizes:
    """What fits into some seconds. Costly verifiers are given up first; then long prompts, long texts, and texts.

    Args:
        lengths: of the prompts, in tokens; there are no more texts than prompts.
    """
    tokens, longest = config.data.tokens, max(lengths)
    kept = tuple(name for name in (*USUAL, *SLOW) if name in USUAL or name == config.train.verifier)
    # a prompt in a chat template cannot be cut, so the limit leaves enough of them
    least = sorted(lengths)[: config.quick.texts][-1] if config.prompts.longer == "drop" else 0
    rungs = [Sizes(0, tokens, longest), Sizes(0, tokens, longest, kept)]
    rungs += [
        Sizes(0, min(tokens, new), min(longest, max(prompt, least)), kept)
        for prompt, new in ((512, 128), (256, 64), (128, 48), (128, 32), (64, 16))
    ]
    wanted = min(config.quick.texts, len(lengths))
    for rung in rungs:
        found = _most_texts(config, prices, lengths, seconds, rung)
        if found.seconds <= seconds and found.texts >= min(ENOUGH, wanted):
            break
    return found


def _most_texts(config: Config, prices: Prices, lengths: Sequence[int], seconds: float, rung: Sizes) -> Sizes:
    """As many texts as there is time for, but at least `LEAST`."""
    cells, wanted = len(rung.verifiers), min(config.quick.texts, len(lengths))
    repeats = min(max(int(PASSES * seconds / prices.passes(cells)), REPEATS[0]), REPEATS[1])
    fewest, most = COUNTS
    count = next((n for n in range(most, fewest, -1) if prices.steps(n, rung.prompt) < REAL * seconds), fewest)
    machine = repeats * prices.passes(cells) + prices.steps(count, rung.prompt) + prices.decisions(rung.prompt)
    for texts in range(wanted, 0, -1):
        found = replace(rung, texts=texts, repeats=repeats, count=count)
        each = prices.texts(found, lengths, config.data.texts_per_shard) + ANSWER
        found = replace(found, seconds=machine + len(config.sampling) * each)
        if found.seconds <= seconds or texts <= LEAST:
            break
    return found
