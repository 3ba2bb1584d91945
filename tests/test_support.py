"""Commands in process: they give what a process of their own gives, and leave no trace in this one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.support.commands import call, run, run_child, run_line
from twoaxis import stream_names
from twoaxis.base.plugins import use

OWN = """
import twoaxis
from twoaxis.depth.standard import Standard

@twoaxis.register("passing")
class Passing(Standard):
    pass
"""


@pytest.mark.parametrize("words", [("cost", "--help"), ("verfy",), ("cost", "--sites", "--shap", "nano")])
def test_a_command_gives_what_its_process_gives(words: tuple[str, ...]) -> None:
    assert run(*words) == run_child(*words)


def test_what_a_command_changes_is_restored(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)

    def state() -> tuple[object, ...]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        torches = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.initial_seed())
        streams = (sys.stdin, sys.stdout, sys.stderr, list(sys.argv), list(sys.path))
        return Path.cwd(), dict(os.environ), handlers, torches, streams, stream_names()

    def change() -> None:
        assert (sys.argv, sys.stdin.read(), Path.cwd()) == (["it", "word"], "given", tmp_path)
        os.chdir("/")
        os.environ["TWOAXIS_CHANGED"] = "1"
        sys.path.insert(0, "/nowhere")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(77)
        use(tmp_path / "own.py")
        assert "passing" in stream_names()
        print("said", file=sys.stderr)
        sys.exit("the reason")

    before = state()
    for _ in range(2):  # the file registers again the second time
        done = call(change, ["it", "word"], stdin=b"given", folder=tmp_path)
        assert done == (1, "", "said\nthe reason\n")
        assert state() == before


def test_an_exception_passes_through_and_leaves_no_trace() -> None:
    out = sys.stdout
    with pytest.raises(ZeroDivisionError):
        call(lambda: 1 / 0, ["it"])
    assert sys.stdout is out
    with pytest.raises(ValueError, match="no known way to run it"):
        run_line("rm -r runs")
