"""A pair of models as the source of a run's texts: they write texts, or label those of a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_gen.models.checkpoints import revision
from data_gen.models.pair import ModelPair
from data_gen.texts.labelled import make_shard
from data_gen.texts.log_labels import splits_of
from data_gen.texts.logs import Logs, read_all
from data_gen.texts.written import Work
from data_gen.traces import read_texts
from pipelines.config import Config
from pipelines.pair.stage import (
    check_models,
    known_fingerprint,
    load_pair,
    pair_names,
    prompts_depend,
    prompts_of,
    recipe,
)
from selector.schema import FULL, LIGHT, PAIR, InputError, sha256
from selector.train.data import SPLITS, Texts


class PairSource:
    """A `pipelines.pair.source.Source`: the models of the config's section `pair`."""

    schema = PAIR
    decodes = True
    drafts = True
    why_untrained = ""
    squared_weight = 1.0
    drafting_lead = 1.0

    def __init__(self, config: Config) -> None:
        self.config = config

    @cached_property
    def pair(self) -> ModelPair:
        return load_pair(self.config)

    @property
    def selectors(self) -> tuple[tuple[str, str], ...]:
        """The policy objective uses all features in the traces."""
        recorded: str = self.config.data.features
        levels = {"regressor": [LIGHT], "policy": [recorded]}
        if recorded == FULL:
            levels["regressor"].append(FULL)
        objectives_and_levels: list[tuple[str, str]] = []
        for objective in self.config.train.objectives:
            objectives_and_levels += [(objective, level) for level in levels[objective]]
        return tuple(objectives_and_levels)

    @property
    def fingerprint(self) -> str:
        """Of the loaded pair, else the one that an earlier stage recorded."""
        if "pair" in self.__dict__:
            return self.pair.fingerprint
        return known_fingerprint(self.config)

    @property
    def names(self) -> dict[str, Any]:
        target, draft = pair_names(self.config)
        revisions = {"target": revision(target), "draft": revision(draft)}
        return {"target": target, "draft": draft, "revisions": revisions}

    @property
    def processes(self) -> int:
        """A GPU is not shared."""
        return self.config.processes if self.pair.device.type == "cpu" else 1

    def depends(self) -> dict[str, Any]:
        """The device is left out: it changes the rounding and so a few of the drawn tokens, but not
        their law."""
        config = self.config
        data = config.data.model_dump(mode="json")
        if config.data.features == LIGHT:  # only hidden states are recorded with a stride
            data["stride"] = 1
        data["behaviour"] = recipe(config).behaviour
        shares = [config.prompts.validation, config.prompts.test]
        return {
            "pair": self.fingerprint,
            "dtype": config.pair.dtype,
            "seed": config.seed,
            "sampling": [sampling_setting.model_dump() for sampling_setting in config.sampling],
            "verifiers": list(config.verifiers),
            "data": data,
            "log": None if config.data.log is None else sha256(config.data.log),
            "prompts": {"shares": shares, **prompts_depend(config, *SPLITS)},
        }

    def plan(self) -> list[str]:
        data = self.config.data
        if data.log is not None:
            remarks = self._logs(data.log).remarks
            return [f"the texts of {data.log}, one pass of each model over each", *remarks]
        counts = self._counts()
        texts = ", ".join(f"{count} for {split}" for split, count in counts.items())
        limit = f"; no more once {data.seconds} s are over" if data.seconds else ""
        return [
            f"{len(self.config.sampling)} sampling settings x {sum(counts.values())} texts "
            f"({texts}) of {data.tokens} labelled tokens{limit}"
        ]

    def work(self) -> Iterable[Work]:
        if self.config.data.log is not None:
            return self._logged_work(self.config.data.log)
        return self._prompted_work()

    def make(self, work: Work) -> pa.Table:
        return make_shard(self.pair, recipe(self.config), work)

    def texts(self, folder: Path) -> dict[str, Texts]:
        return {split: read_texts(folder, split, self.config.verifiers) for split in SPLITS}

    def _counts(self) -> dict[str, int]:
        """Texts for each sampling setting by split."""
        test = self.config.prompts.test
        validation = self.config.prompts.validation
        shares = {"train": 1 - test - validation, "validation": validation, "test": test}
        texts = self.config.data.texts
        return {split: max(2, round(texts * share)) for split, share in shares.items()}

    def _prompted_work(self) -> Iterator[Work]:
        for split, count in self._counts().items():
            prompts = prompts_of(self.config, self.pair, split)
            for sampling_setting in self.config.sampling:
                sampling = sampling_setting.build()
                # all greedy texts of one prompt are the same
                different = min(count, len(prompts)) if sampling.temperature == 0 else count
                texts = []
                for number in range(different):
                    continuation, prompt = divmod(number, len(prompts))
                    texts.append((prompts[prompt], continuation))
                decoded = 0
                if split == "train":
                    decoded = round(self.config.data.decoded * len(texts))
                yield Work(split, sampling, tuple(texts[:decoded]), decoded=True)
                # shorter prompts are padded to longer ones
                by_length = sorted(texts[decoded:], key=lambda text: len(text[0].text))
                yield Work(split, sampling, tuple(by_length))

    def _logs(self, path: Path) -> Logs:
        if len(self.config.sampling) > 1:
            raise InputError("data.log: a log's texts are of one sampling setting: name one")
        return read_all([path], [], self.config.sampling[0].build())

    def _logged_work(self, path: Path) -> Iterator[Work]:
        """InputError where a text is too long or has tokens of another vocabulary, or a split would
        be empty."""
        logs = self._logs(path)
        longest = 0
        for text in logs.texts:
            if len(text.tokens) > self.pair.max_positions:
                raise InputError(
                    f"{text.origin}: {len(text.tokens)} tokens; the pair has "
                    f"{self.pair.max_positions} positions"
                )
            if max(text.tokens) >= self.pair.vocabulary:
                raise InputError(
                    f"{text.origin}: a token beyond the vocabulary of {self.pair.vocabulary}"
                )
            longest = max(longest, len(text.tokens))
        check_models(self.pair, longest)  # no trees are drafted behind these texts
        sampling = self.config.sampling[0].build()
        splits = splits_of(logs, self.config.prompts.validation, self.config.prompts.test)
        for split, texts in splits.items():
            yield Work(split, sampling, (), logged=tuple(texts))
