"""Traces as tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_gen.features.root import ROW_NUMBERS
from data_gen.traces import TraceStore, read_texts, text_row, text_schema, texts_of, to_table
from selector.actions import ActionSpace
from selector.sampling import Sampling
from selector.schema import HIDDEN_STATES, LOOKUP_COLUMN, PAIR, InputError, survival_column
from selector.train.data import Texts, Timed
from selector.train.replay import monotone
from tests.selector.synthetic import WIDTHS, profile

NAMES = ["block", "lifted_uniform"]
SPACE = ActionSpace.of_pairs()
SURVIVALS = SPACE.tree_survivals
F = len(PAIR.scalars)


def entropy_of(text: int, root: int) -> float:
    return text + root / 64


def survivals_of(text: int, root: int, verifier: str) -> np.ndarray:
    """Numbers that half precision holds."""
    return (text + 8 * root + np.arange(SURVIVALS)) / 1024 + NAMES.index(verifier)


def lookup_of(text: int, root: int) -> int:
    """Up to 16."""
    return (5 * text + 7 * root) % 17


def hidden_of(text: int, root: int, state: int) -> np.ndarray:
    return text + root / 64 + np.arange(WIDTHS[state]) + 8 * state


def row(text: int, roots: int, stride: int = 1, full: bool = True, **changes: object) -> dict:
    """A text whose numbers say where they belong."""
    made = text_row(
        f"prompt {text}",
        f"source {text // 2}",
        "code" if text % 2 else "prose",
        Sampling(0.7),
        [1] * (roots + 30),
        5 + text,
        roots,
        16,
    )
    made["hidden_stride"] = stride
    made[ROW_NUMBERS[0]] = np.array([entropy_of(text, root) for root in range(roots)])
    for name in ROW_NUMBERS[1:]:
        made[name] = np.full(roots, 0.5)
    made[LOOKUP_COLUMN] = [lookup_of(text, root) for root in range(roots)]
    for verifier in NAMES:
        labels = [survivals_of(text, root, verifier) for root in range(roots)]
        made[survival_column(verifier)] = np.array(labels)
    for state, name in enumerate(HIDDEN_STATES if full else ()):
        recorded = range(1, roots, stride)
        made[name] = np.array([hidden_of(text, root, state) for root in recorded])
    return {**made, **changes}


def some(full: bool = True) -> Texts:
    """Four texts of different lengths, one of them of a single root, under two settings."""
    rows = [
        row(0, 4, full=full),
        row(1, 1, full=full, temperature=0.0),
        row(2, 6, stride=2, full=full, top_p=0.9, top_k=20, min_p=0.05, draft_temperature=0.3),
        row(3, 3, full=full),
    ]
    return texts_of(to_table(rows, text_schema(NAMES, full, ActionSpace.recorded())), NAMES)


def belongs(data: Texts, places: list[tuple[int, int]]) -> None:
    """Every row of the data is that of this text and root."""
    assert len(places) == len(data.length_R) == len(data.scalars_RF)
    assert data.lookup_R.dtype == torch.uint8
    assert data.lookup_R.tolist() == [lookup_of(*root) for root in places]
    for r, (text, root) in enumerate(places):
        scalars = [
            float(data.scalar(name)[r])
            for name in ("draft_entropy_prev", "draft_entropy_root", "context_length")
        ]
        length = 5 + text + root + 1
        assert scalars == (
            [entropy_of(text, root - 1), entropy_of(text, root), length] if root else [0, 0, 0]
        )
        assert int(data.length_R[r]) == length
        for verifier in NAMES:
            assert np.array_equal(
                data.survivals[verifier][r], survivals_of(text, root, verifier).astype(np.float16)
            )


PLACES = [
    (0, 0),
    (0, 1),
    (0, 2),
    (0, 3),
    (1, 0),
    *((2, n) for n in range(6)),
    *((3, n) for n in range(3)),
]


@pytest.mark.parametrize("full", [False, True])
def test_rows_follow_texts_and_their_roots(full: bool) -> None:
    data = some(full)
    belongs(data, PLACES)
    assert len(data) == 4
    assert data.size_X.tolist() == [4, 1, 6, 3]
    assert data.text_R.tolist() == [text for text, _ in PLACES]
    assert data.unknown_R.tolist() == [root == 0 for _, root in PLACES]
    assert data.prompt_X == [f"prompt {x}" for x in range(4)]
    assert data.kind_X == ["prose", "code", "prose", "code"]
    assert data.source_number_X.tolist() == [0, 0, 1, 1]
    assert bool(data.hidden) == full


def test_settings_are_those_that_were_meant() -> None:
    """0.7 and 0.9 are not what single precision makes of them."""
    data = some()
    assert data.samplings == [Sampling(0.7), Sampling(0.0), Sampling(0.7, 0.9, 20, 0.05, 0.3)]
    assert data.sampling_X.tolist() == [0, 1, 2, 0]
    assert data.of_sampling(Sampling(0.7)).prompt_X == ["prompt 0", "prompt 3"]
    with pytest.raises(InputError, match=r"no texts of T=1, top-p=0\.9"):
        data.of_sampling(Sampling(1.0, 0.9))


@pytest.mark.parametrize(
    "rows", [slice(None), slice(3, 9), torch.tensor([7, 0, 12, 7])], ids=["all", "some", "mixed"]
)
def test_labels_are_those_of_trees_and_what_a_lookup_had_right(rows: slice | torch.Tensor) -> None:
    """A lookup's survivals are certain: 1 as far as the text goes on with it, 0 from there on."""
    data = some()
    places = PLACES[rows] if isinstance(rows, slice) else [PLACES[r] for r in rows.tolist()]
    for verifier in NAMES:
        labels = data.labels(verifier, rows, SPACE)
        assert labels.dtype == torch.float32 and labels.shape == (len(places), 448 + 16)
        for root, labels_S in zip(places, labels, strict=True):
            trees_S = survivals_of(*root, verifier).astype(np.float16)
            assert np.array_equal(labels_S[:SURVIVALS], trees_S.astype(np.float32))
            right = lookup_of(*root)
            assert labels_S[SURVIVALS:].tolist() == [1.0] * right + [0.0] * (16 - right)
        # the first of them, where a space lacks styles
        for space in (ActionSpace.recorded(), ActionSpace.default()):
            assert torch.equal(data.labels(verifier, rows, space), labels[:, : len(space.sums_SA)])


def test_hidden_states_belong_to_their_roots() -> None:
    """At every root but the first, or at every second one from there on."""
    data = some()
    recorded = [(0, 1), (0, 2), (0, 3), (2, 1), (2, 3), (2, 5), (3, 1), (3, 2)]
    assert [PLACES[r] for r in (data.hidden_R >= 0).nonzero()[:, 0].tolist()] == recorded
    rows = torch.tensor([PLACES.index(root) for root in recorded])[
        torch.randperm(len(recorded), generator=torch.Generator().manual_seed(1))
    ]
    scalars_BF, states = data.features(rows, full=True)
    assert [state.dtype for state in states] == [torch.float32] * 3
    assert torch.equal(scalars_BF, data.scalars_RF[rows])
    for b, r in enumerate(rows.tolist()):
        for i, state in enumerate(states):
            assert np.allclose(state[b], hidden_of(*PLACES[r], i))


def test_texts_that_are_taken_keep_all_that_is_theirs() -> None:
    """In the order of the whole, however they are asked for; hidden states, too."""
    data = some()
    for asked, kept in (([3, 0], [0, 3]), ([1, 3], [1, 3])):
        taken = data.take(torch.tensor(asked))
        places = [root for root in PLACES if root[0] in kept]
        belongs(taken, places)
        for name in ("prompt_X", "kind_X", "source_X", "sampling_X", "size_X"):
            of_all = list(getattr(data, name))
            assert list(getattr(taken, name)) == [of_all[x] for x in kept], name
        rows = (taken.hidden_R >= 0).nonzero()[:, 0]
        _, states = taken.features(rows, full=True)
        for b, r in enumerate(rows.tolist()):
            assert np.allclose(states[1][b], hidden_of(*places[r], 1))
    assert len(data.take(torch.tensor([], dtype=torch.int64))) == 0


def test_a_verifier_without_labels_is_named() -> None:
    table = to_table([row(0, 4)], SCHEMA)
    with pytest.raises(InputError, match="no labels for traversal: add it to verifiers"):
        texts_of(table, ["block", "traversal"])
    alone = texts_of(table, ["block"])
    assert set(alone.survivals) == {"block"}
    labels_RS = monotone(alone.labels("block", slice(None), SPACE), SPACE)
    assert torch.equal(Timed(alone, "block", profile()).survivals_RS, labels_RS)


SCHEMA = text_schema(NAMES, True, ActionSpace.recorded())
FIRST = "train/part-00000.parquet"


def store(folder: Path) -> TraceStore:
    return TraceStore(folder, {"pair": "abc"})


def written(folder: Path, shards: dict[str, list[dict]]) -> Path:
    for name, rows in shards.items():
        store(folder).write(name, to_table(rows, SCHEMA))
    return folder


def test_a_value_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    """In no column; the first label is infinite in half precision alone."""
    eight = np.where(np.arange(8) == 5, np.nan, 1.0)
    spoilt: dict[str, Any] = {
        survival_column("block"): np.full((2, SURVIVALS), 1e6),
        "draft_temperature": np.inf,
        "draft_hidden_root": eight,
        "draft_prob": eight,
    }
    for column, value in spoilt.items():
        with pytest.raises(
            InputError, match=rf"part-00000.parquet: {column}: a value is not finite"
        ):
            written(tmp_path, {FIRST: [row(0, 2), row(1, 2, **{column: value})]})
    assert not store(tmp_path).holds(FIRST)
    written(tmp_path, {FIRST: []})
    assert store(tmp_path).total("rows") == 0 and store(tmp_path).holds(FIRST)


def test_a_shard_with_one_other_bit_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, {FIRST: [row(0, 4)]}) / FIRST
    content = bytearray(path.read_bytes())
    assert store(tmp_path).total("bytes") == len(content)
    content[50] ^= 1
    path.write_bytes(bytes(content))
    for use in (lambda: store(tmp_path).holds(FIRST), lambda: read_texts(tmp_path, "train", NAMES)):
        with pytest.raises(
            InputError, match=r"part-00000.parquet is damaged .*: remove it and run the data"
        ):
            use()
    path.unlink()
    assert not store(tmp_path).holds(FIRST)


def test_a_split_is_all_of_its_shards_and_no_other(tmp_path: Path) -> None:
    """Shards in the order of their names; texts that end before their first look-ahead are left
    out."""
    shards = {
        "train/part-00001.parquet": [row(2, 6, stride=2, top_p=0.9), row(9, 0), row(3, 3)],
        "test/part-00000.parquet": [row(7, 2)],
        FIRST: [row(8, 0), row(0, 4), row(1, 1, temperature=0.0)],
    }
    data = read_texts(written(tmp_path, shards), "train", NAMES)
    belongs(data, PLACES)
    whole = some()
    assert torch.equal(data.hidden_R, whole.hidden_R)
    assert all(torch.equal(data.hidden[name], whole.hidden[name]) for name in HIDDEN_STATES)
    assert read_texts(tmp_path, "test", NAMES[:1]).prompt_X == ["prompt 7"]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"manifest.json does not exist: run the data stage first"):
        read_texts(tmp_path, "train", NAMES)
    folder = written(tmp_path / "traces", {FIRST: [row(8, 0), row(9, 0)]})
    with pytest.raises(
        InputError, match=r"traces/train: its texts end before any root has its look-ahead"
    ):
        read_texts(folder, "train", NAMES)
    with pytest.raises(InputError, match=r"traces/test: no traces there"):
        read_texts(folder, "test", NAMES)
    (folder / FIRST).unlink()
    with pytest.raises(
        InputError, match=r"part-00000.parquet is missing: run the data stage again"
    ):
        read_texts(folder, "train", NAMES)
