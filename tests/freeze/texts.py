"""Recorder of texts: what commands print, as NAME.json or NAME.txt.

Models, text and comparisons they are about are made here; a model's weights come from another recording with
`--weights`. Methods are named, so that one that is added later does not change a table.
"""

from __future__ import annotations

import argparse
import os
import shutil
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.freeze import names

STREAMS = (
    *("standard", "depth_attention", "denseformer", "attention_residuals", "attention_residuals:block_size=4"),
    *("deep_delta", "deep_delta:value_channels=4", "hyper_connections", "manifold_hyper_connections", "elc_bert"),
    *("vertical_attention", "deep_cross_attention", "muddformer"),
)
MIXERS = ("short_swa", "short_conv", "canon")
METHODS = [*(w for name in STREAMS for w in ("--stream", name)), *(w for name in MIXERS for w in ("--mixer", name))]
SHAPES = {
    "nano": (["--pipeline-stages", "2", "--virtual-stages", "2"], "2"),
    "smollm2-135m": (["--pipeline-stages", "5"], None),
    "llama-3-8b": (["--pipeline-stages", "4", "--virtual-stages", "2"], "4"),
}
"""Shapes whose costs are recorded, stages that divide their blocks, devices that divide heads and context."""
TENSOR = [
    *("--sequence-parallel", "--recompute", "block", "--data-parallel", "2", "--micro-batch", "2", "--batch", "8"),
    *("--prefill-chunk", "1024", "--tensor-parallel"),
]
MODEL: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "stream": "deep_delta",
    "stream_options": {"value_channels": 2, "compress": "token"},
    "mixer": "canon",
}
PROMPT = "Grüße from the two axes"
EVAL = ["--context", "16", "--stride", "5"]
TEXT = "The residual stream only adds along depth. ÄÖÜ\r\n" * 6


def commands(example: Path) -> dict[str, dict[str, list[str]]]:
    """By case the words of its commands by the file they print to; relative paths are in the working folder."""
    made = {
        "methods": {"methods.json": ["methods", "--json"]},
        "verify": {"verify.json": ["verify", "--json"]},
        "check": {"check.json": ["check", str(example), "--json", "--no-compile"]},
        "advise": {"advise.json": ["advise", "--json", "--shape", "nano"]},
        "advise-retrofit": {"advise-retrofit.json": ["advise", "--json", "--shape", "nano", "--start", "retrofit"]},
        "advise-mixing": {
            "advise-mixing.json": ["advise", "--json", "--goal", "mixing", "--serving", "0.5", "--context", "8192"],
        },
        "evidence": {
            "records.json": ["advise", "--json", "--records"],
            "published.json": ["cost", "--published", "--json"],
        },
        "model": {
            "inspect.json": ["inspect", "model", "--bytes", "--prompt", PROMPT, "--json"],
            "generate.txt": ["generate", "model", "--bytes", "--prompt", PROMPT, "--tokens", "48"],
            "eval.json": ["eval", "model", "--data", "text.txt", "--bytes", "--json", *EVAL],
        },
        "report": {
            "report.json": ["report", "fake", "--json"],
            "report.txt": ["report", "fake"],
            "report-sizes.json": ["report", "fake-sizes", "--json"],
        },
    }
    for shape, (pipeline, devices) in SHAPES.items():
        asked = ["cost", "--json", "--shape", shape, *METHODS]
        made[f"cost-{shape}"] = {f"cost-{shape}.json": asked, f"cost-{shape}-pipeline.json": [*asked, *pipeline]}
        if devices is not None:
            made[f"cost-{shape}"][f"cost-{shape}-tensor.json"] = [*asked, *TENSOR, devices]
    return made


def prepare(out: Path, source: Path | None) -> None:
    """Write what the commands are about into the working folder, and the model's weights into `out`."""
    weights = None if source is None else load_file(source / "model.safetensors")
    save_file(names.save_model(Path("model"), MODEL, weights), out / "model.safetensors")
    Path("text.txt").write_bytes(TEXT.encode())
    names.find("make_fake")(Path("fake"))
    names.find("make_fake")(Path("fake-sizes"), sizes=("nano", "tiny", "small"), seeds=(0, 1, 2))


def run_case(out: Path, commands: dict[str, list[str]]) -> None:
    """Run the commands of a case, one after another, in a fork of this process: a count can depend on memos."""
    pid = os.fork()
    if pid == 0:
        done = 1
        try:
            for name, words in commands.items():
                code, text = names.command(*words)
                (out / name).write_text(f"exit {code}\n{text}" if code else text)
            done = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(done)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise RuntimeError(f"{', '.join(commands)} could not be recorded")


def record(out: Path, source: Path | None, only: list[str]) -> None:
    """Run every case in a working folder."""
    root, work = Path.cwd(), out / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.chdir(work)
    prepare(out, source)
    shutil.copy("fake/compare.json", out / "fake-compare.json")
    for case, its in commands(root / "examples" / "my_stream.py").items():
        if not only or case in only:
            run_case(out, its)
    if Path("fake/report/report.md").exists():
        shutil.copy("fake/report/report.md", out / "fake-report.md")
    os.chdir(root)
    shutil.rmtree(work)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", type=Path, help="folder of another recording whose model is used")
    parser.add_argument("--case", nargs="*", default=[], help="cases to record; none named is all")
    given = parser.parse_args()
    names.check_tree()
    torch.set_num_threads(1)
    out = given.out.resolve()
    record(out, None if given.weights is None else given.weights.resolve(), given.case)


if __name__ == "__main__":
    main()
