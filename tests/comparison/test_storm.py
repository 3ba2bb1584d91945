"""Storms of SIGKILL: whoever is hit, and whenever, the end is the same, nothing finished is redone, nobody is left."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.comparison.comparing import arguments, make_options, stamps, weights
from tests.comparison.probing import write_text
from tests.support.foreign import byte_llama, save
from tests.support.processes import alive, children, start, wait_for
from twoaxis.comparison.results import Comparison

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.slow,  # one kill of each process is in test_run.py, test_runner.py and test_probe.py
]


class Storm(NamedTuple):
    """A command under fire."""

    words: list[str]  # without its --out
    limit: int  # of a file's size that stops it, in bytes


def ends(out: Path) -> Any:
    """What a comparison comes to in a folder, to the last bit and without times."""
    found = Comparison.load(out)
    rows = [(row.contender, row.lr, row.lr_losses, row.new_rate) for row in found.plan.rows]
    return weights(out), found.losses, found.verdicts, rows, found.missing


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storm")


@pytest.fixture(scope="module", params=["compare", "probe"])
def target(request: pytest.FixtureRequest, place: Path) -> Storm:
    if request.param == "compare":
        options = make_options(place, stream=["denseformer"], seeds=1, lr="0.002,0.004", lr_seeds=1, eval_every=6)
        return Storm(["compare", *arguments(options), "--no-report", "--jobs", "2"], 100_000)
    model = save(byte_llama(num_hidden_layers=3), place / "model")
    words = ["probe", str(model), "--data", str(write_text(place / "probed")), "--stream", "denseformer"]
    words += ["--context", "32", "--steps", "6", "--final-examples", "4", "--eval-examples", "4", "--save-every", "2"]
    return Storm([*words, "--cache", str(place / "cache"), "--seeds", "1", "--jobs", "2"], 4_000)


@pytest.fixture(scope="module")
def reference(target: Storm, place: Path) -> Any:
    """What it comes to when nobody interrupts it."""
    out = place / f"whole-{target.words[0]}"
    finish(target, out)
    return ends(out)


def finish(target: Storm, out: Path) -> None:
    """Run to the end."""
    process = start(*target.words, "--out", str(out), stdout=subprocess.DEVNULL)
    _, said = process.communicate(timeout=900)
    assert process.returncode == 0, said
    left = [path for path in out.rglob("*") if path.name in ("output.txt", ".progress", "failed.json", ".source")]
    assert left == []


def attack(target: Storm, out: Path, chance: random.Random, kills: int, limited: bool) -> int:
    """Start the command and kill a process of it at random moments, until it ends; how many were killed."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (target.limit, target.limit))

    more: dict[str, Any] = {"preexec_fn": limit} if limited else {}
    process = start(*target.words, "--out", str(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **more)
    seen, done = {process.pid}, 0
    try:
        while process.poll() is None and done < kills:
            wait_for(lambda: len(children(process.pid)) > 1 or process.poll() is not None, seconds=300)
            time.sleep(chance.uniform(0.0, 1.5))
            family = [process.pid, *children(process.pid)]
            seen |= set(family)
            kinds = [family[:1], family[1:2], family[2:]]
            victim = chance.choice(chance.choice([kind for kind in kinds if kind]))
            if process.poll() is None and alive(victim):
                os.kill(victim, signal.SIGKILL)
                done += 1
        if process.poll() is None:
            seen |= set(children(process.pid))
            process.kill()
        process.wait(timeout=300)
    finally:
        process.kill()
    wait_for(lambda: not any(alive(pid) for pid in seen), seconds=30)
    return done


def survive(target: Storm, reference: Any, folder: Path, kills: int, seed: int, limited: bool = False) -> None:
    """So many kills, in as many folders as it takes, each of which comes to its end afterwards."""
    chance, number = random.Random(seed), 0
    while kills > 0:
        out, number = folder / str(number), number + 1
        for _ in range(5):
            before = stamps(out)
            kills -= attack(target, out, chance, kills, limited)
            assert {path: stamps(out)[path] for path in before} == before
            if kills <= 0:
                break
        before = stamps(out)
        finish(target, out)
        assert {path: stamps(out)[path] for path in before} == before
        assert ends(out) == reference


def test_fifty_kills(target: Storm, reference: Any, tmp_path: Path) -> None:
    survive(target, reference, tmp_path, 50, 1)


def test_kills_where_files_are_refused(target: Storm, reference: Any, tmp_path: Path) -> None:
    survive(target, reference, tmp_path, 10, 2, limited=True)
