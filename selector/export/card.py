"""The model card of an exported selector."""

from __future__ import annotations

from selector.runtime.artefact import ArtefactConfig
from selector.schema import LOG, PAIR

IN_TRANSFORMERS = """
In transformers:

```python
folder = "this/directory"
target.generate(**inputs, custom_generate=folder, trust_remote_code=True, draft_model=draft, selector=folder)
```
"""


def model_card(config: ArtefactConfig) -> str:
    """`README.md` of an artefact directory."""
    schema = config.schema
    hidden = "".join(f"\n| `{name}` | float32 [{width}] |" for name, width in config.hidden_states.items())
    scalars = "\n".join(
        f"| {i} | `{s.name}` | {s.unit} | {low:.3g} to {high:.3g} | {s.meaning} |"
        for i, (s, (low, high)) in enumerate(zip(schema.scalars, config.ranges, strict=True))
    )
    return f"""---
library_name: espalier
tags: [speculative-decoding, text-generation{", custom_generate" if schema == PAIR else ""}]
---

# Selector for speculative decoding

{_what(config)}
{_gains(config)}
```python
from selector.runtime import load_selector

selector = load_selector("this/directory")        # or a hub id; checks every file's checksum
action = selector.select(features)                # Action(K, L1, L2), StyledAction or Lookup(length)
scores = selector.scores(features)                # float32 [{len(config.space)}], in the order of selector.actions
tuned = selector.at(temperature=1.0, top_p=1.0)   # one sampling setting, one root at a time: the fastest way
```

Far from every trained sampling setting `selector.at` warns, and the nearest one's lookup rule and static tree decide.
On texts that are longer than those of its training the lookup rule decides instead of the network.

On another machine pass its own profile: `load_selector(directory, latency="latency.json")`.
{IN_TRANSFORMERS if schema == PAIR else ""}
| file | for |
|---|---|
| `selector.pt` | TorchScript: `forward(features) -> (action index, scores)`, one root or a batch |
| `model.safetensors` | the same weights and tables |
| `config.json` | features, action table, verifier, modes, pair, figures, provenance |
| `golden.json` | features and decisions along a fixed text, to check an engine's own code against |
| `latency.json` | the times that the decisions are based on |

| feature | shape |
|---|---|
| `scalars` | float32 [{len(schema.scalars)}] |{hidden}

| scalar | name | unit | in training | meaning |
|---|---|---|---|---|
{scalars}

The network takes a scalar outside of its range in training for the nearest value inside.
`root` is the last committed token, `prev` the one before it; `p` and `q` are the target's and the draft's
distributions after a token. Where the others are not known, the first {schema.first} scalars suffice.
Without features (`None`) the selector chooses the static action `{tuple(config.fallback)}`.
"""


def _what(config: ArtefactConfig) -> str:
    """What the selector chooses, and for which models."""
    pair = config.pair
    if config.schema == LOG:
        batches = ", ".join(map(str, sorted({mode.batch for mode in config.modes})))
        return f"""At every decoding step the selector chooses how many tokens the drafter `{pair["draft"]}` drafts, or
a lookup `(length,)` of the tokens that followed the longest earlier match of the text's end. It was trained on an
engine's log, for steps of {batches} requests: `selector.at(temperature, batch=32)`. The class
`data_gen.features.root.DrafterKnowledge` computes its features. The text keeps the target's distribution."""
    return f"""At every decoding step the selector chooses what to draft, for the pair `{pair["target"]}` /
`{pair["draft"]}` and the verifier `{config.verifier}`: a delayed tree `(K, L1, L2)` of the draft model, or a lookup
`(length,)` of the tokens that followed the longest earlier match of the text's end. The text keeps the target's
distribution."""


def _gains(config: ArtefactConfig) -> str:
    """The table of measured speeds; empty where there was no evaluation."""
    evaluation = config.metrics.get("evaluation")
    if not evaluation:
        return ""
    lines = []
    for row in evaluation["by_setting"]:
        low, high = row["wall_interval_95"]
        decoded = f"{row['wall_ratio']:.3f} [{low:.3f}, {high:.3f}]"
        replayed = f"{row['replay_ratio']:.3f} ±{row['replay_error']:.3f}"
        lines.append(f"| {row['temperature']:g} | {row['top_p']:g} | {decoded} | {replayed} |\n")
    return f"""
Speed over the best static tree of the best verifier, on the machine it was tuned for:

| temperature | top-p | decoded, 95% interval | replayed, ± one standard error over sources |
|---|---|---|---|
{"".join(lines)}"""
