"""What every stage is promised: whole files or none, whatever ends it; earlier output that is
reused only where it is intact and of the same inputs; one command at a time. On a stage of three
files."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pipelines.cli import only_one
from pipelines.config import Config
from pipelines.run import Stage, require, verify, write_json
from pipelines.terminal import console, table, watched
from selector.files import atomically
from selector.schema import InputError
from tests.pipelines.runs import demo_config

FOLDER = Path("runs/demo")
FILES = ("one.json", "two/a", "two/b")


@pytest.fixture
def config(inside: Path) -> Config:
    return demo_config()


def stage_of(config: Config, number: int = 1) -> Stage:
    inputs = {"number": number, "shape": {"width": 10 * number}}
    return Stage("fake", config, inputs, (FOLDER / "one.json", FOLDER / "two"))


def run(stage: Stage) -> bool:
    """Whether there was anything to do."""
    if not stage.begin():
        return False
    stage.replace()
    one, two = stage.outputs
    write_json(one, stage.depends)
    with atomically(two) as partial:
        partial.mkdir()
        for name in ("a", "b"):
            (partial / name).write_text(f"{name} {stage.depends['number']}")
    stage.finish()
    return True


def contents() -> dict[str, str]:
    """All files but the records, which hold seconds."""
    files = (path for path in FOLDER.rglob("*") if path.is_file() and path.parent.name != "stages")
    return {str(path.relative_to(FOLDER)): path.read_text() for path in files}


class Killed(BaseException):
    """Nothing cleans up after it, as after SIGKILL."""


@contextmanager
def failing(
    places: tuple[tuple[Any, str], ...], number: int, error: BaseException
) -> Iterator[None]:
    """The `number`-th call of some functions raises an error instead."""
    calls = count(1)

    def spoilt(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if next(calls) == number:
                raise error
            return own(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for owner, name in places:
            patched.setattr(owner, name, spoilt(getattr(owner, name)))
        yield


WRITES = ((Path, "write_text"), (os, "fsync"))
RENAMES = ((Path, "replace"), (Path, "rename"))


def test_after_a_kill_at_any_write_the_same_command_goes_on(config: Config) -> None:
    """Meanwhile every file is whole; unless the earlier output stands untouched, no later stage
    takes what is there."""
    whole: dict[str, str] = {}
    for number in count(1):
        try:
            with failing((*WRITES, *RENAMES), number, Killed()):
                run(stage_of(config, number))
            break
        except Killed:
            seen = {
                name: text
                for name, text in contents().items()
                if not re.search(r"\.(tmp|old)\b", name)
            }
        if stage_of(config, number - 1).is_reusable:
            assert seen == whole
        else:
            with pytest.raises(
                InputError,
                match=r"is not finished: run it again|fake\.json does not exist: run the fake",
            ):
                require(config, "fake", {})
        assert run(stage_of(config, number)) and not run(stage_of(config, number))
        verify(config, "fake")
        made = contents()
        assert made.keys() == set(FILES) and all(
            text in (made[name], whole.get(name)) for name, text in seen.items()
        )
        whole = made
    assert number > 8


def test_a_full_disk_at_any_write_is_one_line_and_costs_nothing(config: Config) -> None:
    assert run(stage_of(config))
    for number in count(1):
        before = contents()
        try:
            with failing(WRITES, number, OSError(errno.ENOSPC, "No space left on device")):
                run(stage_of(config, 1 + number))
            break
        except InputError as error:
            message = str(error)
        assert re.fullmatch(
            r"runs/demo/\S+\.tmp: cannot be written: No space left on device; make room .*", message
        )
        # the record, one.json, two, the record
        untouched = FILES if number <= 4 else FILES[1:] if number <= 6 else ()
        left = contents()
        assert left.keys() == set(FILES) and all(left[name] == before[name] for name in untouched)
        assert run(stage_of(config, 1 + number))
    assert number > 6


RECORD = "stages/fake.json"


@pytest.mark.parametrize(
    ("name", "content", "refused"),
    [
        *((name, "?", "missing, or changed") for name in FILES),
        ("two/a", None, "missing, or changed"),
        (RECORD, "[]", "is damaged"),
        (RECORD, '{"depends": [], "finished": true}', "is damaged"),
    ],
)
def test_damage_is_named_and_made_anew(
    config: Config,
    name: str,
    content: str | None,
    refused: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(stage_of(config))
    whole, path = contents(), FOLDER / name
    path.unlink() if content is None else path.write_text(content)
    assert not stage_of(config).is_reusable
    with pytest.raises(InputError, match=rf"^{path}:? {refused}.*: .*run the fake stage again$"):
        verify(config, "fake")
    assert run(stage_of(config)) and contents() == whole
    assert f"fake: {path} " in capsys.readouterr().out


def test_a_users_names_are_no_markup(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    stage_of(config).say("20 [/b], 20 [v2], 20 :smile:")
    console.print(table([{"kind": "[/b]"}], "of [v2]"))
    for _ in watched([1], "reading [/b]"):
        pass
    output = capsys.readouterr().out
    assert (
        "fake: 20 [/b], 20 [v2], 20 :smile:" in output
        and output.count("[v2]") == 2
        and output.count("[/b]") == 3
    )


def test_where_the_output_is_no_terminal_lines_say_how_far_a_stage_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, expected in ((3600, ["2/2"]), (0, ["1/2", "2/2", "2/2"])):
        monkeypatch.setattr("pipelines.terminal.LINE_SECONDS", seconds)
        for _ in watched([1, 2], "reading"):
            pass
        assert re.findall(r"reading .*(\d/\d)", capsys.readouterr().out) == expected


def test_other_inputs_are_named(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    run(stage_of(config))
    changes = "number: 1 -> 2; shape.width: 10 -> 20"
    refused = rf"^runs/demo: the fake stage was run with other inputs \({changes}\): run it"
    with pytest.raises(InputError, match=refused):
        require(config, "fake", stage_of(config, 2).depends)
    require(config, "fake", {"number": 1})  # what is left out is not compared
    assert stage_of(config).is_reusable and not stage_of(config, 2).is_reusable
    assert run(stage_of(config, 2)) and f"fake: made again: {changes}" in capsys.readouterr().out


def test_parts_are_made_once_for_the_same_inputs(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the stage is finished, and whatever their names."""
    stage = stage_of(config)
    part = {"rows": [1, "two", None], "tensor": torch.ones(2)}
    name = "one/of several: " + "x" * 300
    assert not stage.parts().holds(name)
    for made in (part, {}):
        kept = stage.parts().get(name, lambda made=made: made)
        assert kept["rows"] == part["rows"] and torch.equal(kept["tensor"], part["tensor"])
    with monkeypatch.context() as patched:
        full = OSError(errno.ENOSPC, "No space left on device")
        patched.setattr(Path, "write_bytes", Mock(side_effect=full))
        with pytest.raises(InputError, match="No space left on device; make room"):
            stage.parts().get("another", dict)
    assert stage.parts().holds(name) and not stage.parts().holds("another")
    with monkeypatch.context() as patched:
        patched.setattr("pipelines.run.code_digest", lambda: "older")
        assert not stage.parts().holds(name)
        stage.parts().get(name, lambda: part)
    assert not stage.parts().holds(name)
    stage.parts(of_any_code=True).get(name, lambda: part)
    assert not stage_of(config, 2).parts().holds(name)
    assert stage.parts().get(name, dict) == {}
    assert run(stage) and not stage.parts().holds(name)


def test_two_commands_exclude_each_other(inside: Path) -> None:
    """Whatever ended the one before."""
    with only_one(FOLDER):
        for _ in range(2):  # a refused command does not remove the other one's lock
            with (
                pytest.raises(InputError, match=r"^runs/demo: another espalier is at work there"),
                only_one(FOLDER),
            ):
                pass
        with only_one(Path("runs/other")):
            pass
    if not (child := os.fork()):
        try:
            with only_one(FOLDER):
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL and (FOLDER / ".lock").exists()
    with only_one(FOLDER):
        (FOLDER / "latency.json").write_text("{}")
    assert [path.name for path in FOLDER.iterdir()] == ["latency.json"]
    nowhere = FOLDER / "latency.json" / "demo"
    with (
        pytest.raises(InputError, match=r": cannot be written: Not a directory; make"),
        only_one(nowhere),
    ):
        pass
