"""Stage `evaluate`: held-out prompts decoded with every method, and held-out texts replayed.

Every prompt is decoded with every method in turn, in one round or several; the order rotates from round to round.
Replay uses this machine's latency profile and the clocks of other machines.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from data_gen.decoding import EAGER
from data_gen.models.pair import ModelPair
from data_gen.texts.prompts import Prompt
from data_gen.texts.written import seed_of
from pipelines.config import Config, SamplingSetting
from pipelines.data.recorded import load_traces, settings_of
from pipelines.evaluate import losslessness
from pipelines.evaluate.assisted import CONSTANTS, LOOKUPS, Assistant, best_of
from pipelines.evaluate.methods import BEST_STATIC, COPYING, NETWORK, SELECTOR, Decoding, Method, static_methods
from pipelines.evaluate.origins import strips
from pipelines.evaluate.table import Figure, Rows, Table, entries, figures, replays, setting_name, summary
from pipelines.evaluate.verdict import Evaluation, metrics, show, title, verdicts
from pipelines.latency.profile import load_profile
from pipelines.latency.timings import profile_of, read_timings
from pipelines.pair.loading import encode, load_pair, prompts_depend, prompts_of
from pipelines.run import Journal, Stage, ticking, watched
from pipelines.tracking import describe, mlflow_run
from pipelines.train.judging import by_setting, judge, statics
from pipelines.train.packaging import build
from pipelines.train.result import chosen_of, decision_digest, load_module, load_result, rule_of
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.runtime.selector import Tuned
from selector.sampling import Sampling
from selector.schema import sha256
from selector.train.data import Texts
from selector.train.module import SelectorModule
from selector.train.tuning import Judged

T = TypeVar("T")
Contenders = dict[Sampling, list[Method | Assistant]]  # by sampling setting
PARTIAL = "evaluation.partial.jsonl"  # the prompts that were decoded before an interruption
TUNED = "evaluation.tuned.jsonl"  # transformers' own methods that were tuned before an interruption
GREEDY_PROMPTS = 40
SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train", "evaluate")
TUNING_PROMPTS = 16  # training prompts on which transformers' own methods are tuned, for every sampling setting


def _rounds(config: Config, setting: SamplingSetting) -> int:
    return 1 if setting.temperature > 0 else config.evaluate.rounds


def plan(config: Config) -> list[str]:
    return [
        f"{config.evaluate.prompts} prompts x {len(config.sampling)} sampling settings with every method, in "
        f"{config.evaluate.rounds} rounds where text is greedy, {config.data.tokens} tokens each; then replay"
    ]


def stage_of(config: Config) -> Stage:
    """The stage with what it depends on; InputError unless training is finished."""
    profile = load_profile(config)
    inputs = {
        "evaluate": config.evaluate.model_dump(mode="json"),
        "clocks": [sha256(path) for path in clocks(config, profile)],
        "prompts": prompts_depend(config, "test"),
        "sampling": [setting.model_dump() for setting in config.sampling],
        "verifiers": list(config.verifiers),
        "seed": config.seed,
        "pair": profile.pair,
        "latency": profile.to_json(),
        **decision_digest(config, load_result(config)),
    }
    return Stage("evaluate", config, inputs, Evaluation.files(config))


def run(config: Config) -> None:
    result = load_result(config)
    pair = load_pair(config)
    profile = load_profile(config, pair)
    stage = stage_of(config)
    if not stage.begin():
        show(title(config, profile.device), Evaluation.read(config))
        return
    with mlflow_run(config, "evaluate", SECTIONS) as mlflow:
        evaluation = _evaluated(stage, pair, profile, result)
        stage.replace()
        evaluation.write(config)
        for path in stage.outputs:
            mlflow.log_artifact(str(path))
        describe(mlflow, "\n\n".join(verdicts(evaluation)), metrics(evaluation))
    show(title(config, profile.device), evaluation)
    stage.say(losslessness.summary(evaluation.found["greedy"]))
    stage.finish()
    for name in (PARTIAL, TUNED):
        (config.folder / name).unlink(missing_ok=True)


def _evaluated(stage: Stage, pair: ModelPair, profile: LatencyProfile, result: dict[str, Any]) -> Evaluation:
    config = stage.config
    prompts = prompts_of(config, pair, "test", config.evaluate.prompts)
    splits = load_traces(config, profile.pair)
    module = load_module(config, result["chosen"], result)
    methods = _methods(config, profile, splits, result, module)
    replayed = list(replays(methods, splits["test"], profile))
    for path, clock in clocks(config, profile).items():
        replayed += _on_clock(config, clock, splits, module, path.stem)
    contenders: Contenders = {key: [each for each in own if each.is_decoded] for key, own in methods.items()}
    if config.evaluate.assisted:
        tuned = tuned_assistants(config, pair, Journal(config.folder / TUNED, stage.depends))
        for setting, assistants in tuned.items():
            contenders[setting] += assistants
    greedy = losslessness.greedy_check(pair, config, prompts[:GREEDY_PROMPTS])
    decoded = decode_prompts(config, pair, prompts, contenders, Journal(config.folder / PARTIAL, stage.depends))
    table = Table([*figures(decoded), *replayed])
    first = setting_name(config.sampling[0].temperature, config.sampling[0].top_p)
    own_rows = [row for row in decoded if (row["method"], row["setting"]) == (SELECTOR, first)]
    found = {
        "summary": summary(config, table, decoded),
        "methods": entries(table, decoded),
        "replayed": [
            {
                "setting": setting_name(key.temperature, key.top_p),
                "method": each.name,
                "verifier": each.verifier,
                "drafts": each.drafts,
            }
            for key, own in methods.items()
            for each in own
            if not each.is_decoded
        ],
        "decisions": chosen_of(result)["modes"],
        "greedy": greedy,
        "strips": strips(own_rows, prompts, partial(encode, config, pair), pair.tokenizer),
    }
    return Evaluation(found, table)


def _methods(
    config: Config, profile: LatencyProfile, splits: dict[str, Texts], result: dict[str, Any], module: SelectorModule
) -> dict[Sampling, list[Method]]:
    with tempfile.TemporaryDirectory() as temporary:
        selector = build(config, Path(temporary) / "selector", splits)
    verifier, judged = config.train.verifier, _judged(config, profile, splits, module)
    methods: dict[Sampling, list[Method]] = {}
    for mode in map(Mode.of, watched(chosen_of(result)["modes"], "choosing the methods")):
        own = static_methods(splits["train"].setting_of(mode.sampling), config.verifiers, profile)
        best = next(method for method in own if method.name == BEST_STATIC)
        own.append(Method(COPYING, best.verifier, rule_of(result, mode.sampling, best.verifier)))
        own.append(Method(SELECTOR, verifier, mode, module, Tuned(mode, selector)))
        own.append(Method(NETWORK, verifier, judged[mode.sampling].mode, module))  # whatever is exported
        methods[mode.sampling] = own
    return methods


def clocks(config: Config, profile: LatencyProfile) -> dict[Path, LatencyProfile]:
    """The step times of other machines and pairs for single requests, with this machine's decisions; InputError where a
    file cannot be read."""
    rows = {path: read_timings(path) for path in config.evaluate.clocks}
    found = {path: profile_of(own, str(path), False, profile.pair, config.verifiers) for path, own in rows.items()}
    return {path: replace(own.at_batch(1), decide=profile.decide) for path, own in found.items()}


def _on_clock(
    config: Config, profile: LatencyProfile, splits: dict[str, Texts], module: SelectorModule, name: str
) -> Iterator[Figure]:
    """The same network, tuned and judged on another clock, and the static trees that are fastest there."""
    methods: dict[Sampling, list[Method]] = {}
    for setting, each in _judged(config, profile, splits, module).items():
        mode = each.mode if each.pays and module.is_regressor else each.mode.static_only()
        own = static_methods(splits["train"].setting_of(setting), config.verifiers, profile)
        methods[setting] = [*own, Method(SELECTOR, config.train.verifier, mode, module)]
    return replays(methods, splits["test"], profile, name)


def _judged(
    config: Config, profile: LatencyProfile, splits: dict[str, Texts], module: SelectorModule
) -> dict[Sampling, Judged]:
    train, validation = (by_setting(config, splits[name], profile) for name in ("train", "validation"))
    return dict(zip(settings_of(config), judge(module, validation, statics(train)), strict=True))


def tuned_assistants(config: Config, pair: ModelPair, journal: Journal) -> dict[Sampling, list[Assistant]]:
    """Assisted generation as it is by default, and with its best number of drafted tokens; and prompt lookup with its
    best number of tokens and longest match. Those that the journal already holds are not tuned again."""
    prompts = [encode(config, pair, prompt) for prompt in prompts_of(config, pair, "train")[:TUNING_PROMPTS]]
    for setting in watched(config.sampling[len(journal.entries) :], "tuning transformers' own methods"):
        sampling, limit = setting.build(), config.data.tokens
        seed = seed_of(config.seed, sampling, "assisted") % 2**31
        kinds = (LOOKUPS,) if pair.has_head else (CONSTANTS, LOOKUPS)  # `generate` takes no head as an assistant
        tuned = [best_of(kind, pair, sampling, prompts, limit, seed) for kind in kinds]
        journal.add([asdict(each) for each in ([] if pair.has_head else [Assistant()]) + tuned])
    found = ([Assistant(**each) for each in entry] for entry in journal.entries)
    return dict(zip(settings_of(config), found, strict=True))


def decode_prompts(
    config: Config, pair: ModelPair, prompts: list[Prompt], contenders: Contenders, journal: Journal
) -> Rows:
    """Every prompt under every setting with every method; those that the journal already holds are not decoded."""
    finished = {(row["prompt"], row["temperature"], row["top_p"]) for rows in journal.entries for row in rows}
    tasks = [(prompt, setting) for prompt in prompts for setting in config.sampling]
    todo = [(prompt, s) for prompt, s in tasks if (prompt.id, s.temperature, s.top_p) not in finished]
    with ticking("decoding held-out prompts", len(tasks), len(tasks) - len(todo)) as tick:
        if todo:  # a process decodes its first prompt more slowly than the others, so this result is not used
            _rehearse(config, pair, todo[0][0], contenders)
            _decode_all(config, pair, *todo[0], contenders)
        for prompt, setting in todo:
            journal.add(_decode_all(config, pair, prompt, setting, contenders))
            tick()
    return [row for rows in journal.entries for row in rows]


def _rehearse(config: Config, pair: ModelPair, prompt: Prompt, contenders: Contenders) -> None:
    tokens, settings = encode(config, pair, prompt), [setting.build() for setting in config.sampling]
    each = [(sampling, method) for sampling in settings for method in contenders[sampling]]
    for sampling, method in watched(each, "rehearsing") if pair.decoder != EAGER else ():
        if isinstance(method, Method):
            method.rehearse(pair, sampling, tokens, config.data.tokens)


def turns(items: Sequence[T], rounds: int) -> list[list[T]]:
    """The items once in each round, rotated so that each of them takes different places: every place once in as many
    rounds as there are items."""
    step = max(1, len(items) // rounds)
    shifts = (number * step % len(items) for number in range(rounds))
    return [[*items[shift:], *items[:shift]] for shift in shifts]


def _decode_all(
    config: Config, pair: ModelPair, prompt: Prompt, setting: SamplingSetting, contenders: Contenders
) -> Rows:
    sampling, methods = setting.build(), contenders[setting.build()]
    seed = seed_of(config.seed, prompt.id, sampling, "evaluate")  # one for all rounds, so that texts are written again
    tokens = encode(config, pair, prompt)
    distinct = list({method.identity: method for method in methods}.values())  # what decodes alike decodes once
    decodings: dict[Any, list[Decoding]] = {method.identity: [] for method in distinct}
    for order in turns(random.Random(seed).sample(distinct, len(distinct)), _rounds(config, setting)):
        for method in order:
            decodings[method.identity].append(method.decode(pair, sampling, tokens, config.data.tokens, seed))
    return [
        {
            **{"prompt": prompt.id, "kind": prompt.kind, "source": prompt.source},
            **{"temperature": setting.temperature, "top_p": setting.top_p},
            "setting": setting_name(setting.temperature, setting.top_p),
            **{"method": method.name, "verifier": method.verifier, "drafts": method.drafts},
            **vars(decodings[method.identity][0]),
            "rounds": [[each.tokens, each.seconds] for each in decodings[method.identity]],
        }
        for method in methods
    ]
