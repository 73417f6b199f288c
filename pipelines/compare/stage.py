"""Stage `compare`: the papers' tables on the run's traces (`make papers`).

DDTE (arXiv 2602.16994) compares verifiers with static trees from the root (Tables 2 and 3), with delayed trees and with
a selector (Tables 4 to 7). Here each of them decodes the same held-out texts by exact replay, under every sampling
setting, on this machine's step times, on those of `evaluate.clocks`, and by the paper's own model of time (equation
11). Static trees are chosen on the training texts of each *cell*, a kind of prompts under a setting; a selector falls
back to the setting's tree. Means are over cells, and errors, one standard error, over sources. MDSD (arXiv 2502.18779)
compares how drafts are drawn: the acceptance that is possible with each.

Legend: X texts, A actions, C cells, V vocabulary.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from data_gen.drafting.sampled import draft_tree
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.traces import read_manifest, space_of
from data_gen.verification import get_verifier, optimal_acceptance
from pipelines.config import Config
from pipelines.data.recorded import load_traces, settings_of, traces_folder
from pipelines.evaluate.stage import clocks
from pipelines.evaluate.table import ALL, Figure, Table, replayed_figure
from pipelines.latency.stage import load_profile
from pipelines.pair.stage import load_pair
from pipelines.run import Stage, console, table, watched
from pipelines.tracking import describe, mlflow_run, nested_run
from pipelines.train.fitting import fitted, module_of
from pipelines.train.judging import judge
from pipelines.train.result import inputs
from pipelines.train.stage import trained
from selector import latency
from selector.actions import STYLES, Action, ActionSpace
from selector.decision import Mode
from selector.latency import LatencyProfile, Verification
from selector.sampling import Sampling
from selector.schema import LIGHT, sha256, survival_column
from selector.train.data import SPLITS, Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Ratio, Replayed, fastest_possible, jackknifed
from selector.train.tuning import StaticTable, best_static, replay_mode

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train", "evaluate")
TREES, GREEDY, COPIES, BOTH = SPACES = ("trees", "greedy trees", "copies", "greedy trees and copies")
OF = {  # the actions of each kind of selector
    TREES: ActionSpace.default(),
    GREEDY: ActionSpace.recorded(),
    COPIES: ActionSpace.with_lookups(),
    BOTH: ActionSpace.of_pairs(),
}
AT_ROOT, DELAYED, PRINTED, ORACLE = "root tree", "delayed tree", "policy (eq. 12)", "oracle"
BY_STEPS = ", by tokens per step"  # static trees that are chosen by tokens per step instead of speed
RIVAL = "traversal", AT_ROOT
WIDER = ("traversal", "lifted_uniform")  # verifiers whose selectors also choose among the further actions
WITH_POLICY = "specinfer"  # the verifier with which the paper's selector is fastest
HERE, IDEAL = "this machine", "eq. 11, draft pass 1/10"
ROOTS, DRAWS, DEPTH = 4, 4, 6  # roots of each setting whose trees are drafted; trees of each; their depth


def plan(config: Config) -> list[str]:
    return [
        f"{len(config.verifiers)} verifiers x {len(config.sampling)} sampling settings on "
        f"{2 + len(config.evaluate.clocks)} clocks: static trees, selectors, oracles; training of a network each"
    ]


def stage_of(config: Config) -> Stage:
    """The stage with what it depends on; InputError without a latency profile or traces."""
    profile = load_profile(config)
    own = {**inputs(config, profile), "clocks": [sha256(path) for path in clocks(config, profile)]}
    outputs = config.folder / "papers.parquet", config.folder / "papers"
    return Stage("compare", config, {**own, "verifiers": list(config.verifiers)}, outputs)


def run(config: Config) -> None:
    stage = stage_of(config)
    found, folder = stage.outputs
    if stage.begin():
        pair = load_pair(config)
        profile = load_profile(config, pair)
        splits = load_traces(config, profile.pair)
        with mlflow_run(config, "compare", SECTIONS) as mlflow:
            stage.replace()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            modules = networks(config, splits, folder, mlflow)
            every = all_clocks(config, profile)
            figures = [*by_depth(config, splits["test"]), *drafted(config, pair)]
            for name, clock in every.items():
                figures += on_clock(config, name, clock, splits, modules, mlflow)
            Table(figures).write(found)
            mlflow.log_artifact(str(found))
            describe(mlflow, f"{len(figures)} figures: {found.name}")
        stage.finish()
    show(Table.read(found))


def all_clocks(config: Config, profile: LatencyProfile) -> dict[str, LatencyProfile]:
    """Latency profiles by name: this machine's, those of `evaluate.clocks`, and DDTE's equation 11, by which a pass
    takes as long for many tokens as for one, and nothing else takes any time."""
    free: dict[str, Any] = {"drafting": 0.0, "nucleus": 0.0, "lag": latency.NO_LAG}
    free |= {"draft": latency.Table([1], [1], [[0.1]]), "target": latency.Table([1], [1], [[1.0]])}
    free |= {"verify": dict.fromkeys(config.verifiers, Verification()), "decide": dict.fromkeys(profile.decide, 0.0)}
    ideal = replace(profile, **free)
    return {HERE: profile, **{path.stem: own for path, own in clocks(config, profile).items()}, IDEAL: ideal}


def networks(
    config: Config, splits: Mapping[str, Texts], folder: Path, mlflow: Any
) -> dict[tuple[str, str], SelectorModule]:
    """Trained regressors by verifier and kind of actions: each verifier over trees, `WIDER` ones over all kinds."""
    asked = [(name, TREES) for name in config.verifiers]
    asked += [(name, more) for name in WIDER if name in config.verifiers for more in SPACES[1:]]
    found = {}
    for name, actions in watched(asked, "training regressors"):
        texts = {split: replace(own, space=OF[actions]) for split, own in splits.items()}
        module = module_of(config, "regressor", LIGHT, [], space=OF[actions].to_json())
        with nested_run(mlflow, f"{name}, {actions}") as nested:
            place = folder / f"{name}, {actions}", nested.info.run_id
            found[name, actions] = fitted(config, module, texts, name, [], *place)
    return found


def on_clock(
    config: Config,
    clock: str,
    profile: LatencyProfile,
    splits: Mapping[str, Texts],
    modules: Mapping[tuple[str, str], SelectorModule],
    mlflow: Any,
) -> Iterator[Figure]:
    """The speed of every verifier with every method over Traversal's static trees at the root: the mean over cells, the
    least cell, and each cell. And tokens per step."""
    found: dict[tuple[str, str], list[Tensor]] = defaultdict(list)  # tokens, seconds and steps of each setting, [3, X]
    settings, root_A = settings_of(config), torch.tensor([tree.L1 == 0 or tree.K == 1 for tree in OF[TREES].trees])
    for name, sampling in watched(list(product(config.verifiers, settings)), f"replaying, {clock}"):
        train, test = (_timed(splits[split], sampling, name, profile, TREES) for split in ("train", "test"))
        tables = StaticTable.of(train), StaticTable.of(test)
        for method, allowed_A in ((AT_ROOT, root_A), (DELAYED, root_A | True)):
            for by_steps in (False, True)[: 1 + (clock == HERE)]:
                own = _best_tree_by_kind(train.texts, test.texts, tables, allowed_A, by_steps)
                found[name, method + BY_STEPS * by_steps].append(own)
        oracle = fastest_possible(test.survivals_RS, test.seconds(), test.texts.size_X, test.space)
        found[name, ORACLE].append(_totals(oracle))
        for (_, actions), module in ((key, own) for key, own in modules.items() if key[0] == name):
            place = splits, sampling, name, profile, actions
            found[name, f"selector, {actions}"].append(_network_or_tree(*place, module, best_static(train, tables[0])))
    if WITH_POLICY in config.verifiers:
        found[WITH_POLICY, PRINTED] = _policy_of_ddte(config, clock, profile, splits, mlflow)
    texts = [splits["test"].setting_of(sampling) for sampling in settings]
    cells = [(str(s), kind) for s, own in zip(settings, texts, strict=True) for kind in own.kind_X]
    names, sources = list(dict.fromkeys(cells)), [source for own in texts for source in own.source_X]
    cell_X = torch.tensor([names.index(cell) for cell in cells])
    source_X = torch.tensor([sorted(set(sources)).index(source) for source in sources])
    rival = RIVAL if RIVAL in found else (config.verifiers[0], AT_ROOT)
    rival_3X, measure = torch.cat(found[rival], dim=1), f"replayed on {clock} over {' '.join(rival)}"
    for (name, method), parts in found.items():
        label, own_3X = f"{name}: {method}", torch.cat(parts, dim=1)
        if method.endswith(BY_STEPS):
            mean = over_cells(own_3X[::2].T, cell_X, source_X)
            yield replayed_figure(ALL, label.removesuffix(BY_STEPS), "replayed tokens per step", mean)
            continue
        columns = torch.cat([own_3X[:2], rival_3X[:2]]).T
        yield replayed_figure(ALL, label, measure, over_cells(columns, cell_X, source_X))
        sums_CN = torch.zeros(len(names), 4, dtype=torch.float64).index_add_(0, cell_X, columns.double())
        ratio_C = sums_CN[:, 0] / sums_CN[:, 1] / (sums_CN[:, 2] / sums_CN[:, 3])
        yield Figure(ALL, label, ALL, f"{measure}, least cell", float(ratio_C.min()))
        for (setting, kind), ratio in zip(names, ratio_C.tolist(), strict=True):
            yield Figure(setting, label, kind, measure, ratio)


def _totals(replayed: Replayed) -> Tensor:
    return torch.stack([replayed.tokens_X, replayed.seconds_X, replayed.steps_X])


def _timed(texts: Texts, sampling: Sampling, verifier: str, profile: LatencyProfile, actions: str) -> Timed:
    return Timed(replace(texts, space=OF[actions]).setting_of(sampling), verifier, profile)


def _best_tree_by_kind(
    train: Texts, test: Texts, tables: tuple[StaticTable, StaticTable], allowed_A: Tensor, by_steps: bool
) -> Tensor:
    chosen_X = torch.zeros(len(test), dtype=torch.int64)
    cost_XA = tables[0].steps_XA if by_steps else tables[0].seconds_XA
    for kind in set(test.kind_X):
        own_X = torch.tensor([each == kind for each in train.kind_X])
        own_X = own_X if bool(own_X.any()) else ~own_X
        worth_A = tables[0].tokens_XA[own_X].sum(0) / cost_XA[own_X].sum(0)
        chosen_X[[each == kind for each in test.kind_X]] = worth_A.where(allowed_A, 0.0).argmax()
    return torch.stack([each_XA.gather(1, chosen_X.unsqueeze(-1))[:, 0] for each_XA in tables[1]])


def _network_or_tree(
    splits: Mapping[str, Texts],
    sampling: Sampling,
    verifier: str,
    profile: LatencyProfile,
    actions: str,
    module: SelectorModule,
    base: Mode,
) -> Tensor:
    validation, test = (_timed(splits[split], sampling, verifier, profile, actions) for split in SPLITS[1:])
    (judged,) = judge(module, [validation], [base])
    mode = judged.mode if judged.pays else base
    return _totals(replay_mode(test, module.predictions(test.texts, mode), mode))


def _policy_of_ddte(
    config: Config, clock: str, profile: LatencyProfile, splits: Mapping[str, Texts], mlflow: Any
) -> list[Tensor]:
    """Equation 12, trained for one clock. Unlike our selectors it decides at every root, as in the paper."""
    own = config.model_copy(update={"train": config.train.model_copy(update={"verifier": WITH_POLICY})})
    texts = {split: replace(each, space=OF[TREES]) for split, each in splits.items()}
    settings, place = settings_of(config), (WITH_POLICY, profile, TREES)
    by_split = {split: [_timed(each, sampling, *place) for sampling in settings] for split, each in splits.items()}
    bases = [best_static(each, StaticTable.of(each)) for each in by_split["train"]]
    module = module_of(own, "policy", LIGHT, [], space=OF[TREES].to_json())
    folder = config.folder / "papers" / f"{PRINTED}, {clock}"
    with nested_run(mlflow, folder.name) as nested:
        module = trained(own, module, texts, by_split["validation"], bases, folder, nested.info.run_id)
    modes = [judged.mode for judged in judge(module, by_split["validation"], bases)]
    each = zip(by_split["test"], modes, strict=True)
    return [_totals(replay_mode(test, module.predictions(test.texts, mode), mode, policy=True)) for test, mode in each]


def over_cells(columns_XN: Tensor, cell_X: Tensor, source_X: Tensor) -> Ratio:
    """Mean over cells of `sum(column 0) / sum(column 1)`, with four columns over `sum(column 2) / sum(column 3)`, and
    its standard error by the jackknife over sources. A cell whose only source is left out does not count."""
    spread_XCN = torch.zeros(len(columns_XN), int(cell_X.max()) + 1, columns_XN.shape[1], dtype=torch.float64)
    spread_XCN[torch.arange(len(columns_XN)), cell_X] = columns_XN.double()

    def mean(sums_C: Tensor) -> Tensor:
        sums_CN = sums_C.unflatten(-1, spread_XCN.shape[1:])
        first, *second = (sums_CN[..., n] / sums_CN[..., n + 1] for n in range(0, sums_CN.shape[-1], 2))
        return (first / second[0] if second else first).nanmean(-1)

    return jackknifed(spread_XCN.flatten(1), source_X, mean)


def by_depth(config: Config, texts: Texts) -> Iterator[Figure]:
    """DDTE, Figure 1: the acceptance at each depth of K branches from the root, given that the depth above was
    accepted; means over the roots of the held-out texts, by setting and verifier."""
    space = OF[TREES]
    for sampling, name in product(settings_of(config), config.verifiers):
        survivals_S = Timed(replace(texts, space=space).setting_of(sampling), name, None).survivals_RS.mean(0)  # type: ignore[arg-type]
        for K in range(1, space.max_K + 1):
            action = Action(K, 0, space.max_L2) if K > 1 else space.chain(space.max_L2)
            places = space.survival_of_AD[space.index(action)][: space.max_L2]
            reached = [1.0, *survivals_S[places].tolist()]
            for depth, (above, here) in enumerate(pairwise(reached), 1):
                yield Figure(str(sampling), name, ALL, f"acceptance at depth {depth}, K={K}", here / max(above, 1e-9))


@torch.inference_mode()
def drafted(config: Config, pair: ModelPair) -> Iterator[Figure]:
    """At a few roots of held-out texts: MDSD's optimal acceptance of K drafts, by how they are drawn; and block
    efficiencies as in DDTE, from the exact laws of trees that are drafted there: of Khisti, which has no labels, and of
    a verifier with labels, for comparison with these."""
    labelled = next(name for name in (WITH_POLICY, *config.verifiers) if name in config.verifiers)
    for sampling in watched([setting.build() for setting in config.sampling], "drafting trees"):
        found: dict[str, list[float]] = defaultdict(list)
        for row, space in _spaced_rows(config, sampling, labelled):
            root = row["start"] + row["roots"] // 2
            target, draft = CachedModel(pair.target), CachedModel(pair.draft)
            for model in (target, draft):
                model.fill(row["tokens"][:root])
            generator = torch.Generator(device=pair.device).manual_seed(config.seed)
            q_V = sampling.draft.probabilities(draft.extend(row["tokens"][root : root + 1]).logits_WV[0])
            action, efficiencies = Action(4, 0, DEPTH), defaultdict(list)
            for _ in range(DRAWS):
                tree = draft_tree(draft, q_V, action, sampling.draft, generator)
                draft.keep([])
                tokens_N = tree.tree.tokens_N.clone()
                tokens_N[0] = row["tokens"][root]
                passed = target.forward(tokens_N, tree.tree.depths_N, tree.tree.ancestors_NN())
                target.keep([])
                p_NV = sampling.probabilities(passed.logits_WV)
                for name in ("khisti", labelled):
                    efficiencies[name].append(get_verifier(name).block_efficiency(tree.tree, p_NV, tree.probs_NV))
            for K, style in product((2, 3, 4), STYLES):
                found[f"optimal acceptance, K={K}, {style}"].append(optimal_acceptance(p_NV[0], q_V, K, style))
            for name, values in efficiencies.items():
                found[f"drafted tokens per step, {action}, {name}"].append(sum(values) / DRAWS)
            survivals_RS = torch.tensor(row[survival_column(labelled)]).view(row["roots"], -1)
            label = space.efficiencies(survivals_RS[row["roots"] // 2].float())[space.index(action)]
            found[f"labelled tokens per step, {action}, {labelled}"].append(float(label))
        for measure, values in found.items():
            own_R = torch.tensor(values)
            error = Ratio(float(own_R.mean()), float(own_R.std() / len(own_R) ** 0.5))
            yield replayed_figure(str(sampling), "drafts", measure, error)


def _spaced_rows(config: Config, sampling: Sampling, verifier: str) -> Iterator[tuple[dict[str, Any], ActionSpace]]:
    folder, columns = traces_folder(config), ["tokens", "start", "roots", survival_column(verifier)]
    names = sorted(name for name in read_manifest(folder)["shards"] if name.startswith("test/"))
    shards = [pq.read_table(folder / name, columns=[*columns, "temperature", "top_p"]) for name in names]
    own = (pc.field("temperature") == sampling.temperature) & (pc.field("top_p") == sampling.top_p)
    mine = pa.concat_tables(shards).filter(own & (pc.field("roots") > 0))
    for number in range(ROOTS):  # evenly: the texts are ordered by the prompts' lengths
        yield mine.slice(len(mine) * number // ROOTS, 1).to_pylist()[0], space_of(shards[0])


def show(found: Table) -> None:
    for measure in dict.fromkeys(each.measure for each in found.figures if each.setting == each.kind == ALL):
        if "least cell" in measure:
            continue
        rows = []
        for method in found.methods(ALL, measure):
            least = found.get(ALL, method, f"{measure}, least cell")
            mean = found.of(ALL, method, measure).text(3)
            rows.append({"method": method, "mean": mean, "least cell": str(least or "")})
        console.print(table(rows, measure))
