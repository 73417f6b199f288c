from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config import load_config
from selector.schema import InputError

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "demo.yaml"


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_is_valid(file: Path) -> None:
    assert load_config(file, []).name == file.stem


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.rootz=3", "unknown key data.rootz; did you mean data.roots?"),
        ("trian.batch=3", "unknown key trian; did you mean train?"),
        ("pair.embedded.target.layer=3", "unknown key pair.embedded.target.layer; did you mean"),
        ("data.roots=many", "data.roots: Input should be a valid integer"),
        ("data.samples=3", "data.samples: must be even"),
        ("data.behaviour=[[5,0,1]]", "data.behaviour: action (5, 0, 1) is not in the space"),
        ("train.verifier=travresal", "train.verifier: unknown verifier 'travresal'"),
        ("verifiers=[specinfer]", "train.verifier: 'lifted_uniform' is not among verifiers"),
        ("sampling=[{temperature: -1}]", "sampling.0.temperature: Input should be greater than or equal to 0"),
        ("pair.target=some/model", "pair: target and draft are either both 'embedded' or both names"),
        ("sampling=[{temprature: 1}]", "unknown key sampling.0.temprature; did you mean sampling.temperature?"),
        ("sampling=[{top_p: 0.5},{top_p: 0.5}]", "sampling: a setting is listed twice"),
        ("latency.nodes=[5,1]", "latency.nodes: must be ascending numbers from 1 on"),
        ("latency.lengths=[]", "latency.lengths: must be ascending"),
        ("train.hidden=[-1]", "train.hidden.0: Input should be greater than or equal to 1"),
        ("name=../x", "name: String should match pattern"),
        ("pair.dtype=float8", "pair.dtype: Input should be 'float32' or 'bfloat16'"),
        ("data", "'data': an override reads section.key=value"),
        ("name.x=1", "'name.x=1': name is not a section"),
        ("data.roots=[", "'data.roots=[': the value is not YAML"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_that_names_it(override: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        load_config(DEMO, [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["- a list", "key: [unclosed", ""])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(InputError, match=r"run\.yaml: "):
        load_config(tmp_path / "run.yaml", [])
    with pytest.raises(InputError, match=r"none\.yaml: No such file"):
        load_config(tmp_path / "none.yaml", [])


def test_overrides_change_only_what_they_name() -> None:
    config = load_config(DEMO, ["pair.embedded.target.steps=7", "data.roots=500", "sampling=[{top_p: 0.9}]"])
    assert config.pair.embedded.target.steps == 7
    assert config.pair.embedded.target.layers == load_config(DEMO, []).pair.embedded.target.layers
    assert config.data.roots == 500
    assert config.sampling[0].top_p == 0.9
