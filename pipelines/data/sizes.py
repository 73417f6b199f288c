"""What the data stage will write, in texts, bytes and hours: for `--plan`."""

from __future__ import annotations

from data_gen import traces
from data_gen.timing import device_name
from pipelines.config import Config
from pipelines.data.shards import BEYOND, split_counts
from pipelines.pair.loading import hidden_widths
from selector.latency import LatencyProfile
from selector.schema import FULL, InputError

COSTS = {"written": "token", "decoded": "decoded", "labelled": "root"}  # parts, and their price in a latency profile


def size_line(config: Config) -> str:
    """What will be written, in texts and bytes."""
    if config.data.log is not None:
        return f"the texts of {config.data.log}, one teacher-forced pass of each model over each"
    counts, settings, data = split_counts(config), len(config.sampling), config.data
    hidden = sum(hidden_widths(config)) * data.tokens if data.features == FULL else 0
    tokens = config.prompts.tokens + data.tokens + BEYOND
    each = {
        split: traces.text_bytes(
            tokens, data.tokens, len(config.verifiers), hidden // (data.stride if split == "train" else 1)
        )
        for split in counts
    }
    total = settings * sum(count * each[split] for split, count in counts.items())
    texts = ", ".join(f"{count} for {split}" for split, count in counts.items())
    return (
        f"{settings} sampling settings x {sum(counts.values())} texts ({texts}) of {data.tokens} labelled tokens; "
        f"up to {max(each.values()) / 1e3:.0f} kB a text, {total / 1e6:.0f} MB in all before compression"
    )


def passes_line(config: Config) -> str:
    """Passes of the models: of the target over all texts of a shard at once, one token each; and over whole texts."""
    data, settings, new = config.data, len(config.sampling), config.data.tokens + BEYOND
    counts = split_counts(config)
    decoded = round(data.decoded * counts["train"])
    shards = sum(-(-(count - decoded * (split == "train")) // data.texts_per_shard) for split, count in counts.items())
    return (
        f"{settings * shards * new:,} passes of the target that write up to {data.texts_per_shard} texts each, "
        f"{settings * decoded * new:,} tokens written by speculative decoding, "
        f"{settings * sum(counts.values()):,} texts passed by both models to label them"
    )


def predicted_seconds(config: Config) -> dict[str, float] | None:
    """Time by part on one device, from the run's latency profile; None if it has none of this machine."""
    try:
        profile = LatencyProfile.load(config.folder / "latency.json")
    except InputError:
        return None
    here = device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    if profile.device != here or not profile.labelling or config.data.log is not None:
        return None
    counts, settings, data = split_counts(config), len(config.sampling), config.data
    texts, decoded = sum(counts.values()), round(data.decoded * counts["train"])
    tokens = data.tokens + BEYOND
    amount = {"written": (texts - decoded) * tokens, "decoded": decoded * tokens, "labelled": texts * data.tokens}
    return {part: settings * amount[part] * profile.labelling[price] for part, price in COSTS.items()}


def duration(seconds: float) -> str:
    """Seconds in the largest unit that leaves more than one."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
