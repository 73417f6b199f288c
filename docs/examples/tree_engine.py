"""A whole loop of decoding around a selector of trees: decide, draft, verify, commit.

    make demo        # trains the selector; without it one tree is drafted at every step
    .venv/bin/python docs/examples/tree_engine.py

In an engine of your own its models take the places of both `CachedModel`. They return the logits
and the last hidden state after every node of a tree, and drop the cached rows of nodes that are not
accepted.

Legend: N nodes of a tree, W tokens of a pass, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from data_gen import CachedModel, FixedTree, ModelPair, RootKnowledge, draft_tree, get_verifier
from data_gen.drafting.sampled import Draft
from data_gen.models.pair import Pass
from data_gen.models.rows import ModelRows
from data_gen.models.sampling import probabilities
from data_gen.verification import CERTAIN, Verifier, styled
from data_gen.verification.distributions import sample
from selector import Action, Sampling, load_selector

SELECTOR = Path("runs/demo/selector")


class Engine:
    """Decodes one text; `policy` is a selector's under the sampling setting (`Selector.at`)."""

    def __init__(
        self,
        pair: ModelPair,
        policy: Any,
        sampling: Sampling,
        prompt: Sequence[int],
        generator: torch.Generator,
    ) -> None:
        self.policy = policy
        self.sampling = sampling
        self.generator = generator
        self.verifier = get_verifier("traversal")
        self.text = list(prompt)
        self.is_first = True  # at the first root no features are known
        # the draft's distribution after the root, and its logits
        self.root_probs_V: torch.Tensor | None = None
        self.root_logits_V: torch.Tensor | None = None
        self.knowledge = RootKnowledge(prompt, sampling, policy.feature_levels)
        # each cache ends before the root, the text's last token; the draft's may lack more
        self.target = CachedModel(pair.target)
        self.draft = CachedModel(pair.draft)
        self.target.fill(prompt[:-1])
        self.draft.fill(prompt[:-1])

    @torch.inference_mode()
    def step(self) -> tuple[Action, list[int]]:
        """One step: its action, and the tokens that it adds to the text."""
        action = self.decide()
        drafted = self.draft_of(action)
        tree = drafted.tree
        # one pass of the target over the root and the tree
        tokens_N = tree.tokens_N.clone()
        tokens_N[0] = self.text[-1]
        output = self.target.forward(tokens_N, tree.depths_N, tree.ancestors_NN())
        rows = rows_of(output, self.sampling)
        if len(tree) == 1:
            last_node, added = 0, int(sample(rows.probs_NV[0], 1, self.generator))
        else:
            verifier = self.verifier_of(action)
            last_node, added = verifier.verify(
                tree, rows.probs_NV, drafted.probs_NV, self.generator
            )
        # commit the accepted path: its rows stay in both caches
        path = tree.path_to(last_node)
        passed = [node for node in path if node in drafted.row_of]
        self.target.keep([0, *path])
        self.draft.keep([drafted.row_of[node] for node in passed])
        tokens = [tree.token(node) for node in path] + [added]
        self.knowledge.passed(drafted.rows(passed))
        self.knowledge.committed(rows, [0, *path], tokens)
        self.text += tokens
        self.is_first = False
        return action, tokens

    def decide(self) -> Action:
        levels = self.policy.feature_levels
        longest = getattr(self.policy, "longest", 0)
        if longest and len(self.text) > longest:  # beyond the training texts the match decides
            levels = ("match",)
            self.knowledge.keep_match_alone()
        if self.is_first:
            levels = ()
        for level in levels:
            if level in ("light", "full"):
                self.pass_root()
            action = self.policy.select(self.knowledge.features(level))
            if action is not None:
                return action
        return self.policy.select(None)

    def pass_root(self) -> None:
        """The draft's forward pass over what it lacks of the text, the root included."""
        unread = self.text[self.draft.committed :]
        if unread:
            rows = rows_of(self.draft.extend(unread), self.sampling.draft)
            self.knowledge.passed(rows.each())
            self.root_probs_V = rows.probs_NV[-1]
            self.root_logits_V = rows.logits_NV[-1]

    def draft_of(self, action: Action) -> Draft:
        copied: list[int] = []
        if action.copied:  # what followed the longest earlier match of the text's end
            copied = self.knowledge.text.index.proposal(action.copied)
        if action.drafts:
            self.pass_root()
        return draft_tree(
            self.draft,
            self.root_probs_V,
            action,
            self.sampling.draft,
            self.generator,
            root_logits_V=self.root_logits_V,
            proposal=copied,
        )

    def verifier_of(self, action: Action) -> Verifier:
        if action.is_certain:
            return CERTAIN
        if action.distinct:
            return styled(self.verifier, action.style_name)
        return self.verifier


def rows_of(output: Pass, sampling: Sampling) -> ModelRows:
    """A pass's outputs with the distributions that are sampled from."""
    return ModelRows(probabilities(output.logits_WV, sampling), *output)


def main() -> None:
    pair = ModelPair.load("smollm2", "pipelines/pair/shipped/draft", device="cpu")
    sampling = Sampling(temperature=0.0)
    policy: Any = FixedTree(Action(1, 4, 0))
    if SELECTOR.exists():
        policy = load_selector(SELECTOR).at(sampling.temperature)
    line = "the quick brown fox jumps over the lazy dog"
    turn = {"role": "user", "content": f"Repeat this line three times: {line}."}
    chat = pair.tokenizer.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
    prompt = pair.tokenizer.encode(chat)
    engine = Engine(pair, policy, sampling, prompt, torch.Generator().manual_seed(0))
    while not pair.eos_ids & {*engine.text[len(prompt) :]}:
        action, tokens = engine.step()
        way = f"{action.nodes} drafted"
        if action.copies:
            way = f"{action.nodes} copied"
        print(f"{len(tokens) - 1} of {way}: {pair.tokenizer.decode(tokens)!r}")


if __name__ == "__main__":
    main()

# Without the demo's selector, which drafts otherwise and gives the same text:
#
# It prints:
#
#     1 of 4 drafted: 'The quick'
#     0 of 4 drafted: ' brown'
#     0 of 4 drafted: ' fox'
#     0 of 4 drafted: ' jumps'
#     0 of 4 drafted: ' over'
#     0 of 4 drafted: ' lazy'
#     0 of 4 drafted: ' dog'
#     0 of 4 drafted: '.'
#     0 of 4 drafted: '<|im_end|>'
