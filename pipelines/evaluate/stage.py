"""Stage `evaluate`: held-out prompts decoded with every method, and held-out texts replayed; a
log's are only replayed.

Every prompt is decoded with every method in turn, in one round or several; the order rotates from
round to round. Replay uses this machine's latency profile and those of other machines.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from data_gen.models.pair import ModelPair
from data_gen.texts.generated import seed_of
from data_gen.texts.prompts import Prompt
from data_gen.traces import read_manifest
from pipelines.config import Config, SamplingSetting
from pipelines.data.recorded import load_traces, samplings_of, timed, traces_folder
from pipelines.evaluate import methods
from pipelines.evaluate.logged import evaluated
from pipelines.evaluate.methods import Assistant, Decoding, Method
from pipelines.evaluate.replays import rank_correlation, replayed
from pipelines.evaluate.table import (
    CORRELATION,
    Figure,
    Rows,
    Table,
    entries,
    figures,
    sampling_name_of,
    summary,
)
from pipelines.evaluate.verdict import Evaluation, metrics, show, title, verdicts
from pipelines.latency.stage import load_profile
from pipelines.latency.timings import profile_of, read_timings
from pipelines.pair.source import source_of
from pipelines.pair.stage import encode, load_pair, prompts_depend, prompts_of
from pipelines.run import Parts, Stage, verify
from pipelines.terminal import watched
from pipelines.tracking import describe, mlflow_run
from pipelines.train.judging import judge, statics, timed_cases
from pipelines.train.result import (
    build,
    decision_digest,
    known_digest,
    load_module,
    load_result,
)
from selector.latency import LatencyProfile
from selector.runtime.selector import Policy
from selector.sampling import Sampling
from selector.schema import InputError, sha256
from selector.train.data import Texts, Timed, offering
from selector.train.module import SelectorModule
from selector.train.tuning import tune_lookup_rule

T = TypeVar("T")
Contenders = dict[Sampling, list[Method | Assistant]]  # by sampling setting
GREEDY_PROMPTS = 40
TUNING_PROMPTS = 6  # on which transformers' own methods are tuned
WARM_UP = 16  # tokens that every method decodes first, which do not count


def plan(config: Config) -> list[str]:
    source = source_of(config)
    if source.decodes:
        return [
            f"{config.evaluate.prompts} prompts x {len(config.sampling)} sampling settings with "
            f"every method, in {config.evaluate.rounds} rounds where text is greedy, "
            f"{config.data.tokens} tokens each; then replay"
        ]
    if source.why_untrained:
        return []
    return ["replay of the held-out texts by batch size"]


def stage_of(config: Config) -> Stage:
    """The stage with what it depends on; InputError unless training is finished, where a selector
    can be trained."""
    if not source_of(config).decodes:
        verify(config, "data")
        shards = read_manifest(traces_folder(config))["shards"]
        hashes = {name: shard["sha256"] for name, shard in shards.items()}
        depends = {"traces": hashes, **known_digest(config)}
        return Stage("evaluate", config, depends, Evaluation.files(config))
    profile = load_profile(config)
    inputs = {
        "evaluate": config.evaluate.model_dump(mode="json"),
        "tokens": config.data.tokens,
        "clocks": {path.stem: sha256(path) for path in other_profiles(config, profile)},
        "prompts": prompts_depend(config, "test"),
        "sampling": [sampling_setting.model_dump() for sampling_setting in config.sampling],
        "verifiers": list(config.verifiers),
        "seed": config.seed,
        "pair": profile.pair,
        "latency": profile.to_json(),
        **decision_digest(config, load_result(config)),
    }
    return Stage("evaluate", config, inputs, Evaluation.files(config))


def run(config: Config) -> None:
    pair = load_pair(config) if source_of(config).decodes else None
    if pair:
        load_profile(config, pair)  # InputError where it is another pair's
    stage = stage_of(config)
    if not stage.begin():
        if pair:
            earlier = Evaluation.read(config)
            show(title(config, earlier), earlier)
        return
    with mlflow_run(config, "evaluate") as mlflow:
        evaluation = _decoded(stage, pair) if pair else Evaluation(*evaluated(config))
        stage.replace()
        evaluation.write(config)
        for path in stage.outputs:
            mlflow.log_artifact(str(path))
        mlflow.log_metrics(metrics(evaluation))
        describe(mlflow, "\n\n".join(verdicts(evaluation)))
    if pair:  # of a log, the report says all
        show(title(config, evaluation), evaluation)
        stage.say(methods.greedy_summary(evaluation.contents["greedy"]))
    stage.finish()


def _decoded(stage: Stage, pair: ModelPair) -> Evaluation:
    config = stage.config
    result = load_result(config)
    profile = load_profile(config, pair)
    prompts = prompts_of(config, pair, "test", config.evaluate.prompts)
    traces = load_traces(config)
    module = load_module(config, result)
    # static trees and rules are rivals: they are chosen from all trees
    whole_space = replace(traces["test"].space, ranked=module.space.ranked)
    splits = offering(traces, whole_space)
    with tempfile.TemporaryDirectory() as temporary:
        selector = build(config, Path(temporary) / "selector", splits)
    exported = {}
    for setting in selector.settings:
        chooser = Policy(setting, selector)
        exported[setting.sampling] = Method(
            methods.SELECTOR, config.train.verifier, setting, module, chooser
        )
    compared = _compared(config, profile, splits, module, exported)
    replay_figures = list(replayed(compared, splits["test"], profile))
    if module.is_regressor:
        test = offering(splits, module.space)["test"]
        replay_figures += correlations(config, module, test, profile)
    for path, other_profile in other_profiles(config, profile).items():
        there = _compared(config, other_profile, splits, module)
        replay_figures += replayed(there, splits["test"], other_profile, path.stem)
    contenders: Contenders = {}
    only_replayed = []
    for sampling, sampling_methods in compared.items():
        contenders[sampling] = [method for method in sampling_methods if method.is_decoded]
        only_replayed += [
            _described(method, sampling) for method in sampling_methods if not method.is_decoded
        ]
    if config.evaluate.assisted:
        for sampling, assistants in _assistants(config, pair).items():
            contenders[sampling] += assistants
    greedy = methods.greedy_check(pair, config, prompts[:GREEDY_PROMPTS])
    decoded = decode_prompts(config, pair, prompts, contenders, stage.parts())
    table = Table([*figures(decoded), *replay_figures])
    outcome = {
        "summary": summary(config, table, decoded),
        "methods": entries(table, decoded),
        "replayed": only_replayed,
        "decisions": [case.setting.row() for case in result.best.cases],
        "greedy": greedy,
    }
    return Evaluation(outcome, table)


def correlations(
    config: Config, module: SelectorModule, texts: Texts, profile: LatencyProfile
) -> Iterator[Figure]:
    """What a network's predictions have to do with what happened, by sampling setting."""
    for sampling in samplings_of(config):
        test = timed(texts, sampling, config.train.verifier, profile)
        yield Figure(
            setting=sampling_name_of(sampling.temperature, sampling.top_p),
            method=methods.NETWORK,
            statistic=CORRELATION,
            value=rank_correlation(module.scores(test.texts), test),
        )


def _assistants(config: Config, pair: ModelPair) -> dict[Sampling, list[Assistant]]:
    """Transformers' own methods, tuned for every sampling setting."""
    prompts = prompts_of(config, pair, "train")[:TUNING_PROMPTS]
    tuning_prompts = [encode(config, pair, prompt) for prompt in prompts]
    assistants: dict[Sampling, list[Assistant]] = {}
    for sampling_setting in watched(config.sampling, "tuning transformers' own methods"):
        sampling = sampling_setting.build()
        seed = seed_of(config.seed, sampling, "assisted")
        assistants[sampling] = methods.tuned_assistants(
            pair, sampling, tuning_prompts, config.data.tokens, seed
        )
    return assistants


def _described(method: Method | Assistant, sampling: Sampling) -> dict[str, Any]:
    return {
        "setting": sampling_name_of(sampling.temperature, sampling.top_p),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "method": method.name,
        "verifier": method.verifier,
        "drafts": method.drafts,
    }


def other_profiles(config: Config, profile: LatencyProfile) -> dict[Path, LatencyProfile]:
    """The step times of other machines and pairs for single requests, with this machine's
    decisions; InputError where a file cannot be read, and where two have the same name, which is
    that of their figures."""
    counts = Counter(path.stem for path in config.evaluate.clocks)
    for name, count in counts.items():
        if count > 1:
            raise InputError(f"evaluate.clocks: several files are called {name}")
    profiles = {}
    for path in config.evaluate.clocks:
        timings = read_timings(path)
        other_profile = profile_of(
            timings, str(path), stepped=False, pair=profile.pair, verifiers=config.verifiers
        )
        profiles[path] = replace(other_profile.at_batch(1), decide=profile.decide)
    return profiles


def _compared(
    config: Config,
    profile: LatencyProfile,
    splits: dict[str, Texts],
    module: SelectorModule,
    exported: Mapping[Sampling, Method] | None = None,
) -> dict[Sampling, list[Method]]:
    """The static trees that are fastest by a latency profile, and the network, tuned and judged by
    it among its own actions. With what is `exported`, this machine's selector, also the lookup
    rule, and the network whatever is exported."""
    train = timed_cases(config, splits["train"], profile)
    chosen_from = offering(splits, module.space)
    validation = timed_cases(config, chosen_from["validation"], profile)
    bases = statics(timed_cases(config, chosen_from["train"], profile))
    methods_by_sampling: dict[Sampling, list[Method]] = {}
    cases = list(zip(train, validation, bases, strict=True))
    for texts, others, base in watched(cases, "choosing the methods"):
        compared = methods.static_methods(texts.texts, config.verifiers, profile)
        (judged,) = judge(module, others, base)
        network = Method(methods.NETWORK, texts.verifier, judged.setting, module, is_decoded=False)
        if exported is None:
            setting = judged.setting
            if not (judged.pays and module.is_regressor):
                setting = setting.static_only()
            compared.append(replace(network, name=methods.SELECTOR, setting=setting))
        else:
            best = compared[-1]
            rule = tune_lookup_rule(Timed(texts.texts, best.verifier, profile), best.setting)
            copying = Method(methods.COPYING, best.verifier, rule)
            compared += [copying, exported[base.sampling], network]
        methods_by_sampling[base.sampling] = compared
    return methods_by_sampling


def decode_prompts(
    config: Config, pair: ModelPair, prompts: list[Prompt], among: Contenders, parts: Parts
) -> Rows:
    """Every prompt under every setting with every method; those among the parts are not decoded
    again."""
    tasks: dict[str, tuple[Prompt, SamplingSetting]] = {}
    for prompt, sampling_setting in product(prompts, config.sampling):
        tasks[f"{prompt.id} {sampling_setting.build()}"] = prompt, sampling_setting
    missing = [name for name in tasks if not parts.holds(name)]
    if missing:
        # a process decodes its first tokens more slowly than the others, so these are not used
        prompt, sampling_setting = tasks[missing[0]]
        _decode_all(config, pair, prompt, sampling_setting, among, min(WARM_UP, config.data.tokens))
    rows: Rows = []
    for name, (prompt, sampling_setting) in watched(tasks.items(), "decoding held-out prompts"):
        decode = partial(
            _decode_all, config, pair, prompt, sampling_setting, among, config.data.tokens
        )
        rows += parts.get(name, decode)
    return rows


def turns(items: Sequence[T], rounds: int) -> list[list[T]]:
    """The items once in each round, rotated so that each of them takes different places: every
    place once in as many rounds as there are items."""
    step = max(1, len(items) // rounds)
    rotated = []
    for number in range(rounds):
        shift = number * step % len(items)
        rotated.append([*items[shift:], *items[:shift]])
    return rotated


def _decode_all(
    config: Config,
    pair: ModelPair,
    prompt: Prompt,
    sampling_setting: SamplingSetting,
    among: Contenders,
    limit: int,
) -> Rows:
    sampling = sampling_setting.build()
    contenders = among[sampling]
    # one for all rounds, so that texts are written again
    seed = seed_of(config.seed, prompt.id, sampling, "evaluate")
    tokens = encode(config, pair, prompt)
    # what decodes alike decodes once
    distinct = list({method.identity: method for method in contenders}.values())
    decodings: dict[Any, list[Decoding]] = {method.identity: [] for method in distinct}
    rounds = 1 if sampling_setting.temperature > 0 else config.evaluate.rounds
    for order in turns(random.Random(seed).sample(distinct, len(distinct)), rounds):
        for method in order:
            decodings[method.identity].append(method.decode(pair, sampling, tokens, limit, seed))
    rows = []
    for method in contenders:
        method_decodings = decodings[method.identity]
        rows.append(
            {
                "prompt": prompt.id,
                "kind": prompt.kind,
                "source": prompt.source,
                **_described(method, sampling),
                **vars(method_decodings[0]),
                "rounds": [[decoding.tokens, decoding.seconds] for decoding in method_decodings],
            }
        )
    return rows
