"""Would a better learner, more text or more knowledge help? Boosted trees on the network's features.

    .venv/bin/espalier data --config configs/demo.yaml     # and the stages before it
    .venv/bin/python -m pipelines.studies.boosted configs/demo.yaml [section.key=value ..]

One boosted regression tree model predicts each survival of a chain or a lookup. Feature levels and the price of time
are tuned on the validation texts, as a network's are, and the held-out texts are replayed. A decision of theirs counts
as long as a network's.

The first rows differ in the share of the training texts. The last ones also know the features of the next roots along
the text, as if the target had written that many tokens more before the decision. No selector can know these; they tell
what the features of the root lack.

Legend: R roots, F scalars, S survivals, A actions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import Tensor

from data_gen.models.sampling import Sampling
from pipelines.config import Config, load_config
from pipelines.data.recorded import load_traces
from pipelines.latency.profile import load_profile
from pipelines.run import console
from pipelines.train.judging import by_setting, statics, tune_rules
from selector.schema import EARLY, LIGHT
from selector.train.data import Texts, Timed
from selector.train.replay import ratio_of_speeds
from selector.train.tuning import replay_mode, tune_mode

ROWS = ((4, 0), (2, 0), (1, 0), (1, 1), (1, 4))  # every fourth training text, ..; known tokens ahead
CHAIN = 8  # longer chains are not predicted
SIZES = {"max_iter": 120, "learning_rate": 0.06, "max_leaf_nodes": 15, "min_samples_leaf": 60, "l2_regularization": 5.0}
HEADS = "setting | training texts | tokens known ahead | boosted trees over the lookup rule"


class Boosted:
    """A model of each survival, for scalars of one feature level at a root and at the next `ahead` ones."""

    def __init__(self, timed: Timed, level: str, seed: int, ahead: int = 0) -> None:
        texts, space = timed.texts, timed.space
        self.ahead = ahead
        seen = texts.schema.first if level == EARLY else len(texts.schema.scalars)
        self.scalars = [f for f in range(seen) if f not in texts.schema.unseen]
        known_R = ~texts.unknown_R
        inputs_RF = self._inputs(texts)[known_R].numpy()
        self.models = {}
        for s in (*range(CHAIN), *range(space.tree_survivals, timed.survivals_RS.shape[1])):
            model = HistGradientBoostingRegressor(**SIZES, random_state=seed)
            self.models[s] = model.fit(inputs_RF, timed.survivals_RS[known_R, s].numpy())

    def _inputs(self, texts: Texts) -> Tensor:
        """Scalars, [R, F]; NaN where a text has no further root."""
        own_RF, root_R = texts.scalars_RF[:, self.scalars], torch.arange(len(texts.text_R))
        parts = [own_RF]
        for n in range(1, self.ahead + 1):
            next_R = (root_R + n).clamp(max=len(root_R) - 1)
            same_R = (texts.text_R[next_R] == texts.text_R) & (next_R == root_R + n)
            parts.append(torch.where(same_R.unsqueeze(-1), own_RF[next_R], torch.nan))
        return torch.cat(parts, dim=-1)

    def efficiencies(self, timed: Timed) -> Tensor:
        """Predicted tokens per step, [R, A]; 1 for trees that are no chains."""
        inputs_RF = self._inputs(timed.texts).numpy()
        survivals_RS = torch.zeros_like(timed.survivals_RS)
        for s, model in self.models.items():
            survivals_RS[:, s] = torch.from_numpy(model.predict(inputs_RF)).clamp(0, 1)
        return timed.space.efficiencies(survivals_RS)


def main(config: Config) -> None:
    profile = load_profile(config)
    traces, verifier = load_traces(config, profile.pair), config.train.verifier
    splits = [by_setting(config, traces[split], profile) for split in ("train", "validation", "test")]
    bases = statics(config, splits[0])
    rules = tune_rules(splits[0], {verifier: bases})
    console.print(f"\n| {HEADS} |\n{'|---' * 4}|", soft_wrap=True, highlight=False)
    for base, rule, train, validation, test in zip(bases, rules, *splits, strict=True):
        for share, ahead in ROWS:
            few = Timed(train.texts.take(torch.arange(len(train.texts))[::share]), verifier, profile)
            learned = {level: Boosted(few, level, config.seed, ahead) for level in (EARLY, LIGHT)}
            tuned, held_out = (
                {level: own.efficiencies(on) for level, own in learned.items()} for on in (validation, test)
            )
            mode = tune_mode(validation, tuned, base).mode
            replayed = (replay_mode(test, held_out, mode), replay_mode(test, {}, rule[verifier]))
            ratio = ratio_of_speeds(*replayed, test.texts.source_number_X)
            cells = map(str, (Sampling(*base.setting), len(few.texts), ahead, ratio))
            console.print(f"| {' | '.join(cells)} |", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main(load_config(Path(sys.argv[1]), sys.argv[2:]))
