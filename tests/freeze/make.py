"""Records the frozen commit: `python -m tests.freeze.make [--only PART ...]`.

    .freeze/tree/      the frozen commit, with this package copied into it
    .freeze/arrays/    .freeze/runs/    .freeze/texts/    .freeze/counts/      see the recorders
    .freeze/about.json commit, versions and seconds of each part

Takes about five minutes of a core. At the end the recording is held against `small.json`, which was made on another
machine, to see that this one computes what that one did; `--write-small` writes that file instead.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.freeze import small

COMMIT = "17b9d44100127793b582aa1db35607873d9a8399"
"""The last commit before the rebuilding."""
ROOT = Path(__file__).resolve().parents[2]
PARTS = ("arrays", "runs", "texts", "counts")


def cache() -> Path:
    """The folder of the recording."""
    return Path(os.environ.get("TWOAXIS_FREEZE", ROOT / ".freeze")).resolve()


def check_out(tree: Path) -> None:
    """Put the frozen commit and today's recorders into `tree`; a tree that is there is used again."""
    mark = tree / ".commit"
    if not mark.exists() or mark.read_text() != COMMIT:
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        packed = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=False)
        if packed.returncode:
            raise ValueError(f"git has no commit {COMMIT}: {packed.stderr.decode().strip()}; fetch the whole history")
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(tree, filter="data")
        mark.write_text(COMMIT)
    shutil.rmtree(tree / "tests" / "freeze", ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "small.json", "test_*")
    shutil.copytree(ROOT / "tests" / "freeze", tree / "tests" / "freeze", ignore=ignored)


def run_recorder(tree: Path, part: str, *words: str | Path, before: bool) -> None:
    """Run the recorder of a part in a process of its own that imports `tree`."""
    fixed = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    side = {"TWOAXIS_FREEZE_SIDE": "before" if before else "now"}
    line = [sys.executable, "-m", f"tests.freeze.{part}", *map(str, words)]
    subprocess.run(line, cwd=tree, env=os.environ | fixed | side, check=True)


def make(parts: list[str]) -> None:
    """Record these parts of the frozen commit."""
    place = cache()
    check_out(place / "tree")
    path = place / "about.json"
    about: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    about |= {"commit": COMMIT, "machine": platform.processor() or platform.machine(), "python": sys.version.split()[0]}
    about |= {name: version(name) for name in ("torch", "transformers", "numpy")}
    for part in parts:
        began = time.monotonic()
        shutil.rmtree(place / part, ignore_errors=True)
        run_recorder(place / "tree", part, place / part, before=True)
        about |= {f"seconds of {part}": round(time.monotonic() - began)}
        path.write_text(json.dumps(about, indent=1))
        print(f"{part}: {about[f'seconds of {part}']} s", flush=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.freeze.make", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--write-small", action="store_true", help="write small.json from the recording")
    given = parser.parse_args()
    make(given.only)
    if given.write_small:
        small.write(small.summary(cache(), COMMIT))
        return 0
    differing = small.differences(small.summary(cache(), COMMIT), small.read())
    print("\n".join(differing) or "this machine computes what small.json says")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
