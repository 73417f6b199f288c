"""Stage `pair`: check that the pair loads, and write the prompts."""

from __future__ import annotations

from data_gen.models.heads import require_library
from pipelines.config import Config
from pipelines.pair import prompt_writing
from pipelines.pair.loading import depends, load_pair, tokenizer_of
from pipelines.run import Stage

SECTIONS = ("pair", "prompts", "data")


def plan(config: Config) -> list[str]:
    models = f"load {config.pair.target} and {config.pair.drafting} and compare their vocabularies"
    return [models, *prompt_writing.plan(config)]


def run(config: Config) -> None:
    if config.pair.head:
        require_library()
    pair = load_pair(config, shapes=True)
    stage = Stage("pair", config, {**depends(config), "fingerprint": pair.fingerprint}, ())
    random = "; without weights, which are random: only times can be measured" if pair.has_random_weights else ""
    stage.say(f"{config.pair.target} and {config.pair.drafting} load and share their vocabulary{random}")
    stage.finish()
    prompt_writing.check_splits(config, prompt_writing.write(config, tokenizer_of(config)))
