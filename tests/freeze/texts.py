"""Recorder of texts: what commands print, as NAME.json or NAME.txt.

Models, text and comparisons they are about are made here; a model's weights come from another recording with
`--weights`. Methods are named, so that one that is added later does not change a table.
"""

from __future__ import annotations

import argparse
import os
import shutil
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
SHAPES = {"nano": "2", "smollm2-135m": "5", "llama-3-8b": "4"}
"""Shapes whose costs are recorded, and pipeline stages that divide their blocks."""
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
TEXT = "The residual stream only adds along depth. ÄÖÜ\r\n" * 6


def commands(example: Path) -> dict[str, list[str]]:
    """The words of every command by the name of its file; relative paths are in the working folder."""
    made = {
        "methods.json": ["methods", "--json"],
        "verify.json": ["verify", "--json"],
        "advise-nano.json": ["advise", "--json", "--shape", "nano"],
        "advise-nano-retrofit.json": ["advise", "--json", "--shape", "nano", "--start", "retrofit"],
        "advise-8b-mixing.json": ["advise", "--json", "--goal", "mixing", "--serving", "0.5", "--context", "8192"],
        "advise-records.json": ["advise", "--json", "--records"],
        "published.json": ["cost", "--published", "--json"],
        "inspect.json": ["inspect", "model", "--bytes", "--prompt", PROMPT, "--json"],
        "generate.txt": ["generate", "model", "--bytes", "--prompt", PROMPT, "--tokens", "48"],
        "eval.json": ["eval", "model", "--data", "text.txt", "--bytes", "--json", "--context", "16", "--stride", "5"],
        "report.json": ["report", "fake", "--json"],
        "report.txt": ["report", "fake"],
        "report-sizes.json": ["report", "fake-sizes", "--json"],
    }
    for shape, stages in SHAPES.items():
        pipeline = ["--pipeline-stages", stages, "--virtual-stages", "1" if shape == "smollm2-135m" else "2"]
        made[f"cost-{shape}.json"] = ["cost", "--json", "--shape", shape, *METHODS]
        made[f"cost-{shape}-pipeline.json"] = ["cost", "--json", "--shape", shape, *METHODS, *pipeline]
    more = ["--tensor-parallel", "4", "--sequence-parallel", "--recompute", "block", "--batch", "8", "--prefill-chunk"]
    made["cost-llama-3-8b-tensor.json"] = ["cost", "--json", *METHODS, *more, "1024"]
    # the last one: it imports the example, whose stream is registered from then on
    made["check.json"] = ["check", str(example), "--json", "--no-compile"]
    return made


def record(out: Path, source: Path | None, only: list[str]) -> None:
    """Run every command in a working folder of its own."""
    root, work = Path.cwd(), out / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    os.chdir(work)
    weights = None if source is None else load_file(source / "model.safetensors")
    save_file(names.save_model(Path("model"), MODEL, weights), out / "model.safetensors")
    Path("text.txt").write_bytes(TEXT.encode())
    names.find("make_fake")(Path("fake"))
    sizes = ("nano", "tiny", "small")
    names.find("make_fake")(Path("fake-sizes"), sizes=sizes, seeds=(0, 1, 2))
    for name, words in commands(root / "examples" / "my_stream.py").items():
        if not only or name in only:
            code, text = names.command(*words)
            (out / name).write_text(f"exit {code}\n{text}" if code else text)
    for name in ("compare.json", "report/table.json", "report/report.md"):
        if (work / "fake" / name).exists():
            shutil.copy(work / "fake" / name, out / f"fake-{Path(name).name}")
    os.chdir(root)
    shutil.rmtree(work)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", type=Path, help="folder of another recording whose model is used")
    parser.add_argument("--case", nargs="*", default=[], help="files to write; none named is all")
    given = parser.parse_args()
    names.check_tree()
    torch.set_num_threads(1)
    out = given.out.resolve()
    record(out, None if given.weights is None else given.weights.resolve(), given.case)


if __name__ == "__main__":
    main()
