"""The tutorial: its commands run in their order, with the page's variables set to something tiny."""

from __future__ import annotations

import re
import shlex
import string
from pathlib import Path

import pytest

from tests.support.commands import Done, registries_restored, run
from tests.support.processes import ROOT

PAGE = (ROOT / "docs" / "tutorial" / "index.md").read_text()
TINY = {"STEPS": "2", "SEEDS": "2", "SEED": "0"}


def commands() -> tuple[dict[str, str], list[str]]:
    """The variables that the page sets, and its commands."""
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)).splitlines()
    variables = {name: value for name, _, value in (word.partition("=") for word in lines[0].split())}
    return variables, [line.partition("  #")[0].strip() for line in lines[1:]]


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, lines = commands()
    assert set(variables) == {*TINY, "DATA"}
    text = tmp_path / "text"
    text.mkdir()
    for room in ("base", "model", "comparison"):
        for source in sorted((ROOT / "twoaxis" / room).glob("*.py")):
            (text / f"{room}_{source.name}").write_text(source.read_text())
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    said: dict[str, Done] = {}
    for line in lines:
        command = string.Template(line).substitute(TINY, DATA=str(text))
        program, *words = shlex.split(command)
        assert program == "twoaxis"
        done = run(*words, folder=tmp_path, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
        assert done.code == 0, (command, done.out, done.err)
        said[line] = done
    assert any("bit for bit" in done.out for done in said.values())
    # without the file, the saved model says what it lacks
    missing = run("generate", "runs/tutorial/mine", "--prompt", "x", folder=tmp_path)
    assert missing.code == 2
    assert "add --use" in missing.err
    assert "my_stream.py" in missing.err
    monkeypatch.chdir(tmp_path)
    with registries_restored():
        for block in re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE):
            exec(compile(block, "tutorial", "exec"), {})
