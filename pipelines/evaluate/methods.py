"""The methods that `evaluate` compares under one sampling setting, transformers' own among them:
how each decodes, and how it is replayed. And the check that greedy decoding with trees gives the
tokens of `generate()`.

Legend: A actions, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, PreTrainedModel

from data_gen.decoding.decoder import Decoder, verifier_of
from data_gen.decoding.loop import Chooser, FixedTree
from data_gen.models.checkpoints import quiet
from data_gen.models.pair import ModelPair, without_own_settings
from data_gen.models.sampling import Sampling, generation_arguments
from data_gen.texts.possible import tie
from data_gen.texts.prompts import Prompt
from data_gen.timing import now
from data_gen.verification import get_verifier
from pipelines.config import Config
from pipelines.pair.stage import encode
from pipelines.terminal import watched
from selector import decision
from selector.actions import EMPTY, IID, Action
from selector.decision import Setting
from selector.latency import LatencyProfile
from selector.runtime.selector import Policy
from selector.schema import InputError
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.tuning import StaticTable

PLAIN = "plain decoding"
SELECTOR = "selector"
STATIC = "static tree"
AT_ROOT = f"{STATIC}, traversal at the root"
CHAIN = "static chain"
BRANCHING = f"{STATIC} with branches"
BEST_STATIC = f"best {STATIC}"
COPYING = "lookup rule"
NETWORK = "network"
DECODED_TREES = (PLAIN, AT_ROOT, CHAIN, BEST_STATIC)
ASSISTED = "assisted generation"
ASSISTED_TUNED = "assisted generation, tuned"
PROMPT_LOOKUP = "prompt lookup"
BASES = (PLAIN, BEST_STATIC)  # that every method's speed is compared with
CHECKED = (Action(1, 4, 0), Action(2, 2, 3), Action(4, 0, 6))  # drafted in the greedy check


@dataclass
class Decoding:
    """A method's continuation of one prompt. The lists by step are empty where the steps cannot be
    observed."""

    tokens: int  # new ones up to the limit, as replay counts them
    seconds: float  # of all steps, without the prefill
    steps: int
    block_tokens: int  # that the steps yield, including those beyond the limit
    select_seconds: float = 0.0  # of all decisions
    text: list[int] = field(default_factory=list)  # up to the limit
    drafted: list[Action] = field(default_factory=list)  # by step
    # where each step began, counted from the last prompt token
    step_roots: list[int] = field(default_factory=list)


def drafts_in_words(setting: Setting) -> str:
    """What the lookup rule or the static tree of a setting drafts."""
    action = setting.action
    tree = f"draft {action}"
    if action == EMPTY:
        tree = "draft nothing"
    elif action.K == 1 and not action.ranks:
        tree = f"draft {action.nodes}"
    if setting.rule is None:
        return tree
    rule = setting.rule
    copy = f"copy {rule.length}"
    if rule.ranks:
        copy = f"{copy} in one tree with a {Action.ranked(rule.ranks)}"
    copies = [f"{copy} after a match of {rule.least}"]
    copies += [f"{length} after one of {least}" for least, length in rule.longer]
    return f"{', '.join(copies)}, else {tree}"


@dataclass(frozen=True)
class Method:
    """A way of decoding that can be replayed."""

    name: str
    verifier: str
    setting: Setting
    network: SelectorModule | None = None  # whose predictions replay uses
    chooser: Chooser | None = None  # decides in decoding where the setting alone cannot
    # what only explains the choice of the best tree or the selector is not
    is_decoded: bool = True

    @property
    def drafts(self) -> str:
        """What is drafted, in words; empty where a network decides."""
        if self.setting.decider == decision.NETWORK:
            return ""
        return drafts_in_words(self.setting)

    @property
    def identity(self) -> Hashable:
        """Equal for methods that decode alike. Without drafted trees the verifier makes no
        difference, and with greedy ones only whether it works bottom-up."""
        if self.setting.decider == decision.NETWORK:
            return self.name
        action = self.setting.action
        verifier = ""
        if action.drafts:
            verifier = verifier_of(get_verifier(self.verifier), action).name
        return verifier, action, self.setting.rule

    def decode(
        self, pair: ModelPair, sampling: Sampling, prompt: list[int], limit: int, seed: int
    ) -> Decoding:
        """Continue a prompt's token ids by at most `limit` new ones."""
        chooser = self.chooser or Policy(self.setting)
        decoder = Decoder(pair, sampling, get_verifier(self.verifier), chooser)
        generator = torch.Generator(device=pair.device).manual_seed(seed)
        decoded = decoder.decode(prompt, limit, generator)
        steps = decoded.steps
        return Decoding(
            tokens=len(decoded.tokens),
            seconds=sum(step.total for step in steps),
            steps=len(steps),
            block_tokens=sum(step.accepted + 1 for step in steps),
            select_seconds=sum(step.seconds["select"] for step in steps),
            text=decoded.tokens,
            drafted=[step.action for step in steps],
            step_roots=[step.length - len(prompt) for step in steps],
        )


def static_methods(texts: Texts, verifiers: Sequence[str], profile: LatencyProfile) -> list[Method]:
    """Plain decoding, and the fastest static trees on texts of one sampling setting: with each
    verifier; with Traversal, of chains and trees without a trunk; of chains; of trees with
    branches; and overall."""
    timed = {name: Timed(texts, name, profile) for name in verifiers}
    tables = {name: StaticTable.of(timed_texts) for name, timed_texts in timed.items()}
    trees_A = texts.space.trees

    def best(
        among: Iterable[str], is_allowed: Callable[[Action], bool] = lambda _: True
    ) -> tuple[str, Action]:
        allowed_A = torch.tensor([is_allowed(tree) for tree in trees_A])
        fastest = {name: tables[name].best(allowed_A) for name in among}
        name = max(fastest, key=lambda name: float(tables[name].speeds()[fastest[name]]))
        return name, trees_A[fastest[name]]

    overall = best(tables)
    trees: dict[str, tuple[str, Action]] = {PLAIN: (verifiers[0], EMPTY)}
    # the tree of the other verifier is the best static one
    for name in tables:
        if name != overall[0]:
            trees[f"{STATIC}, {name}"] = best([name])
    if "traversal" in tables:
        trees[AT_ROOT] = best(
            ["traversal"], lambda tree: tree.style == IID and (tree.L1 == 0 or tree.K == 1)
        )
    trees[CHAIN] = best(tables, lambda tree: tree.K == 1 and tree != EMPTY and not tree.ranks)
    trees[BRANCHING] = best(tables, lambda tree: tree.K > 1)
    trees[BEST_STATIC] = overall
    sampling = timed[verifiers[0]].sampling
    return [
        Method(name, verifier, Setting(sampling, action), is_decoded=name in DECODED_TREES)
        for name, (verifier, action) in trees.items()
    ]


@dataclass(frozen=True)
class Assistant:
    """One way to draft in transformers' own `generate()`, which cannot be replayed: with the draft
    as the assistant, or by copying from the text."""

    # of every step; 0 for the library's default, an assistant that stops where it is unsure
    tokens: int = 0
    # tokens of the longest match that is looked up, where tokens are copied; 0 where the draft
    # drafts
    match: int = 0
    verifier: ClassVar[str] = "transformers"

    @property
    def name(self) -> str:
        if self.match:
            return PROMPT_LOOKUP
        return ASSISTED_TUNED if self.tokens else ASSISTED

    @property
    def drafts(self) -> str:
        if self.match:
            return f"copies of {self.tokens} after a match of at most {self.match}"
        return f"chains of {self.tokens}" if self.tokens else ""

    @property
    def identity(self) -> str:
        return self.name

    def decode(
        self, pair: ModelPair, sampling: Sampling, prompt: list[int], limit: int, seed: int
    ) -> Decoding:
        """As `Method.decode`. The steps cannot be observed, but are as many as the target's forward
        passes. A model's prefill counts as its median forward pass."""
        drafts: dict[str, Any] = {"assistant_model": pair.draft}
        if self.match:
            drafts = {
                "prompt_lookup_num_tokens": self.tokens,
                "max_matching_ngram_size": self.match,
            }
        generate = generation(pair, sampling, prompt, limit, **drafts)
        torch.manual_seed(seed)
        with (
            _forward_seconds(pair, pair.target) as target_seconds,
            _forward_seconds(pair, pair.draft) as draft_seconds,
            quiet(),
            without_own_settings(pair.target, pair.draft),
        ):
            if self.tokens and not self.match:
                draft_config = pair.draft.generation_config
                draft_config.num_assistant_tokens = self.tokens
                draft_config.num_assistant_tokens_schedule = "constant"
                draft_config.assistant_confidence_threshold = 0.0
            start = time.perf_counter()
            text = generate()[0, len(prompt) :].tolist()  # which waits for a GPU
            seconds = time.perf_counter() - start
        prefills = 0.0
        for durations in (target_seconds, draft_seconds):
            if durations:
                prefills += durations[0] - statistics.median(durations)
        return Decoding(
            tokens=len(text),
            seconds=seconds - prefills,
            steps=len(target_seconds),
            block_tokens=len(text),
            text=text,
        )


CHAINS = tuple(map(Assistant, (1, 2, 4, 8)))
LOOKUPS = tuple(Assistant(tokens, match) for tokens, match in product((4, 10), (1, 2, 3)))


def tuned_assistants(
    pair: ModelPair, sampling: Sampling, prompts: list[list[int]], limit: int, seed: int
) -> list[Assistant]:
    """The library's default, and the fastest of the `CHAINS` and of the `LOOKUPS` on some
    prompts."""

    def seconds_per_token(assistant: Assistant) -> float:
        decoded = [assistant.decode(pair, sampling, prompt, limit, seed) for prompt in prompts]
        return sum(text.seconds for text in decoded) / sum(text.tokens for text in decoded)

    CHAINS[0].decode(pair, sampling, prompts[0], limit, seed)  # the first call is slower
    return [Assistant(), min(CHAINS, key=seconds_per_token), min(LOOKUPS, key=seconds_per_token)]


@contextmanager
def _forward_seconds(pair: ModelPair, model: PreTrainedModel) -> Iterator[list[float]]:
    began = [0.0]
    seconds: list[float] = []
    before = model.register_forward_pre_hook(lambda *_: began.append(now(pair)))
    after = model.register_forward_hook(lambda *_: seconds.append(now(pair) - began[-1]))
    with before, after:
        yield seconds


def generation(
    pair: ModelPair, sampling: Sampling, prompt: list[int], limit: int, **drafts: Any
) -> Callable[[], torch.Tensor]:
    """The call of the target's `generate()` that continues a prompt."""
    inputs = torch.tensor([prompt], device=pair.device)
    config = GenerationConfig(
        max_new_tokens=limit,
        eos_token_id=sorted(pair.eos_ids) or None,
        pad_token_id=next(iter(pair.eos_ids), 0),
        **generation_arguments(sampling),
    )
    generate: Any = pair.target.generate
    return partial(
        generate, inputs, attention_mask=torch.ones_like(inputs), generation_config=config, **drafts
    )


def greedy_check(pair: ModelPair, config: Config, prompts: list[Prompt]) -> dict[str, Any]:
    """Compare greedy texts with those of `generate()`: every prompt, and every combination of
    action, verifier and drafting model. The draft samples, so that trees have branches; or the
    target drafts for itself, so that deep branches are accepted even if the draft is weak. Texts
    that diverge at a tie of the target's logits are named. InputError where they diverge elsewhere:
    all other figures would mean nothing."""
    result: dict[str, Any] = {"prompts": len(prompts), "continuations": 0, "tokens": 0, "ties": []}
    limit = config.data.tokens
    drafting_pairs = pair, replace(pair, draft=pair.target)
    ways = list(product(drafting_pairs, CHECKED, config.verifiers))
    count = max(len(prompts), len(ways))
    expected: dict[str, list[int]] = {}
    for number in watched(range(count), "comparing greedy texts with generate()"):
        prompt = prompts[number % len(prompts)]
        drafting_pair, action, name = ways[number % len(ways)]
        tokens = encode(config, pair, prompt)
        if prompt.id not in expected:
            generate = generation(pair, Sampling(0), tokens, limit)
            # it loses its end-of-sequence tokens, which `generate` has
            with without_own_settings(pair.target):
                expected[prompt.id] = generate()[0, len(tokens) :].tolist()
        text = expected[prompt.id]
        sampling = Sampling(0, draft_temperature=1.0)
        decoder = Decoder(drafting_pair, sampling, get_verifier(name), FixedTree(action))
        generator = torch.Generator(device=pair.device).manual_seed(0)
        decoded_tokens = decoder.decode(tokens, limit, generator).tokens
        result["continuations"] += 1
        result["tokens"] += len(text)
        if decoded_tokens != text:
            at = _first_difference(decoded_tokens, text)
            divergence = f"prompt {prompt.id}, token {at} with {name} on {action}"
            is_prefix = at == min(len(decoded_tokens), len(text))
            if is_prefix or not _tied(pair, tokens + text[:at], decoded_tokens[at], text[at]):
                raise InputError(f"greedy decoding with trees is not generate()'s: {divergence}")
            result["ties"].append(divergence)
    return result


def _first_difference(tokens: list[int], others: list[int]) -> int:
    """The first place where two texts differ; the end of the shorter one if they agree to there."""
    at = 0
    for token, other in zip(tokens, others, strict=False):
        if token != other:
            break
        at += 1
    return at


@torch.inference_mode()
def _tied(pair: ModelPair, context: list[int], token: int, other: int) -> bool:
    logits_V = pair.target(torch.tensor([context], device=pair.device)).logits[0, -1].float()
    distance = abs(float(logits_V[token] - logits_V[other]))
    return distance <= tie(float(logits_V.max()), pair.target.dtype)


def greedy_summary(greedy: dict[str, Any]) -> str:
    same = (
        f"all {greedy['continuations']} continuations of {greedy['prompts']} prompts are those of "
        "generate()"
    )
    words = f"greedy decoding with trees: {same}"
    if greedy["ties"]:
        words += f"; at a tie of the logits diverge {'; '.join(greedy['ties'])}"
    return words
