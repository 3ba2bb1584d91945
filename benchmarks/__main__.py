"""`python -m benchmarks [--quick]`: operators against naive forms, and a training step of every stream and mixer.

Writes runs/bench.json and prints the tables. Ratios only: absolute times do not travel between machines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.against_llama import llamas
from benchmarks.timing import PeakBytes, interleave, machine
from twoaxis import Decoder, DecoderConfig, mixer_names, stream_names, window_attention
from twoaxis.kernels.weighted_sum import rms_logits, weighted_sum


def depth_reads(tokens: int, width: int, count: int) -> dict[str, Callable[[], Any]]:
    """A softmax read over `count` sources, forward and backward: a stack and einsum, and the shared primitive."""
    sources = [torch.randn(tokens, width, requires_grad=True) for _ in range(count)]
    query = torch.randn(width, requires_grad=True)
    probe = torch.randn(tokens, width)

    def naive() -> None:
        v = torch.stack(sources)
        keys = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
        weights = torch.einsum("snd,d->sn", keys, query).softmax(0)
        torch.einsum("sn,snd->nd", weights, v).backward(probe)

    def ours() -> None:
        u = query.view(1, 1, -1)
        logits = torch.stack([rms_logits(s, u, 1e-6)[:, 0] for s in sources], dim=-1)
        weighted_sum(sources, token=logits.softmax(-1))[0].backward(probe)

    return {"stack + einsum": naive, "weighted_sum": ours}


def windows(tokens: int, window: int) -> dict[str, Callable[[], Any]]:
    """Windowed attention over time, forward and backward: a dense mask, and the operator."""
    q, k, v = (torch.randn(1, tokens, 8, 64, requires_grad=True) for _ in range(3))
    probe = torch.randn(1, tokens, 8, 64)
    lag = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    mask = (lag >= 0) & (lag < window)

    def dense() -> None:
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask)
        out.transpose(1, 2).backward(probe)

    return {"dense mask": dense, "window_attention": lambda: window_attention(q, k, v, window, 1).backward(probe)}


def steps(blocks: int, width: int, length: int) -> dict[str, Callable[[], Any]]:
    """A forward and backward pass of a decoder with every stream and mixer at its defaults."""
    shape: dict[str, Any] = {"vocabulary": 1024, "width": width, "blocks": blocks, "heads": width // 64}
    configs = {name: DecoderConfig(**shape, stream=name) for name in stream_names()}
    configs |= {f"standard + {name}": DecoderConfig(**shape, mixer=name) for name in mixer_names()}
    tokens = torch.randint(0, 1024, (1, length))

    def step(model: Decoder) -> None:
        model.zero_grad()
        F.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:]).backward()

    return {name: partial(step, Decoder(config)) for name, config in configs.items()}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds: checks that it runs")
    parser.add_argument("--out", type=Path, default=Path("runs/bench.json"), help="where the figures go")
    options = parser.parse_args()
    rounds = 3 if options.quick else 9
    tables = {
        "softmax depth read, forward + backward": depth_reads(*((64, 64, 8) if options.quick else (2048, 512, 32))),
        "windowed attention w=16, forward + backward": windows(128 if options.quick else 2048, 16),
        "training step against standard": steps(*((2, 64, 32) if options.quick else (12, 256, 256))),
    }
    for what, contenders in llamas(*((2, 64, 32) if options.quick else (12, 768, 512))).items():
        tables[f"{what}, plain stream against transformers' Llama"] = contenders
    document: dict[str, Any] = {
        "machine": machine(),
        "command": "python -m benchmarks" + (" --quick" if options.quick else ""),
    }
    print(document["machine"])
    for title, contenders in tables.items():
        print(f"\n{title}\n{'':34s} {'time':>7s} {'spread':>7s} {'peak bytes':>11s}")
        timings = interleave(contenders, rounds)
        peaks = {}
        for name, run in contenders.items():
            with PeakBytes() as peak:
                run()
            peaks[name] = peak.peak
        base = next(iter(peaks.values()))
        for name, timing in timings.items():
            print(f"{name:34s} {timing.ratio:7.3f} {timing.spread:7.3f} {peaks[name] / base:11.3f}")
        document[title] = {n: {**t._asdict(), "peak_ratio": peaks[n] / base} for n, t in timings.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = options.out.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1))
    temporary.replace(options.out)
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
