"""`python -m benchmarks`: operators, training steps, memory, decoding and public peers, all as ratios of one run.

    python -m benchmarks                      everything, about a quarter of an hour on a quiet core
    python -m benchmarks --quick              small sizes, under a minute: shows that everything runs
    python -m benchmarks --only steps windows one or several parts
    python -m benchmarks --write-docs         afterwards put the tables into docs/results/performance.md

Figures go to runs/bench.json after every part; parts that are not run again keep the ones they have there, as long as
machine and sizes are the same. Absolute times do not travel between machines, so only ratios are kept.

The C library's allocator gives large tensors fresh pages on every call unless told otherwise; the run starts itself
again with the setting that keeps them, which training profits from as well (see docs/results/performance.md).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "8589934592", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
"""Keep freed memory instead of returning it: glibc reads these when a process starts."""

ROOT = Path(__file__).parent.parent


def parts() -> dict[str, Callable[[Any], Any]]:
    """The benchmarks by name, in the order of the page."""
    from benchmarks import against_llama, models, operators, peers

    return {
        "steps": models.steps,
        "small_steps": models.small_steps,
        "deep_memory": models.deep_memory,
        "memory_by_depth": models.memory_by_depth,
        "memory_by_window": models.memory_by_window,
        "decoding": models.decoding,
        "depth_reads": operators.depth_reads,
        "wide_states": operators.wide_states,
        "windows": operators.windows,
        "attention_memory": operators.attention_memory,
        "convolutions": operators.convolutions,
        "peers": peers.peers,
        "llama": against_llama.llamas,
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Speed and memory, as ratios within one run."
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it runs")
    parser.add_argument("--only", nargs="+", metavar="PART", default=None, help="which parts; all unless given")
    parser.add_argument("--out", type=Path, default=None, help="the figures; runs/bench.json unless given")
    parser.add_argument("--threads", type=int, default=1, help="of torch; several are timed by the wall clock")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/results/performance.md")
    options = parser.parse_args()
    if options.quick and options.write_docs:
        parser.error("--write-docs needs the full sizes; leave --quick out")
    if options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    options.out = options.out or ROOT / "runs" / ("bench_quick.json" if options.quick else "bench.json")
    return options


def restart() -> None:
    """Become the same command with the allocator's setting."""
    if sys.platform == "linux" and any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        command = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ALLOCATOR)


def main() -> None:
    """Run, print, store, and write the page if asked."""
    options = arguments()
    restart()
    import torch

    from benchmarks.page import write
    from benchmarks.scale import FULL, QUICK
    from benchmarks.tables import from_json
    from benchmarks.targets import verdicts
    from twoaxis.base.files import write_text
    from twoaxis.base.machine import hardware_line

    torch.set_num_threads(options.threads)
    known = parts()
    gc.freeze()  # what is imported stays: collecting between rounds is then quick
    if wrong := [name for name in options.only or () if name not in known]:
        sys.exit(f"benchmarks: unknown part {wrong[0]!r}; there are {', '.join(known)}")
    scale = QUICK if options.quick else FULL
    document = {"machine": hardware_line(), "command": command_line(options), "tables": {}}
    if options.out.exists():
        stored = json.loads(options.out.read_text())
        if all(stored[key] == document[key] for key in ("machine", "command")):
            document["tables"] = stored["tables"]
    print(document["machine"])
    for name in options.only or known:
        torch.manual_seed(0)
        start = time.perf_counter()
        table = known[name](scale)
        document["tables"][name] = table._asdict()
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(options.out, json.dumps(document, indent=1))
        print(f"\n## {table.title}\n{table.note}\n", *table.lines(), sep="\n")
        print(f"({name}: {time.perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
        gc.collect()
    document["tables"] = {name: document["tables"][name] for name in known if name in document["tables"]}
    tables = from_json(document)
    if not options.quick:
        print("\n## Targets\n", *verdicts(tables), sep="\n")
    print(f"\nwritten to {options.out}")
    if options.write_docs:
        missing = [name for name in known if name not in tables]
        if missing:
            sys.exit(f"benchmarks: the page needs all parts, {', '.join(missing)} were never run")
        print(f"written to {write(ROOT / 'docs' / 'results' / 'performance.md', document)}")


def command_line(options: argparse.Namespace) -> str:
    """The command that gives these figures again."""
    threads = "" if options.threads == 1 else f" --threads {options.threads}"
    return "python -m benchmarks" + (" --quick" if options.quick else "") + threads


if __name__ == "__main__":
    main()
