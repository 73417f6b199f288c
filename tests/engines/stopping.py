"""A study: does it pay to stop a chain where the draft is unsure, or to verify only a part of it?

    python -m tests.engines.stopping law                 # by enumeration on small worlds
    python -m tests.engines.stopping chains CHAINS       # texts of SmolLM2, and what the draft drafts along them
    python -m tests.engines.stopping table CHAINS        # policies, replayed; all figures also in CHAINS/table.json
    python -m tests.engines.stopping why CHAINS          # what the two decisions have in common
    python -m tests.engines.stopping decoded             # decoded steps against their replay
    python -m tests.engines.stopping clock CHAINS        # paired wall-clock on this machine

Given a text of the target, a top-down chain's next token is the text's own with probability min(1, q/p), else one of
(q - p)+, after which the draft goes on by itself: the joint law of text and chain is p(x) min(1, q/p) = min(p, q) on
equal tokens, and p(x) (q - p)+(y) / sum (q - p)+ . (1 - min(1, q/p)) summed over x gives (q - p)+(y) elsewhere.

Whether a next token is drafted, or verified, may depend on the tokens before it and on the draft's distribution there,
never on the token itself: a verifier that does not see unlikely tokens does not give the target's law. Then a stop or a
trim leaves P(tau >= t | text) as it is up to the length that is verified of the text's own tokens, and makes it 0
beyond. It is the product of min(1, q/p) token by token, and the least running product of q/p, or 1, by blocks. Averaged
over texts, the chains are plain draws from the draft. So tokens follow from the text alone and seconds from the chains,
without bias for both verifiers, although a step's chain and its accepted length go together token by token alone.

The network at the root learns from the texts that are not held out, in folds, and from those of `make demo`, if that
ran here. The requests of a batch all have the same text; or they are `distinct`: then they share the draft's passes,
and none of the verified tokens.

Legend: N text tokens, V vocabulary, C tokens that the draft can say, R roots, K depth of a chain, J tokens from a
rejected one on, F features, X texts, S survivals, A actions, B roots of a batch or requests of a batch.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numba import njit
from torch import Tensor

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import Clock, FixedTree
from data_gen.drafting.sampled import Draft
from data_gen.features.root import row_numbers, scalars_along
from data_gen.models.pair import CachedModel, ModelPair, ModelRow, ModelRows
from data_gen.models.sampling import Sampling
from data_gen.texts.generated import GeneratedText, generated_by_target, seed_of
from data_gen.texts.prompts import Prompt
from data_gen.traces import read_texts
from data_gen.trees import DraftTree
from data_gen.verification import get_verifier
from data_gen.verification.checking import KINDS, World
from data_gen.verification.distributions import sample
from pipelines.config import SHIPPED, load_config
from pipelines.data.recorded import z_of
from pipelines.latency.timings import profile_of, read_timings
from pipelines.pair import stage as pairs
from selector.actions import Action, ActionSpace
from selector.files import atomically
from selector.train.module import WEIGHT_DECAY, Batch, SelectorModule
from selector.train.network import SurvivalNetwork

LONGEST, TEMPERATURES = 10, (0.0, 0.6, 1.0)
NAIVE, BLOCK = VERIFIERS = ("naive", "block")
SPLITS = ("train", "validation", "test")
COUNTS, ROUNDS, ROOTS = {"train": 48, "validation": 24, "test": 48}, 3, 64  # texts of each temperature; roots of a text
THRESHOLDS = (0, 0.02, 0.05, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7)
PRICES = (0.1, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5)  # of the speed
CLOCKS, BATCHES, CONTEXT = Path("configs/clocks"), (1, 8, 32, 64), 500
WORLDS = 60
PARTS, LONG = 8, 3  # of the sources, each a stream of distinct requests; texts of a stream by place in the batch
DEMO, FOLDS, SPACE = Path("runs/demo/traces"), 4, ActionSpace.chains(LONGEST, 0)
Along = dict[str, Any]  # a text and what is known along it
Path_ = tuple[int, ...]

# The law, by enumeration


def law() -> None:
    for verifier in VERIFIERS:
        errors = np.array([law_errors(seed, verifier) for seed in range(WORLDS)]).max(0)
        print(f"{verifier}, {WORLDS} worlds: P(accepted length, text) differs by {errors[0]:.1e}", end="")
        print(f", P(drafted length) by {errors[1]:.1e}, P(text) from the target's by {errors[2]:.1e}", end="")
        print(f", P(chain, text) without a trim by {errors[3]:.1e}" if verifier == NAIVE else "")
    peeking = max(law_errors(seed, NAIVE, peeks=True)[2] for seed in range(WORLDS))
    print(f"a trim that sees the token itself: P(text) differs from the target's by up to {peeking:.2f}")


def law_errors(seed: int, verifier: str, peeks: bool = False, V: int = 3, most: int = 2) -> tuple[float, ...]:
    """The largest differences between enumeration forwards and given the text, of the laws of accepted length and text,
    and of the drafted length; between forwards and the target, of the law of the text; and as the first, of the law of
    chain and text, without a trim and token by token. Every other world has a trim."""
    rng, world = np.random.default_rng(seed), World(V, most, KINDS[seed % len(KINDS)], seed)
    stop, trim = rng.choice([0, 0.05, 0.15, 0.3, 0.5], 2) * [1, seed % 2]
    forward, given = defaultdict[Any, float](float), defaultdict[Any, float](float)

    def goes_on(path: Path_) -> bool:
        return len(path) < most and (not path or world.draft_probability(path) >= stop)

    def kept(path: Path_) -> int:
        """How many drafted tokens are verified: as long as the running product, with the next token's greatest
        probability in place of its own unless the trim `peeks`, is at least `trim`."""
        for n in range(len(path)):
            ahead = float(world.draft[path[:n]][path[n]] if peeks else world.draft[path[:n]].max())
            if world.draft_probability(path[:n]) * ahead < trim:
                return n
        return len(path)

    def chains_from(path: Path_, probability: float) -> Iterator[tuple[Path_, float]]:
        if probability and goes_on(path):
            for token in range(V):
                yield from chains_from((*path, token), probability * float(world.draft[path][token]))
        elif probability:
            yield path, probability

    texts = {text: world.target_probability(text) for text in product(range(V), repeat=most + 1)}
    for chain, drawn in chains_from((), 1.0):
        verified = chain[: kept(chain)]
        tree = DraftTree.from_paths(verified, [[]])
        law_NV = get_verifier(verifier).law(tree, *world.rows(tree))
        forward["drafted", len(chain)] += drawn
        for text, accepted in product(texts, range(len(verified) + 1)):
            if text[:accepted] == verified[:accepted]:
                own = drawn * float(law_NV[accepted, text[accepted]]) * world.target_probability(text, accepted + 1)
                for key in (("chain", chain, text), ("accepted", accepted, text), ("text", text)):
                    forward[key] += own
    for text, whole in texts.items():
        given["text", text] = whole
        if not whole:
            continue
        mass, running, survived, depth = whole, 1.0, [1.0], 0
        while goes_on(path := text[:depth]):
            p_V, q_V = world.target[path], world.draft[path]
            ratio, over_V = float(q_V[text[depth]] / p_V[text[depth]]), (q_V - p_V).clamp(min=0)
            wrong = mass * (1 - min(1.0, ratio))
            for token in range(V):
                share = float(over_V[token] / over_V.sum().clamp(min=1e-300))
                for chain, probability in chains_from((*path, token), wrong * share):
                    given["chain", chain, text] += probability
                    given["drafted", len(chain)] += probability
            mass, running, depth = mass * min(1.0, ratio), running * ratio, depth + 1
            survived.append(mass / whole if verifier == NAIVE else min(survived[-1], running))
        given["chain", path, text] += mass
        given["drafted", depth] += mass
        survived = [*survived[: kept(path) + 1], 0.0]
        for accepted in range(kept(path) + 1):
            given["accepted", accepted, text] += whole * (survived[accepted] - survived[accepted + 1])
    worst = defaultdict[str, float](float)
    for key in {*forward, *given}:
        worst[key[0]] = max(worst[key[0]], abs(forward[key] - given[key]))
    # tokens that are not verified are drawn apart from the text; so are the rejected ones by blocks
    return worst["accepted"], worst["drafted"], worst["text"], 0.0 if trim or verifier == BLOCK else worst["chain"]


# Chains along texts


@torch.inference_mode()
def chains_along(pair: ModelPair, text: GeneratedText, sampling: Sampling, generator: torch.Generator) -> Along:
    """Along a text: `ratio`, q/p of each next token; `own` and `top`, the draft's own probabilities, at temperature 1,
    of it and of the most likely token; `others` and `other_tops`, the same of a token that is drafted in its place and
    is rejected, and of the tokens that the draft puts after that, [N, J]; and `numbers`, of which features are made."""
    before, own = text.tokens[: text.start], text.tokens[text.start :]
    target, draft, N = CachedModel(pair.target), CachedModel(pair.draft), len(own) - 1
    target.fill(before)
    draft.fill(before)
    causal = torch.ones(N + 1, N + 1, dtype=torch.bool).tril_()
    of_target, of_draft = target.extend(own), draft.forward(torch.tensor(own), torch.arange(N + 1), causal)
    rows = [ModelRows(sampling.probabilities(each.logits_WV), *each) for each in (of_target, of_draft)]
    said_C = of_draft.logits_WV[0].isfinite().nonzero()[:, 0]  # the tokens that the draft can say
    p_NV, q_NV, next_N1 = rows[0].probs_NV[:-1], rows[1].probs_NV[:-1], torch.tensor(own[1:])[:, None]
    sure_NV = of_draft.logits_WV[:-1].softmax(-1)
    ratio_N1 = q_NV.gather(1, next_N1) / p_NV.gather(1, next_N1)
    q_NC = q_NV[:, said_C]
    over_NC = (q_NC - p_NV[:, said_C]).clamp(min=0)
    wrong_NC = torch.where(over_NC.sum(-1, keepdim=True) > 1e-12, over_NC, q_NC)
    token_N1 = said_C[torch.multinomial(wrong_NC, 1, generator=generator)]
    others, tops, visible = [sure_NV.gather(1, token_N1)], [sure_NV.amax(-1, keepdim=True)], causal[:N]
    for depth in range(1, LONGEST):
        visible = torch.cat([visible, torch.eye(N, dtype=torch.bool)], 1)
        logits_NC = draft.forward(token_N1[:, 0], torch.arange(N) + depth, visible).logits_WV[:, said_C]
        drawn_N1 = torch.multinomial(sampling.probabilities(logits_NC), 1, generator=generator)
        after_NC, token_N1 = logits_NC.softmax(-1), said_C[drawn_N1]
        others.append(after_NC.gather(1, drawn_N1))
        tops.append(after_NC.amax(-1, keepdim=True))
    found = {
        **{"ratio": ratio_N1[:, 0], "own": sure_NV.gather(1, next_N1)[:, 0], "top": tops[0][:, 0]},
        **{"others": torch.cat(others, 1), "other_tops": torch.cat(tops, 1)},
    }
    possible = int(ratio_N1[:, 0].isfinite().int().cumprod(0).sum())  # passes over batches and texts differ at ties
    return {name: values.double().numpy()[:possible] for name, values in found.items()} | {
        "numbers": row_numbers(rows[0], rows[1], own[1:])
    }


def load_pair() -> ModelPair:
    torch.set_num_threads(1)
    return ModelPair.load("smollm2", str(SHIPPED), "cpu")


def prompts_of(pair: ModelPair, split: str) -> list[tuple[Prompt, list[int]]]:
    config = load_config(Path("configs/gpu.yaml"), [])
    return [(each, pairs.encode(config, pair, each)) for each in pairs.prompts_of(config, pair, split, COUNTS[split])]


def chains(folder: Path, *rounds: str) -> None:
    """Texts that the target samples, and the chains along them, in rounds, which may be made by several processes."""
    pair = load_pair()
    folder.mkdir(parents=True, exist_ok=True)
    for part in map(int, rounds or map(str, range(ROUNDS))):
        found, generator = list[Along](), torch.Generator().manual_seed(part)
        for temperature, split in product((0.6, 1.0, 0.0), SPLITS):
            sampling, begin = Sampling(temperature), time.perf_counter()
            own = sorted(prompts_of(pair, split)[part::ROUNDS], key=lambda each: len(each[1]))
            texts = generated_by_target(pair, [ids for _, ids in own], ROOTS + LONGEST, sampling, seed_of(split, part))
            for (prompt, _), text in zip(own, texts, strict=True):
                facts = {"split": split, "temperature": temperature, "prompt": prompt.id, "source": prompt.source}
                along = chains_along(pair, text, sampling, generator) if len(text.tokens) > text.start + 1 else {}
                roots = len(along.get("ratio", ())) - LONGEST
                if roots > 1:
                    numbers = {name: np.array(each[:roots], np.float32) for name, each in along["numbers"].items()}
                    scalars_RF = scalars_along(text.tokens, text.start, sampling, numbers)
                    found.append(facts | along | {"roots": roots, "scalars": scalars_RF})
            with atomically(folder / f"round-{part}.pkl") as partial_path:
                partial_path.write_bytes(pickle.dumps(found))
            seconds = time.perf_counter() - begin
            print(f"round {part}, T={temperature:g}, {split}: {len(found)} texts; {seconds:.0f} s", flush=True)


def survivals(text: Along, verifier: str) -> Any:
    """P(tau >= t | text) of a chain without a stop, [R, K]."""
    ratio_RK = windows(text["ratio"], text["roots"])
    if verifier == BLOCK:
        return np.minimum(np.minimum.accumulate(ratio_RK.cumprod(1), 1), 1)
    return np.minimum(ratio_RK, 1).cumprod(1)


def demo_texts() -> list[Along]:
    """The training texts of `make demo`, from which the network learns, too; none without that run."""
    found = []
    if DEMO.exists():
        rows = [row for path in sorted(DEMO.glob("train/*.parquet")) for row in pq.read_table(path).to_pylist()]
        texts = read_texts(DEMO, "train", [])
        starts = [0, *texts.size_X.cumsum(0).tolist()]
        for row, begin, end in zip([row for row in rows if row["roots"]], starts[:-1], starts[1:], strict=True):
            ratio = np.array(row["draft_prob"]) / np.maximum(row["target_prob"], 1e-30)
            roots, scalars_RF = len(ratio) - LONGEST, texts.scalars_RF[begin:end].numpy()
            found.append({"source": row["source"], "ratio": ratio, "roots": roots, "scalars": scalars_RF[:roots]})
    return found


def trained(texts: list[Along], held: list[Along], verifier: str, epochs: int = 12) -> SelectorModule:
    """The network at the root, as the train stage's regressor, over chains: the epoch of the least held-out loss."""
    torch.manual_seed(1)
    none = torch.zeros(0)
    module = SelectorModule("regressor", "light", [], {"hidden": [64, 32]}, space=SPACE.to_json())

    def batch_of(own: list[Along]) -> Batch:
        scalars_BF = torch.from_numpy(np.concatenate([text["scalars"][1:] for text in own]))
        labels_BS = torch.from_numpy(np.concatenate([survivals(text, verifier)[1:] for text in own])).float()
        return Batch(scalars_BF, [], labels_BS, none, none)

    whole, left = batch_of(texts), batch_of(held)
    module._body.standardise(whole.scalars_BF)
    assert isinstance(module.network, SurvivalNetwork)
    module.network.begin_at(whole.survivals_BS.mean(0))
    optimiser = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=WEIGHT_DECAY)
    steps = epochs * -(-len(whole.scalars_BF) // 256)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    least, best = float("inf"), {}
    for _ in range(epochs):
        for rows in torch.randperm(len(whole.scalars_BF)).split(256):
            optimiser.zero_grad()
            module.loss(Batch(whole.scalars_BF[rows], [], whole.survivals_BS[rows], none, none)).backward()
            optimiser.step()
            schedule.step()
        with torch.no_grad():
            value = float(module.loss(left))
        if value < least:
            least, best = value, {name: each.clone() for name, each in module.state_dict().items()}
    module.load_state_dict(best)
    return module.eval()


def predicted(modules: Sequence[SelectorModule], scalars_RF: Any) -> Any:
    """Block efficiencies of chains of 0 to 10 tokens, the mean over networks, [R, K + 1]."""
    given: Any = torch.from_numpy(scalars_RF), [], torch.ones(len(scalars_RF), 1)
    with torch.no_grad():
        each = [module.space.efficiencies(module.network(*given).exp()) for module in modules]
    return torch.stack(each).mean(0).double().numpy()


def read_chains(folder: Path, verifier: str) -> tuple[list[Along], list[SelectorModule]]:
    """The texts, with predictions of networks that did not learn from their source, and these networks. Constants are
    tuned on texts that are not test texts, in `FOLDS` parts of the sources."""
    data = [text for path in sorted(folder.glob("*.pkl")) for text in pickle.loads(path.read_bytes())]
    more, own = demo_texts(), [text for text in data if text["split"] != "test"]
    fold_of = {source: n % FOLDS for n, source in enumerate(sorted({text["source"] for text in own}))}
    modules = []
    for fold in range(FOLDS):
        held = [text for text in own if fold_of[text["source"]] == fold]
        others = [text for text in own + more if fold_of.get(text["source"], FOLDS) != fold]
        modules.append(trained(others, held, verifier))
        for text in held:
            text["predicted"] = predicted(modules[-1:], text["scalars"])
    for text in data:
        text["accepted"] = np.minimum(text["ratio"], 1.0)
        if text["split"] == "test":
            text["predicted"] = predicted(modules, text["scalars"])
    roots = sum(text["roots"] for text in own + more)
    print(f"{len(data)} texts, {len(more)} of the demo; networks by {verifier} of {roots} roots in {FOLDS} folds")
    return data, modules


# Replay


@njit(cache=True)
def walk(ratio, own, others, ahead, blocks, lengths, stop, trim, seconds, verified):  # type: ignore[no-untyped-def]
    """Expected tokens, seconds, steps and drafted tokens of a text.

    A step drafts while the running product of the drafted tokens' estimates is at least `stop`, up to the root's
    length. It verifies a token while the product of those before it and what is known `ahead` of the token itself is at
    least `trim`. `own` [R, K] are the estimates of the text's tokens, `others` [R, K, J] those of tokens in their place
    and after these, and `ahead` [R, K, J] is the same for both.
    """
    roots = len(lengths)
    reach = np.zeros(roots + LONGEST + 2)
    tokens, taken, steps, drafted = 0.0, 0.0, 0.0, 0.0
    reach[0] = 1.0
    for r in range(roots):
        visits = reach[r]
        if visits == 0:
            continue
        steps += visits
        # `mass` is that of chains that follow the text so far; `survived` that of steps that accept so many
        mass, running, survived, product_, k, kept, end = 1.0, 1.0, 1.0, 1.0, 0, 0, 1.0
        while mass > 0 and k < lengths[r] and (k == 0 or product_ >= stop):
            accepted = min(1.0, ratio[r + k])
            wrong = mass * (1 - accepted)  # the next one is rejected; the draft goes on, all the same
            is_verified = kept == k and product_ * ahead[r, k, 0] >= trim
            if wrong > 0:
                n, j, other, good = k + 1, 1, product_ * others[r, k, 0], kept + is_verified
                while n < lengths[r] and other >= stop:
                    good += good == n and other * ahead[r, k, j] >= trim
                    other *= others[r, k, j]
                    n, j = n + 1, j + 1
                taken += visits * wrong * (seconds[n] + verified[good])
                drafted += visits * wrong * n
            running *= ratio[r + k]
            after = min(survived, running) if blocks else survived * accepted
            product_ *= own[r, k]
            if is_verified:
                reach[r + k + 1] += visits * (survived - after)
                tokens += visits * (survived - after) * (k + 1)
                kept, end = k + 1, after
            mass, survived, k = mass * accepted, after, k + 1
        reach[r + kept + 1] += visits * end
        tokens += visits * end * (kept + 1)
        taken += visits * mass * (seconds[k] + verified[kept])
        drafted += visits * mass * k
    return tokens, taken, steps, drafted


WALK: Any = walk


@njit(cache=True)
def foreseen(ratio, blocks, roots, seconds, verified):  # type: ignore[no-untyped-def]
    """As `walk`, of a policy that drafts the tokens alone that will be accepted."""
    reach = np.zeros(roots + LONGEST + 2)
    tokens, taken, steps, drafted = 0.0, 0.0, 0.0, 0.0
    reach[0] = 1.0
    for r in range(roots):
        survived, running = 1.0, 1.0
        steps += reach[r]
        for k in range(LONGEST + 1):
            after = 0.0
            if k < LONGEST:
                running *= ratio[r + k]
                after = min(survived, running) if blocks else survived * min(1.0, ratio[r + k])
            ends = reach[r] * (survived - after)
            reach[r + k + 1] += ends
            tokens, taken = tokens + ends * (k + 1), taken + ends * (seconds[k] + verified[k])
            drafted, survived = drafted + ends * k, after
    return tokens, taken, steps, drafted


@njit(cache=True)
def together(stream, batch, texts, length_XR, stop, trim, drafting, verified):  # type: ignore[no-untyped-def]
    """Tokens and seconds of a stream of requests, of which `batch` are decoded at once; chains are drawn, token by
    token. The draft makes as many passes as the longest chain needs; of each request, its own tokens are verified."""
    roots_X, ratio_XN, own_XRK, others_XRKJ, ahead_XRKJ = texts
    np.random.seed(7)
    text_B, at_B, coming, tokens, taken = stream[:batch].copy(), np.zeros(batch, np.int64), batch, 0.0, 0.0
    while coming < len(stream):
        passes, whole = 0, 0.0
        for b in range(batch):
            x, r = text_B[b], at_B[b]
            product_, n, kept, right = 1.0, 0, 0, 0
            while n < length_XR[x, r] and (n == 0 or product_ >= stop):
                j = n - right  # how far the chain has left the text
                if kept == n and product_ * ahead_XRKJ[x, r, right, j] >= trim:
                    kept = n + 1
                if j == 0 and np.random.random() < ratio_XN[x, r + n]:
                    product_ *= own_XRK[x, r, n]
                    right += 1
                else:
                    product_ *= others_XRKJ[x, r, right, j]
                n += 1
            passes, whole = max(passes, n), whole + kept
            gained = min(right, kept) + 1
            tokens += min(gained, roots_X[x] - r)
            at_B[b] += gained
            if at_B[b] >= roots_X[x]:
                at_B[b] = 0
                if coming < len(stream):
                    text_B[b] = stream[coming]
                coming += 1
        taken += drafting[passes] + np.interp(whole / batch, np.arange(len(verified)), verified)
    return tokens, taken


@dataclass
class Replays:
    """Policies on one split's texts of one temperature, with one clock and one verifier."""

    texts: list[Along]
    seconds: Any  # by drafted tokens
    verified: Any  # by verified tokens
    verifier: str = NAIVE
    batch: int = 0  # so many distinct requests; 0: all requests of a batch have the same text

    def of(self, lengths: list[Any], stop: float = 0.0, trim: float = 0.0, estimate: str = "binned") -> Any:
        """The columns of `walk` by text, or of `together` by stream."""
        times = self.seconds, self.verified
        if self.batch:
            length_XR = np.zeros((len(lengths), ROOTS), np.int64)
            for x, own in enumerate(lengths):
                length_XR[x, : len(own)] = own
            whole = self._whole(estimate)
            return np.array([together(s, self.batch, whole, length_XR, stop, trim, *times) for s in self.streams])
        found = []
        for text, own in zip(self.texts, lengths, strict=True):
            (own_RK, others_RKJ), ahead_RKJ = text[estimate], text["vllm"][1]
            known = text["ratio"], own_RK, others_RKJ, ahead_RKJ, self.verifier == BLOCK
            found.append(WALK(*known, own, stop, trim, self.seconds, self.verified))
        return np.array(found)

    def oracle(self) -> Any:
        blocks, times = self.verifier == BLOCK, (self.seconds, self.verified)
        return np.array([foreseen(text["ratio"], blocks, text["roots"], *times) for text in self.texts])

    def fixed(self, length: int) -> list[Any]:
        return [np.full(text["roots"], length) for text in self.texts]

    def by_root(self, price: float, first: int) -> list[Any]:
        """The lengths of the network's choice; at a text's first root, which has no features, `first`."""
        worth = [text["predicted"] - price * (self.seconds + self.verified) for text in self.texts]
        return [np.concatenate([[first], own.argmax(1)[1:]]) for own in worth]

    @cached_property
    def groups(self) -> list[Any]:
        """Rows of `of` that are left out together for errors: texts of a source, or single streams."""
        if self.batch:
            return [np.array([n]) for n in range(len(self.streams))]
        sources = np.array([text["source"] for text in self.texts])
        return [np.where(sources == source)[0] for source in np.unique(sources)]

    @cached_property
    def streams(self) -> list[Any]:
        """Texts in random orders, for each of some parts of the sources; each place in the batch gets `LONG` texts."""
        rng = np.random.default_rng(0)
        number_X = np.unique([text["source"] for text in self.texts], return_inverse=True)[1]
        part_X = (rng.permutation(number_X.max() + 1) % PARTS)[number_X]
        own = [np.flatnonzero(part_X == part) for part in np.unique(part_X)]
        return [
            np.concatenate([rng.permutation(each) for _ in range(-(-LONG * self.batch // len(each)))]) for each in own
        ]

    def _whole(self, estimate: str) -> tuple[Any, ...]:
        """The texts' arrays in one, filled up with zeros."""
        if estimate not in self._known:
            sizes = [(ROOTS + LONGEST,), (ROOTS, LONGEST), *[(ROOTS, LONGEST, LONGEST)] * 2]
            arrays = [np.zeros((len(self.texts), *size)) for size in sizes]
            for x, text in enumerate(self.texts):
                for array, own in zip(arrays, (text["ratio"], *text[estimate], text["vllm"][1]), strict=True):
                    array[x, : len(own)] = own[: array.shape[1]]
            self._known[estimate] = np.array([text["roots"] for text in self.texts]), *arrays
        return self._known[estimate]

    @cached_property
    def _known(self) -> dict[str, tuple[Any, ...]]:
        return {}


def speed(found: Any) -> float:
    return float(found[:, 0].sum() / found[:, 1].sum())


def over(one: Any, other: Any, groups: Sequence[Any]) -> tuple[float, float]:
    """A ratio of speeds and its standard error by the jackknife over groups of rows."""
    sums = np.array([[one[g, 0].sum(), one[g, 1].sum(), other[g, 0].sum(), other[g, 1].sum()] for g in groups])
    left = sums.sum(0) - sums
    ratios = left[:, 0] / left[:, 1] / (left[:, 2] / left[:, 3])
    n = len(groups)
    return speed(one) / speed(other), float(((n - 1) / n * ((ratios - ratios.mean()) ** 2).sum()) ** 0.5)


# Estimates of acceptance


def logit(values: Any) -> Any:
    clipped = np.clip(values, 1e-6, 1 - 1e-6)
    return np.log(clipped / (1 - clipped))


def logistic(features: Any, right: Any, weight: Any) -> Any:
    """Coefficients of a logistic regression, the last one constant, by Newton's method with a small ridge."""
    design = np.concatenate([features, np.ones((len(features), 1))], 1)
    found, ridge = np.zeros(design.shape[1]), 1e-3 * np.eye(design.shape[1])
    for _ in range(12):
        own = 1 / (1 + np.exp(-np.clip(design @ found, -30, 30)))
        slope = design.T @ (weight * (right - own)) - ridge @ found
        found = found + np.linalg.solve((design * (weight * own * (1 - own))[:, None]).T @ design + ridge, slope)
    return found


def windows(values_N: Any, roots: int) -> Any:
    """Values along a text, [N, ..], by root and depth, [R, K, ..]."""
    return values_N[np.arange(roots)[:, None] + np.arange(LONGEST)]


def binned(texts: list[Along], bins: int = 16) -> Callable[[Any], Any]:
    """P(a drafted token is accepted | the draft's probability of it), by bins, ascending."""
    sure = np.concatenate([np.concatenate([text["own"], text["others"][:, 0]]) for text in texts])
    right = np.concatenate([np.concatenate([text["accepted"], 0 * text["accepted"]]) for text in texts])
    weight = np.concatenate([np.concatenate([text["accepted"], 1 - text["accepted"]]) for text in texts])
    edges = np.quantile(sure, np.linspace(0, 1, bins + 1)[1:-1])
    own = np.searchsorted(edges, sure)
    shares = np.bincount(own, right, bins) / np.maximum(np.bincount(own, weight, bins), 1e-9)
    return lambda values: np.maximum.accumulate(shares)[np.searchsorted(edges, values)]


def of_network(text: Along) -> Any:
    """Log-odds that the network predicts for each depth's token, given that those before it are accepted, [R, K]."""
    predicted = text["predicted"].copy()
    predicted[0] = text["predicted"][1:].mean(0)  # the first root has no features
    survived = np.concatenate([np.ones((len(predicted), 1)), np.diff(predicted, axis=1)], 1)
    return logit(survived[:, 1:] / np.maximum(survived[:, :-1], 1e-6))


def joint_features(text: Along, names: Sequence[str]) -> tuple[Any, ...]:
    """Features of the text's own tokens, [R, K, F], and of tokens in their place and after them, [R, K, J, F]."""
    roots, network = text["roots"], of_network(text)
    depths = np.minimum(np.arange(LONGEST)[:, None] + np.arange(LONGEST), LONGEST - 1)  # of the j-th after depth k
    whole = np.broadcast_to
    own = {
        "drafted": logit(windows(text["own"], roots)),
        "top": logit(windows(text["top"], roots)),
        "network": network,
    }
    others = {
        "drafted": logit(windows(text["others"], roots)),
        "top": logit(windows(text["other_tops"], roots)),
        "network": whole(network[:, depths], (roots, LONGEST, LONGEST)),
    }
    sizes = (roots, LONGEST, 0), (roots, LONGEST, LONGEST, 0)
    return tuple(
        np.stack([each[name] for name in names], -1) if names else np.zeros(size)
        for each, size in zip((own, others), sizes, strict=True)
    )


def reached(text: Along) -> tuple[Any, Any]:
    """P(the token at a depth is accepted), and P(those before it are), token by token; [R, K] each."""
    accepted_RK = windows(text["accepted"], text["roots"])
    return accepted_RK, np.concatenate([np.ones((text["roots"], 1)), accepted_RK.cumprod(1)[:, :-1]], 1)


def fitted(texts: list[Along], names: Sequence[str]) -> Any:
    """`logistic` of acceptance on features of what was drafted, along texts and depths."""
    rows: list[tuple[Any, Any, Any]] = []
    for text in texts:
        own, others = joint_features(text, names)
        accepted_RK, reached_RK = reached(text)
        for features, right, share_RK in ((own, 1.0, accepted_RK), (others[:, :, 0], 0.0, 1 - accepted_RK)):
            weight = (reached_RK * share_RK).ravel()
            rows.append((features.reshape(len(weight), len(names)), np.full(len(weight), right), weight))
    return logistic(*map(np.concatenate, zip(*rows, strict=True)))


def applied(coefficients: Any, features: Any) -> Any:
    return 1 / (1 + np.exp(-(features @ coefficients[:-1] + coefficients[-1])))


LEARNT = ("drafted", "top", "network")


def add_estimates(of: dict[str, list[Along]]) -> None:
    """Adds to every text of a temperature the estimates that a chain's running product is made of: `binned` by the
    draft's probability of the token; `vllm`, logistic in the log-odds of the draft's most likely token, as vLLM 0.32's
    adaptive verification; `learnt`, logistic in both and in what the network predicts at the root."""
    bins, vllm, learnt = binned(of["tuning"]), fitted(of["tuning"], ("top",)), fitted(of["tuning"], LEARNT)
    for text in (text for texts in of.values() for text in texts):
        roots = text["roots"]
        text["binned"] = windows(bins(text["own"]), roots), windows(bins(text["others"]), roots)
        text["vllm"] = tuple(applied(vllm, each) for each in joint_features(text, ("top",)))
        text["learnt"] = tuple(applied(learnt, each) for each in joint_features(text, LEARNT))


# The table


def clocks() -> dict[str, tuple[Any, Any, int]]:
    """Seconds by drafted and by verified tokens, and the batch; a plain step takes 1."""
    n = np.arange(LONGEST + 1)
    found: dict[str, tuple[Any, Any, int]] = {"draft pass 1/10, free": (1 + n / 10, 0.0 * n, 1)}
    for path, batch in product(sorted(CLOCKS.glob("*.csv")), BATCHES):
        own = profile_of(read_timings(path), str(path), False, "x", ("traversal",)).at_batch(batch)
        whole = np.array([own.action_seconds(SPACE.chain(each), CONTEXT, "traversal") for each in n.tolist()])
        verified = np.array([own.target.at(CONTEXT, 1 + each) for each in n.tolist()])
        name = f"{path.stem.removeprefix('h100_')}, batch {batch}"
        found[name] = (whole - verified) / whole[0], verified / whole[0], batch
    return found


def tuned(of: dict[str, list[Along]], make: Callable[..., Replays]) -> tuple[dict[str, Any], Replays, dict[str, Any]]:
    """Replays of the test texts by policy, with constants that are tuned on the other texts."""
    held, test = make(of["tuning"]), make(of["test"])
    some, prices = (THRESHOLDS[::2], PRICES[2::2]) if test.verified.any() else (THRESHOLDS, PRICES)
    g, best = max((speed(held.of(held.fixed(n))), n) for n in range(LONGEST + 1))
    caps = sorted({best, min(best + 2, LONGEST), 4, 7, LONGEST})
    _, cap, stop = max((speed(held.of(held.fixed(n), s)), n, s) for n, s in product(caps, some))
    lengths = range(1, LONGEST + 1)
    _, whole, trim = max((speed(held.of(held.fixed(n), 0, t, "vllm")), n, t) for n, t in product(lengths, some))
    rooted = {x: held.by_root(x, best) for x in (0.0, *(g * x for x in prices))}
    _, price = max((speed(held.of(rooted[x])), x) for x in rooted)
    _, own, two = max((speed(held.of(rooted[x], s)), x, s) for x, s in product(rooted, some))
    _, last = max((speed(held.of(rooted[own], two, t)), t) for t in some)
    _, x_learnt, s_learnt = max((speed(held.of(rooted[x], s, 0, "learnt")), x, s) for x, s in product(rooted, some))
    found = {
        "static": test.of(test.fixed(best)),
        "root": test.of(test.by_root(price, best)),
        "stop": test.of(test.fixed(cap), stop),
        "root and stop": test.of(test.by_root(own, best), two),
        "root, stop, trim": test.of(test.by_root(own, best), two, last),
        "vLLM": test.of(test.fixed(whole), 0, trim, "vllm"),
        "learnt stop": test.of(test.by_root(x_learnt, best), s_learnt, 0, "learnt"),
    }
    constants = {"L": best, "speed": g, "stop at": (cap, stop), "vLLM at": (whole, trim), "root at": price}
    return found, test, constants | {"both at": (own, two, last), "learnt at": (x_learnt, s_learnt)}


def by_temperature(data: list[Along]) -> Iterator[tuple[float, dict[str, list[Along]]]]:
    for temperature in TEMPERATURES:
        texts = [text for text in data if text["temperature"] == temperature]
        of = {"test": [text for text in texts if text["split"] == "test"]}
        of["tuning"] = [text for text in texts if text["split"] != "test"]
        if all(of.values()):
            add_estimates(of)
            yield temperature, of


def table(path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for verifier in VERIFIERS:
        for temperature, of in by_temperature(read_chains(path, verifier)[0]):
            for (name, (seconds, verified, batch)), is_mixed in product(clocks().items(), (False, True)):
                if is_mixed and (batch == 1 or verifier == BLOCK):
                    continue
                clock = partial(Replays, seconds=seconds, verified=verified, verifier=verifier, batch=batch * is_mixed)
                found, test, constants = tuned(of, clock)
                if not is_mixed:
                    found["oracle"] = test.oracle()
                kind = {"clock": name, "T": temperature, "verifier": verifier, "distinct": is_mixed}
                rows.append(kind | {"texts": len(test.texts)} | constants | ratios_of(found, test.groups))
                print(" ".join(f"{each}" for each in kind.values()), f"L={constants['L']}", end=": ")
                print("; ".join(f"{k} {v[0]:.3f} ±{v[1]:.3f}" for k, v in rows[-1].items() if k in RATIOS), flush=True)
                (path / "table.json").write_text(json.dumps(rows, default=float))


RATIOS = ("root", "stop", "root and stop", "root, stop, trim", "vLLM", "learnt stop", "oracle", "both / better")


def ratios_of(found: dict[str, Any], groups: Sequence[Any]) -> dict[str, Any]:
    """Speeds over the best fixed length, and of both decisions over the better one and over vLLM's; with errors."""
    better = max((found["root"], found["stop"]), key=speed)
    ratios: dict[str, Any] = {key: over(own, found["static"], groups) for key, own in found.items() if key != "static"}
    for key, name in {"both": "root and stop", "trim": "root, stop, trim", "learnt": "learnt stop"}.items():
        ratios[f"{key} / better"] = over(found[name], better, groups)
    ratios["both / vLLM"] = over(found["root and stop"], found["vLLM"], groups)
    return ratios | {"static": speed(found["static"])}


# Why the two decisions do not add up


def why(path: Path) -> None:
    seconds, verified, _ = clocks()["draft pass 1/10, free"]
    for temperature, of in by_temperature(read_chains(path, NAIVE)[0]):
        found, test, constants = tuned(of, partial(Replays, seconds=seconds, verified=verified))
        print(f"T={temperature:g}: {constants}")
        for name, own in found.items():
            tokens, taken, steps, drafted = own.sum(0)
            wrong = (drafted - tokens + steps) / steps
            print(f"    {name}: {tokens / steps:.2f} tokens, {drafted / steps:.2f} drafted and {wrong:.2f}", end="")
            print(f" wasted a step; {tokens / taken:.3f} tokens a second")
        by_root = np.concatenate([n[1:] for n in test.by_root(constants["root at"], constants["L"])])
        by_stop = np.concatenate([lengths_of_stop(text, *constants["stop at"])[1:] for text in test.texts])
        print(f"    correlation of the drafted lengths at the same roots: {np.corrcoef(by_root, by_stop)[0, 1]:.2f}")
        for n in np.unique(by_root):
            own = by_stop[by_root == n]
            print(f"    {len(own) / len(by_root):.0%} of roots: the root's length is {n}, the stop's {own.mean():.2f}")
        kinds: tuple[tuple[str, ...], ...] = ((), ("network",), ("drafted",), ("top",), ("drafted", "top"), LEARNT)
        for depth, names in product((0, 2), kinds):
            nats = loss(of, names, depth)
            print(f"    loss from depth {depth + 1} on, knowing {names or 'nothing'}: {nats:.4f} nats")


def lengths_of_stop(text: Along, cap: int, stop: float) -> Any:
    """The mean drafted length of a stop at each root, [R]."""
    zero, found = np.zeros(LONGEST + 1), []
    for r in range(text["roots"]):
        own, others = (each[r : r + 1] for each in text["binned"])
        found.append(walk(text["ratio"][r:], own, others, others, False, np.array([cap]), stop, 0.0, zero, zero)[3])
    return np.array(found)


def loss(of: dict[str, list[Along]], names: Sequence[str], depth: int) -> float:
    """The mean loss of a logistic estimate of acceptance, on test texts, over the depths from one on as chains reach
    them, in nats."""
    coefficients, total, weights = fitted(of["tuning"], names), 0.0, 0.0
    for text in of["test"]:
        own, others = (applied(coefficients, each) for each in joint_features(text, names))
        accepted_RK, reached_RK = reached(text)
        nats_RK = -accepted_RK * np.log(own) - (1 - accepted_RK) * np.log(1 - others[:, :, 0])
        total += (reached_RK * nats_RK)[:, depth:].sum()
        weights += reached_RK[:, depth:].sum()
    return float(total / weights)


# Decoding


@dataclass(eq=False)
class Stopping(Decoder):
    """Decodes chains that end where the running product of the estimates of the drafted tokens is below `stop`."""

    stop: float = field(default=0.0, kw_only=True)
    estimate: Callable[[float], float] = field(default=float, kw_only=True)  # of the draft's probability at T = 1

    def _draft(self, text: Any, action: Action, clock: Clock) -> Draft:
        if not action.drafts or self.stop == 0:
            return super()._draft(text, action, clock)
        self._forward_root(text, clock)
        laws, logits_V = [text.root_probs_V], text.root_logits_V
        chain, passed, product_ = list[int](), list[ModelRow](), 1.0
        while len(chain) < action.nodes and (not chain or product_ >= self.stop):
            if chain:
                last, seen = torch.tensor(chain[-1:]), torch.ones(1, len(chain), dtype=torch.bool)
                rows = text.draft.forward(last, torch.tensor([len(chain) - 1]), seen).rows(self.draft_sampling, list)
                passed += rows.each()
                laws.append(rows.probs_NV[0])
                logits_V = rows.logits_NV[0]
            chain.append(int(sample(laws[-1], 1, text.generator)))
            product_ *= self.estimate(float((logits_V[chain[-1]] - logits_V.logsumexp(-1)).exp()))
        probs_NV = torch.stack([*laws, torch.zeros_like(laws[0])])
        return Draft(DraftTree.from_paths(chain, [[]]), probs_NV, {n: n - 1 for n in range(1, len(chain))}, passed)


def decoded(count: str = "16", stop: float = 0.3) -> None:
    """Steps of a stop by the draft's own probabilities, against what replay says of the same texts."""
    pair = load_pair()
    prompts = prompts_of(pair, "test")[: int(count)]
    for temperature, verifier in product(TEMPERATURES, VERIFIERS):
        generator, sampling = torch.Generator().manual_seed(5), Sampling(temperature)
        decoder = Stopping(pair, sampling, get_verifier(verifier), FixedTree(Action(1, LONGEST, 0)), stop=stop)
        steps, lengths, impossible = list[list[float]](), list[list[float]](), 0
        for _, ids in prompts:
            found = decoder.decode(ids, ROOTS + LONGEST, generator)
            along = chains_along(pair, GeneratedText(ids + found.tokens, len(ids) - 1), sampling, generator)
            lengths.append([0.0, 0.0])
            for step in found.steps:
                r = step.length - len(ids)
                if r + LONGEST > len(along["ratio"]):
                    continue
                ratio_K, own_K = (along[name][r : r + LONGEST] for name in ("ratio", "own"))
                verified = 1 + int((own_K.cumprod()[:-1] >= stop).cumprod().sum())  # of the text's own tokens
                survived = np.minimum(ratio_K, 1).cumprod()
                if verifier == BLOCK:
                    survived = np.minimum(np.minimum.accumulate(ratio_K.cumprod()), 1)
                law_J = -np.diff([1.0, *survived[:verified], 0.0])
                n_J = np.arange(1, len(law_J) + 1)
                mean = float(law_J @ n_J)
                steps.append([step.accepted + 1, mean, float(law_J @ n_J**2) - mean**2])
                impossible += step.accepted > verified or law_J[step.accepted] <= 0
                others = windows(along["others"][r:], 1)
                zero, most = np.zeros(LONGEST + 1), np.array([LONGEST])
                given = walk(ratio_K, own_K[None], others, others, False, most, stop, 0.0, zero, zero)
                lengths[-1][0] += step.nodes - 1
                lengths[-1][1] += given[3]
        steps_N3, lengths_X2 = torch.tensor(steps, dtype=torch.float64), np.array(lengths)
        z = f"z = {z_of(steps_N3):+.2f}" if float(steps_N3[:, 2].sum()) > 1e-9 else "without variance"
        apart_X = lengths_X2[:, 0] - lengths_X2[:, 1]
        z_length = apart_X.sum() / max(apart_X.std(ddof=1) * len(apart_X) ** 0.5, 1e-9)
        tokens, mean = steps_N3.mean(0).tolist()[:2]
        drafted, by_chains = lengths_X2.sum(0) / len(steps)
        print(f"T={temperature:g}, {verifier}: {len(steps)} steps of {len(prompts)} texts", end="")
        print(f": {tokens:.3f} tokens a step, by replay {mean:.3f}, {z}, {impossible} impossible ones", end="")
        print(f"; {drafted:.3f} drafted a step, by chains {by_chains:.3f}, z = {z_length:+.2f}", flush=True)


@dataclass
class ByRoot:
    """Chooses chains by networks, a price of time and a clock, [A]."""

    modules: list[SelectorModule]
    price: float
    seconds: Any
    first: int
    feature_levels: tuple[str, ...] = ("light",)

    def select(self, features: dict[str, Tensor] | None) -> Action:
        if features is None:
            return Action(1, self.first, 0)
        tokens = predicted(self.modules, features["scalars"][None].numpy())[0]
        return Action(1, int((tokens - self.price * self.seconds).argmax()), 0)


def own_clock(pair: ModelPair, context: int = 150, repeats: int = 15) -> tuple[Any, Any]:
    """A core's seconds by drafted and by verified tokens here, over a plain step; the least of some passes. A pass over
    a single token is so much cheaper than one over two that plain decoding may be fastest; it is left out: a step
    without a draft costs as much as the others less their tokens."""
    least = {}
    for name, model, widths in (("draft", pair.draft, [1]), ("target", pair.target, range(1, LONGEST + 2))):
        cached = CachedModel(model)
        cached.fill([1] * context)
        for width in widths:
            taken = []
            for _ in range(repeats):
                begin = time.process_time()
                cached.forward(torch.ones(width, dtype=torch.int64), torch.arange(width), torch.ones(width, width) > 0)
                taken.append(time.process_time() - begin)
                cached.keep([])
            least[name, width] = min(taken)
    plain, n = least["target", 1], np.arange(LONGEST + 1)
    rise, once = np.polyfit(n[1:], [least["target", 1 + each] / plain for each in n[1:].tolist()], 1)
    return n * least["draft", 1] / plain, once + rise * n


def clock(path: Path, count: str = "12", rounds: str = "2", new: int = 30) -> None:
    """Tokens per second after a text's first step, methods in turn: by wall-clock, and by the process's own time on a
    core, which other work disturbs less. Ratios have errors over prompts."""
    pair = load_pair()
    seconds, verified = own_clock(pair)
    times, prompts = seconds + verified, prompts_of(pair, "test")[: int(count)]
    print(f"a step of 0, 1, .. drafted tokens takes {np.round(times, 2)} of a plain one; a draft pass {seconds[1]:.2f}")
    data, modules = read_chains(path, BLOCK)
    for temperature, of in by_temperature(data):
        if temperature == 1:
            continue
        found, test, constants = tuned(of, partial(Replays, seconds=seconds, verified=verified, verifier=BLOCK))
        bins, L, (cap, stop), both = binned(of["tuning"]), constants["L"], constants["stop at"], constants["both at"]
        by_root = partial(ByRoot, modules, seconds=times, first=L)
        choosers: dict[str, tuple[Any, float]] = {
            "static": (FixedTree(Action(1, L, 0)), 0.0),
            "stop": (FixedTree(Action(1, cap, 0)), stop),
            "root and stop": (by_root(both[0]), both[1]),
        }
        taken = {name: np.zeros((2, len(prompts), 2)) for name in choosers}
        for turn, (n, (_, ids)) in product(range(int(rounds)), enumerate(prompts)):
            for name in list(choosers)[:: 1 if turn % 2 else -1]:
                law, (chooser, own) = get_verifier(BLOCK), choosers[name]
                decoder = Stopping(pair, Sampling(temperature), law, chooser, stop=own, estimate=partial(at, bins))
                generator, tokens = torch.Generator().manual_seed(100 * n + turn), 0
                with torch.inference_mode(), closing(decoder.steps(ids, generator)) as steps:
                    next(steps)  # it fills the draft's cache
                    begin = time.perf_counter(), time.process_time()
                    while tokens < new:
                        tokens += len(next(steps)[1])
                    end = time.perf_counter(), time.process_time()
                for kind in range(2):
                    taken[name][kind, n] += tokens, end[kind] - begin[kind]
        print(f"T={temperature:g}: {constants}")
        for name, own_KX2 in taken.items():
            replayed, its = over(found[name], found["static"], test.groups)
            print(f"    {name} over static: replayed {replayed:.3f} ±{its:.3f}", end="")
            for kind, label in enumerate(("wall-clock", "a core's time")):
                groups = [np.array([n]) for n in range(len(prompts))]
                ratio, error = over(own_KX2[kind], taken["static"][kind], groups)
                print(f"; {label} {ratio:.3f} ±{error:.3f}, {speed(own_KX2[kind]):.2f} tokens/s", end="")
            print(flush=True)


def at(bins: Callable[[Any], Any], probability: float) -> float:
    return float(bins(probability))


if __name__ == "__main__":
    commands: dict[str, Any] = {
        "law": law,
        "chains": chains,
        "table": table,
        "why": why,
        "decoded": decoded,
        "clock": clock,
    }
    commands[sys.argv[1]](*[each if each.isdigit() else Path(each) for each in sys.argv[2:]])
