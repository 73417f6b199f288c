"""The decision in NumPy alone, for engines without torch, from `model.safetensors` and `config.json` of an artefact.

Legend: B roots, F scalars, D hidden width, S sampling settings, L context lengths, A actions, H outputs of the network.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FORMAT = "espalier-selector-11"
READ = "model.safetensors", "config.json"
DTYPES = {"F32": np.float32, "I64": np.int64, "BOOL": np.bool_}
LAYER_NORM_EPSILON = 1e-5
DOUBLING, ANY_LEVEL = np.float32(1e-3), -1.0  # distance of twice the batch size; a mode for every level
FAR, FARTHER = (0.1, 0.05), np.float32(1e3)  # in temperature and top-p: where a mode no longer decides
NEVER = np.float32(-1e9)  # the score of an action that may not be chosen


class PlainSelector:
    """An exported selector, from a directory that the export stage wrote.

    Attributes:
        actions: `(K, L1, L2)` of a tree, with its style behind where that is not i.i.d.; `(length,)` of a lookup.
        early: number of scalars of the first feature level.
        widths: number of all scalars, and the width of each hidden state.

    Raises:
        ValueError: a file is missing, does not match `SHA256SUMS`, or is of another format; names it.
    """

    def __init__(self, folder: str | Path) -> None:
        files = _read(Path(folder))
        self.config = json.loads(files["config.json"])
        if self.config.get("format") != FORMAT:
            raise ValueError(f"{folder}: {self.config.get('format')}; this program reads {FORMAT}: export it again")
        self._tensors = tensors(files["model.safetensors"])
        self.actions: list[tuple[Any, ...]] = [tuple(action) for action in self.config["actions"]]
        self.early: int = self.config["features"]["early"]
        self.widths = [len(self.config["features"]["scalars"]), *self.config["features"]["hidden_states"].values()]
        self._regressor = self.config["objective"] == "regressor"
        names = [scalar["name"] for scalar in self.config["features"]["scalars"]]
        self._match, self._length = names.index("match"), names.index("context_length")
        self._setting, self._batch = [names.index("temperature"), names.index("top_p")], names.index("batch")

    def decide(self, scalars_BF: Array, hidden_states: Sequence[Array] = ()) -> tuple[Array, Array]:
        """Positions of the chosen actions, int64 [B], and scores, float32 [B, A].

        Args:
            scalars_BF: float32, all scalars, or those of the first level alone where no more are known.
            hidden_states: float32 [B, D] each, in the order of `config.json`, for a selector with `full` features.

        Raises:
            ValueError: an array has another shape, or a number is not finite.
        """
        scalars_BF = np.asarray(scalars_BF, dtype=np.float32)
        early = scalars_BF.ndim == 2 and scalars_BF.shape[1] == self.early
        states = [] if early else [np.asarray(state, dtype=np.float32) for state in hidden_states]
        given, found = [scalars_BF, *states], [each.shape[1:] for each in (scalars_BF, *states)]
        expected = [(width,) for width in ([self.early] if early else self.widths)]
        if found != expected or len(set(map(len, given))) != 1:
            raise ValueError(f"features of shapes {found} for each root; expected {expected}")
        if not all(np.isfinite(each).all() for each in given):
            raise ValueError("features: a number is not finite")
        find = self._tensors
        batch_B1 = DOUBLING * np.log2(scalars_BF[:, self._batch].clip(min=1))[:, None]
        setting_B3 = np.concatenate([scalars_BF[:, self._setting], batch_B1], axis=-1)
        distance_BS3 = np.abs(setting_B3[:, None] - find["settings_S3"])
        other_top_p_BS = (distance_BS3[..., 1] > FAR[1] + 1e-6) & (setting_B3[:, :1] > 0)
        beyond_BS = (distance_BS3[..., 0] > FAR[0] + 1e-6) | other_top_p_BS
        distance_BS = distance_BS3.sum(-1) + FARTHER * beyond_BS
        of_this_level_S = (find["level_S"] == ANY_LEVEL) | (find["level_S"] == float(not early))
        at_B = np.where(of_this_level_S, distance_BS, np.inf).argmin(-1)
        passed_B1 = find["late_S"][at_B][:, None] * np.float32(not early)
        scores_BA = self._network(given, passed_B1)
        beyond_B1 = np.take_along_axis(beyond_BS, at_B[:, None], -1)  # there the static tree is chosen
        decides_B1 = (scalars_BF[:, self._length] <= find["longest_S"][at_B])[:, None]  # beyond, the lookup rule does
        copies_B1 = (scalars_BF[:, self._match] >= find["least_S"][at_B])[:, None]
        by_rule_BA = np.where(copies_B1 & ~beyond_B1, find["copied_SA"][at_B], find["static_SA"][at_B])
        allowed_BA = np.where(decides_B1 & ~beyond_B1, find["allowed_SA"][at_B], by_rule_BA)
        if self._regressor:  # the network's outputs are logits of conditional survivals
            log_survivals_BS = -np.logaddexp(0, -scores_BA) @ find["network.factors_SS"]
            tokens_BA = 1 + np.exp(log_survivals_BS) @ find["sums_SA"]
            table = np.where(passed_B1[:, :, None] > 0, find["late_SLA"][at_B], find["early_SLA"][at_B])
            seconds_BA = _interpolated(table, find["lengths_L"], scalars_BF[:, self._length])
            speed_B1, rho_B1 = find["speed_S"][at_B][:, None], find["rho_S"][at_B][:, None]
            own_B1 = np.where(allowed_BA, tokens_BA / seconds_BA, 0).max(-1, keepdims=True)
            scores_BA = tokens_BA - speed_B1 ** (1 - rho_B1) * own_B1**rho_B1 * seconds_BA
        scores_BA = np.where(allowed_BA, scores_BA, NEVER)
        return scores_BA.argmax(-1), scores_BA

    def predict(self, frame: Any, params: Any = None) -> Any:
        """The decisions in the form that MLflow calls: a DataFrame with the columns `K`, `L1`, `L2`, which are
        (0, length, 0) for a lookup, and `style`.

        Args:
            frame: a DataFrame with a column for each scalar and each hidden state, or for the early scalars alone.
            params: not used.
        """
        names = [scalar["name"] for scalar in self.config["features"]["scalars"]]
        names = names if set(names) <= set(frame.columns) else names[: self.early]
        states = [np.stack(list(frame[name])) for name in self.config["features"]["hidden_states"] if name in frame]
        index_B, _ = self.decide(frame[names].to_numpy(np.float32), states)
        chosen = [self.actions[index] for index in index_B]
        shapes = [(0, *action, 0) if len(action) == 1 else action for action in chosen]
        rows = [shape if len(shape) == 4 else (*shape, "iid") for shape in shapes]
        return type(frame)(rows, columns=["K", "L1", "L2", "style"])

    def _network(self, given: list[Array], passed_B1: Array) -> Array:
        """The outputs of `selector.train.network.RootNetwork`, from scalars and, where known, hidden states, [B, H]."""
        find, body = self._tensors, "network.body." if self._regressor else "network."
        scalars_BF, seen = given[0], given[0].shape[1]
        names = "mean_F", "scale_F", "count_F", "low_F", "high_F"
        mean_F, scale_F, count_F, low_F, high_F = (find[body + name][:seen] for name in names)
        clipped_BF = scalars_BF.clip(low_F, high_F)
        values_BF = np.where(count_F, np.log1p(clipped_BF.clip(min=0)), clipped_BF)
        scaled_BF = np.zeros((len(scalars_BF), self.widths[0]), np.float32)
        scaled_BF[:, :seen] = (values_BF - mean_F) / scale_F
        scaled_BF[:, self.early :] *= passed_B1
        parts = [scaled_BF, passed_B1]
        for i, width in enumerate(self.widths[1:]):
            state_BD = given[1 + i] if len(given) > 1 else np.zeros((len(scalars_BF), width), np.float32)
            name = f"{body}blocks.{i}."
            values = state_BD @ find[name + "0.weight"].T + find[name + "0.bias"]
            spread = np.sqrt(values.var(-1, keepdims=True) + LAYER_NORM_EPSILON)
            normed = (values - values.mean(-1, keepdims=True)) / spread * find[name + "1.weight"]
            parts.append((normed + find[name + "1.bias"]) * passed_B1)
        values = np.concatenate(parts, axis=-1)
        layers = sorted({int(name.split(".")[-2]) for name in find if name.startswith(body + "mlp.")})
        for i in layers:
            values = values @ find[f"{body}mlp.{i}.weight"].T + find[f"{body}mlp.{i}.bias"]
            if i != layers[-1]:
                values = np.maximum(values, 0) if self._regressor else gelu(values)
        return values


def _load_pyfunc(folder: str) -> PlainSelector:
    """What MLflow calls to load a registered selector."""
    return PlainSelector(folder)


def gelu(values: Array) -> Array:
    """The activation of a policy's network, with the hyperbolic tangent as in torch's `approximate="tanh"`."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (values + np.float32(0.044715) * values**3)
    activated: Array = np.float32(0.5) * values * (np.float32(1) + np.tanh(inner))
    return activated


def _interpolated(table_BLA: Array, lengths_L: Array, length_B: Array) -> Array:
    """Rows of tables at other lengths, linear in between and constant beyond; [B, A]."""
    length_B = length_B.clip(lengths_L[0], lengths_L[-1])
    upper_B = np.searchsorted(lengths_L, length_B).clip(1, len(lengths_L) - 1)
    low_B, high_B = lengths_L[upper_B - 1], lengths_L[upper_B]
    share_B1 = ((length_B - low_B) / (high_B - low_B))[:, None]
    b = np.arange(len(length_B))
    return table_BLA[b, upper_B - 1] * (1 - share_B1) + table_BLA[b, upper_B] * share_B1


def _read(folder: Path) -> dict[str, bytes]:
    """The contents of the files in `READ`, whose checksums must match."""
    try:
        lines = (folder / "SHA256SUMS").read_text().splitlines()
        listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        files = {name: (folder / name).read_bytes() for name in READ}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder}: no selector directory, or a file of it is missing ({error})") from error
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != listed.get(name):
            raise ValueError(f"{folder / name}: its checksum does not match SHA256SUMS; export the selector again")
    return files


def tensors(content: bytes) -> dict[str, Array]:
    """The tensors of a safetensors file: the length of its header, the header in JSON, then the numbers."""
    size = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + size]), memoryview(content)[8 + size :]
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }
