"""The same operator on both axes, counted and measured: the numbers and figures of docs/explanation/two_axes.md.

    python -m docs._make.two_axes          counts and measures anew; `make docs` then writes the page and the figures

    sequence   short_swa: before the attention of every block, a token reads the last w tokens
    depth      depth_attention: before every block, a token reads its own last K states

Both have projections of their own in every block, the same heads and the same window, and both are
`twoaxis.window_attention`. Counts are of a public shape and exact; times and memory are measured on this machine with
small decoders, in turns, as ratios to the plain one. All of it is kept in docs/results/figures/two_axes.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

SEED = 0
SHAPE = "llama-3-8b"
WINDOW = 8
WINDOWS = (2, 4, 8, 16, 32)
DEPTHS = (8, 16, 32, 64, 128)
CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)
STAGES = (2, 4, 8, 16, 32)
TILES = (64, 128)
"""Queries that a GPU kernel takes at once."""
TILED = (8, 32, 64, 65, 66, 128, 129, 130)
"""Windows on both sides of a tile."""
CHUNK = 2048
"""Tokens of a prefill pass where the prompt is cut."""
SIZE = 2
"""Bytes of a number in bfloat16."""

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "sequence": ("short_swa", {"window": WINDOW}),
    "depth": ("depth_attention", {"window": WINDOW}),
    "depth, all states": ("depth_attention", {"window": None}),
    "attention residuals, full": ("attention_residuals", {}),
    "attention residuals, window": ("attention_residuals", {"window": WINDOW}),
    "attention residuals, blocks": ("attention_residuals", {"block_size": 0}),
}
"""What is compared; a block size of 0 is an eighth of the sub-layers."""


def configure(base: Any, method: str, window: int | None = None) -> Any:
    """A decoder with one of METHODS.

    Args:
        base: its shape.
        method: of METHODS, or plain.
        window: in place of the method's own.
    """
    plain = dataclasses.replace(base, stream="standard", stream_options={}, mixer=None, mixer_options={})
    if method == "plain":
        return plain
    name, options = METHODS[method][0], dict(METHODS[method][1])
    if window is not None:
        options["window"] = window
    if name == "short_swa":
        options |= {"heads": base.num_attention_heads, "rope": False, "start": "normal"}
        return dataclasses.replace(plain, mixer=name, mixer_options=options)
    if name == "depth_attention":
        options |= {"heads": base.num_attention_heads, "granularity": "block", "shared": False}
    elif options.get("block_size") == 0:
        options["block_size"] = max(1, 2 * base.num_hidden_layers // 8)
    return dataclasses.replace(plain, stream=name, stream_options=options)


# Counted.


def equal_operations() -> dict[str, Any]:
    """Operations of the operator on a square of tokens and depths, along one axis and along the other."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from twoaxis.window import window_attention

    side, heads, size = 24, 4, 16
    x = torch.randn(1, side, side, heads, size, generator=torch.Generator().manual_seed(SEED))
    found = {}
    for name, axis in (("sequence", 1), ("depth", 2)):
        with FlopCounterMode(display=False) as counter:
            y = window_attention(x, x, x, WINDOW, axis, fused=False)
        found[name] = counter.get_total_flops()
        turned = x.transpose(1, 2)
        z = window_attention(turned, turned, turned, WINDOW, 3 - axis, fused=False).transpose(1, 2)
        found[f"{name}, difference on the transposed tensor"] = float((y - z).abs().max())
    return {"side": side, "heads": heads, "head_width": size, "window": WINDOW, **found}


def equal_models(base: Any) -> dict[str, Any]:
    """Parameters and operations per token of both, in a model of a public shape."""
    from twoaxis.model.flops import count_parameters, forward_flops

    plain = count_parameters(configure(base, "plain")).total
    rows = {}
    for method in ("sequence", "depth"):
        config = configure(base, method)
        flops = forward_flops(config, 4096)
        own = flops.mixer if method == "sequence" else flops.stream
        rows[method] = {"parameters": count_parameters(config).total - plain, "flops": own, "model": flops.total - own}
    return rows


def live(config: Any) -> int:
    """Numbers per token that are alive between two sites at their most."""
    import torch

    from twoaxis.depth.counts import count_live

    with torch.device("meta"):
        return count_live(config.make_stream())


def moved(method: str, width: int, window: int) -> int:
    """Bytes per token and block that a read in one kernel cannot do without.

    Along the sequence a kernel has all queries at hand and loads every key once for the w queries that see it: q, k, v
    in, the result out. Along depth the queries come one layer at a time, so each loads its K keys and K values anew.
    """
    numbers = 4 if method == "sequence" else 2 * window + 2
    return numbers * width * SIZE


def by_window(base: Any) -> list[dict[str, Any]]:
    """What grows with the window."""
    rows = []
    for window in WINDOWS:
        row: dict[str, Any] = {"window": window}
        for method in ("sequence", "depth"):
            numbers = live(configure(base, method, window))
            kept = 2 * (window - 1) * base.hidden_size * base.num_hidden_layers * SIZE if method == "sequence" else 0
            row[method] = {"moved": moved(method, base.hidden_size, window), "live": numbers * SIZE, "kept": kept}
        rows.append(row)
    return rows


def by_chunk() -> list[dict[str, Any]]:
    """Key tiles that a chunked kernel loads for a tile of queries, and logits it computes for one that is needed.

    A tile of c queries sees its own c keys and the w - 1 before them, which lie in ceil((w - 1) / c) further tiles.
    """
    rows = []
    for window in TILED:
        tiles = {str(c): 1 + -(-(window - 1) // c) for c in TILES}
        rows.append({"window": window, "tiles": tiles, "waste": {str(c): (c + window - 1) / window for c in TILES}})
    return rows


def by_depth(base: Any) -> list[dict[str, Any]]:
    """Bytes of state per token that are alive across sites, against the number of blocks."""
    rows = []
    for blocks in DEPTHS:
        deep = dataclasses.replace(base, num_hidden_layers=blocks, attention_windows=None, no_rope_blocks=())
        rows.append({"blocks": blocks, **{m: live(configure(deep, m)) * SIZE for m in ("plain", *METHODS)}})
    return rows


def by_context(base: Any) -> list[dict[str, Any]]:
    """Bytes of one sequence: kept between tokens, and alive while the prompt is read, whole and in chunks."""
    kv = base.kv_heads * base.head_size
    ring = 2 * (WINDOW - 1) * base.hidden_size * base.num_hidden_layers * SIZE
    per = {m: live(configure(base, m)) * SIZE for m in ("sequence", "depth", "depth, all states")}
    return [
        {
            "context": tokens,
            "keys and values": 2 * kv * base.num_hidden_layers * SIZE * tokens,
            "ring": ring,
            "prefill": {method: size * tokens for method, size in per.items()},
            "chunked": {method: size * min(CHUNK, tokens) for method, size in per.items()},
        }
        for tokens in CONTEXTS
    ]


def by_stages(base: Any) -> list[dict[str, Any]]:
    """Bytes per token over all boundaries of a pipeline: whole, and with two virtual stages whole and cached."""
    import torch

    from twoaxis.model.decoder import Decoder
    from twoaxis.model.stages import plan

    rows: list[dict[str, Any]] = [{"stages": stages} for stages in STAGES]
    for method in ("plain", *METHODS):
        with torch.device("meta"):
            trunk = Decoder(configure(base, method)).to(torch.bfloat16)
        for row in rows:
            row[method] = {"whole": plan(trunk, row["stages"]).whole}
            if base.num_hidden_layers % (2 * row["stages"]) == 0:
                virtual = plan(trunk, row["stages"], 2)
                row[method] |= {"virtual": virtual.whole, "cached": virtual.cached}
    return rows


def published() -> dict[str, Any]:
    """The losses that say which way of saving keeps the gain: one ablation of Attention Residuals."""
    from twoaxis.guide.evidence import read_evidence

    wanted = {"full": "attention_residuals", "blocks": "attention_residuals:block_size=4"}
    wanted["window"] = "attention_residuals:window=8"
    found = {}
    for name, method in wanted.items():
        record = next(r for r in read_evidence().records if r.method == method and r.where == "table 4")
        found[name] = {"baseline": record.baseline, "value": record.value, "source": f"{record.source}, {record.where}"}
    return found


# Measured.

READ = {"layers": 16, "tokens": 512, "heads": 4, "head_width": 32}
MODEL: dict[str, Any] = {"vocab_size": 256, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 352}
POINTS: tuple[tuple[str, int, dict[str, int]], ...] = (
    *(("window", w, {"blocks": 16, "tokens": 256, "window": w}) for w in (2, 4, 8, 16)),
    *(("blocks", n, {"blocks": n, "tokens": 256, "window": WINDOW}) for n in (4, 8, 16, 32)),
    *(("context", t, {"blocks": 8, "tokens": t, "window": WINDOW}) for t in (128, 512, 2048)),
)
"""Decoders that are trained for a moment: what grows, how large it is, and the decoder."""


def measure_reads(rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Nanoseconds per token and layer of reads alone, forward and backward, by window."""
    import torch

    from twoaxis.base.timer import take_turns

    generator = torch.Generator().manual_seed(SEED)
    shape = (1, READ["tokens"], READ["layers"], READ["heads"], READ["head_width"])
    q, k, v, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    rows = []
    for window in (2, 4, 8, 16):
        runs = {
            "sequence": lambda window=window: _along_sequence(q, k, v, grad, window),
            "depth": lambda window=window: _along_depth(q, k, v, grad, window),
            "depth, all layers at once": lambda window=window: _at_once(q, k, v, grad, window),
        }
        row: dict[str, Any] = {"window": window}
        for name, times in take_turns(runs, rounds).items():
            row[name] = 1e9 * times.median / (READ["tokens"] * READ["layers"])
        rows.append(row)
        say(f"reads, window {window}")
    return rows


def _leaves(*tensors: Any) -> list[Any]:
    return [t.detach().requires_grad_() for t in tensors]


def _along_sequence(q: Any, k: Any, v: Any, grad: Any, window: int) -> None:
    """Layer by layer, every layer over all its tokens."""
    from twoaxis.window import window_attention

    for layer in range(q.shape[2]):
        q_l, k_l, v_l = _leaves(*(t[:, :, layer].contiguous() for t in (q, k, v)))
        window_attention(q_l, k_l, v_l, window, 1).backward(grad[:, :, layer])


def _along_depth(q: Any, k: Any, v: Any, grad: Any, window: int) -> None:
    """Layer by layer, every layer over the layers before it, as a network runs."""
    import torch

    from twoaxis.kernels.history import source_dots, weighted_sum

    columns = [[t[:, :, layer : layer + 1].contiguous() for t in (q, k, v)] for layer in range(q.shape[2])]
    given = [_leaves(*column) for column in columns]
    made = []
    for layer, (q_l, _, _) in enumerate(given):
        seen = given[max(0, layer - window + 1) : layer + 1]
        logits = source_dots(q_l.unsqueeze(-2), [k_l for _, k_l, _ in seen]) * q.shape[-1] ** -0.5
        made += weighted_sum([v_l for _, _, v_l in seen], token=logits.softmax(-1))
    torch.autograd.backward(made, [grad[:, :, layer : layer + 1] for layer in range(q.shape[2])])


def _at_once(q: Any, k: Any, v: Any, grad: Any, window: int) -> None:
    """All layers in one call, which only a network whose states were known beforehand could do."""
    from twoaxis.window import window_attention

    q, k, v = _leaves(q, k, v)
    window_attention(q, k, v, window, 2).backward(grad)


def measure_models(rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Time and activations of real training steps, as ratios to the plain decoder."""
    import torch

    from twoaxis.model.config import ModelConfig
    from twoaxis.model.decoder import Decoder
    from twoaxis.training.measure import peak_memory, throughputs

    rows = []
    for grows, size, given in POINTS:
        base = ModelConfig(**MODEL, num_hidden_layers=given["blocks"])
        configs = {"plain": configure(base, "plain")}
        configs |= {method: configure(base, method, given["window"]) for method in ("sequence", "depth")}

        def build(config: Any) -> Any:
            torch.manual_seed(SEED)
            return Decoder(config)

        makers = {name: lambda config=config: build(config) for name, config in configs.items()}
        rates = throughputs(makers, 1, given["tokens"], rounds=rounds, steps=1)
        memory = {name: peak_memory(make(), 1, given["tokens"]).activations for name, make in makers.items()}
        row: dict[str, Any] = {"grows": grows, "size": size, **given}
        for name in ("sequence", "depth"):
            ratio = rates["plain"].rate.median / rates[name].rate.median
            row[name] = {"time": ratio, "memory": memory[name] / memory["plain"]}
        rows.append(row)
        say(f"training steps, {grows} {size}")
    return rows


# The document.


def counted() -> dict[str, Any]:
    """Everything that needs no clock."""
    from twoaxis.model.presets import find_shape

    base = find_shape(SHAPE)
    return {
        "shape": {
            "name": SHAPE,
            "blocks": base.num_hidden_layers,
            "width": base.hidden_size,
            "heads": base.num_attention_heads,
        },
        "window": WINDOW,
        "chunk": CHUNK,
        "operator": equal_operations(),
        "models": equal_models(base),
        "by_window": by_window(base),
        "by_chunk": by_chunk(),
        "by_depth": by_depth(base),
        "by_context": by_context(base),
        "by_stages": by_stages(base),
        "published": published(),
    }


def measured(rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything that does, on one thread."""
    from twoaxis.base.machine import hardware_line, versions

    with _one_thread():
        found = {"hardware": hardware_line(), "versions": versions(), "seed": SEED, "rounds": rounds}
        found |= {"read": READ, "model": MODEL}
        return found | {"reads": measure_reads(rounds, say), "steps": measure_models(rounds, say)}


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    from docs._make.two_axes_page import DATA
    from twoaxis.base.files import write_json

    write_json(DATA, counted() | {"measured": measured(7, lambda text: print(text, file=sys.stderr))})
