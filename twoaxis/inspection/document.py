"""An inspection as one JSON document: what the tables print, the plots draw and the page carries inside it.

    model, stream, mixer, parameters, prompt            what was run
    tokens      [{id, text}]                            the prompt, token by token
    shown       positions of the tokens that have numbers of their own below
    columns     names of all sources, oldest first
    sites       [{index, block, kind, sources, weights, effective, norm, increment, cosine, probes, inner}]

Every quantity is {mean, tokens}: the mean over all tokens of the prompt, and one entry per shown token (null where the
quantity is the same for all). `weights` are [way][source], with `sources` their columns; `effective` is the mean over
the ways. A probe has its name, the names of its axes and, where the method has regimes, the share of tokens in each.
Numbers are rounded to six digits; what is no number is null.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import twoaxis
from twoaxis.base.method import NamedRange, Quantity
from twoaxis.data.tokenizer import Encoded, Tokenizer
from twoaxis.depth.site import OUT, Site
from twoaxis.inspection.files import KIND
from twoaxis.inspection.measure import shares
from twoaxis.inspection.trace import Inner, Look, Trace, find_stream, trace

if TYPE_CHECKING:
    from twoaxis.model.hf_model import TwoAxisForCausalLM

BUDGET = 1_000_000
"""Numbers of single tokens that a document holds at most; of longer prompts it shows evenly spaced tokens."""


@torch.inference_mode()
def inspect_prompt(model: TwoAxisForCausalLM, tokenizer: Tokenizer, prompt: str, *, name: str = "") -> dict[str, Any]:
    """Run a prompt through a model and describe what happened.

    Args:
        model: from `load_model`.
        tokenizer: the model's, from `load_tokenizer`.
        prompt: the text; not empty, and not longer than the model is made for.
        name: what to call the model.
    """
    check_prompt(prompt)
    (encoded,) = tokenizer.encode([prompt], sizes=True, prompt=True)
    limit = model.config.max_position_embeddings
    if len(encoded.ids) > limit:
        raise ValueError(f"the prompt has {len(encoded.ids):,} tokens, the model is made for {limit:,}: shorten it")
    was_training = model.training
    model.eval()
    try:
        with trace(model) as found:
            model.model(torch.from_numpy(encoded.ids)[None].to(model.device), use_cache=False)
    finally:
        model.train(was_training)
    return {
        "kind": KIND,
        "twoaxis": twoaxis.__version__,
        "torch": torch.__version__,
        "model": name,
        **_facts(model),
        "tokenizer": tokenizer.name,
        "prompt": prompt,
        "tokens": pieces(encoded, prompt),
        **describe(found),
    }


def check_prompt(prompt: str) -> None:
    """Refuse an empty prompt."""
    if not prompt:
        raise ValueError("the prompt is empty: give some text with --prompt, or --prompt - to read it from stdin")


def _facts(model: TwoAxisForCausalLM) -> dict[str, Any]:
    config, stream = model.config.decoder_config(), find_stream(model)
    return {
        "stream": config.stream,
        "stream_options": dict(config.stream_options),
        "placement": config.placement,
        "blend": config.blend,
        "mixer": config.mixer,
        "mixer_options": dict(config.mixer_options),
        "blocks": config.num_hidden_layers,
        "width": config.hidden_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "stream_parameters": sum(p.numel() for p in stream.parameters()),
    }


def pieces(encoded: Encoded, text: str) -> list[dict[str, Any]]:
    """The tokens with the text each stands for; bytes that are no whole character are written as \\xNN."""
    found, done, raw = [], 0, text.encode()
    for token, size in zip(encoded.ids.tolist(), encoded.sizes.tolist(), strict=True):
        found.append({"id": token, "text": raw[done : done + size].decode(errors="backslashreplace")})
        done += size
    return found


def describe(found: Trace) -> dict[str, Any]:
    """The newest pass of a trace: the sources of all sites and what happened at each; of a batch, the first row."""
    looks = [_first_row(look) for look in found.looks]
    length = len(looks[0].norm)
    count = max(1, min(length, BUDGET // max(1, sum(_size(look) for look in looks))))
    shown = [round(i * (length - 1) / max(1, count - 1)) for i in range(count)]
    columns = merge_sources([look.sources for look in looks])
    return {
        "shown": shown,
        "columns": columns,
        "sites": [_site(look, columns, shown) for look in looks],
    }


def site_label(site: Site) -> str:
    """`3 mlp`, or `out`."""
    return OUT if site.kind == OUT else f"{site.block} {site.kind}"


def merge_sources(lists: Sequence[Sequence[str]]) -> list[str]:
    """All sources in one order that keeps the order of every site's own, as far as they agree."""
    after: dict[str, set[str]] = {}
    for names in lists:
        for name in names:
            after.setdefault(name, set())
        for left, right in itertools.pairwise(names):
            after[right].add(left)
    order: list[str] = []
    left = list(after)
    while left:
        ready = [name for name in left if after[name] <= set(order)] or left
        order.append(min(ready, key=_age))
        left.remove(order[-1])
    return order


def _age(name: str) -> tuple[bool, float]:
    """Orders sources of which no site reads both: the embedding first, then by the number at their end."""
    last = name.rpartition(" ")[2]
    return name != "embedding", int(last) if last.isdecimal() else math.inf


def _first_row(look: Look) -> Look:
    """The first sequence of the batch: tensors that begin with T."""

    def row(probes: dict[str, Quantity]) -> dict[str, Quantity]:
        return {name: p._replace(value=p.value[0]) if p.per_token else p for name, p in probes.items()}

    tensors = {
        name: None if (tensor := getattr(look, name)) is None else tensor[0]
        for name in ("weights", "norm", "increment", "cosine")
    }
    inner = tuple(Inner(local.name, row(local.probes)) for local in look.inner)
    return look._replace(**tensors, probes=row(look.probes), inner=inner)


def _probes(look: Look) -> list[Quantity]:
    return [*look.probes.values(), *(p for local in look.inner for p in local.probes.values())]


def _size(look: Look) -> int:
    """Numbers per token."""
    weights = 0 if look.weights is None else look.weights[0].numel() + 1
    return weights + 3 + sum(p.value[0].numel() for p in _probes(look) if p.per_token)


def _site(look: Look, columns: list[str], shown: list[int]) -> dict[str, Any]:
    effective = look.effective
    return {
        "index": look.site.index,
        "block": look.site.block,
        "kind": look.site.kind,
        "label": site_label(look.site),
        "sources": [columns.index(name) for name in look.sources],
        "weights": _series(look.weights, shown),
        "effective": None if effective is None else _series(effective.mean(-1), shown),
        "norm": _series(look.norm, shown),
        "increment": _series(look.increment, shown),
        "cosine": _series(look.cosine, shown),
        "probes": [_probe(name, p, shown) for name, p in look.probes.items()],
        "inner": [
            {"name": local.name, "probes": [_probe(name, p, shown) for name, p in local.probes.items()]}
            for local in look.inner
        ],
    }


def _probe(name: str, probe: Quantity, shown: list[int]) -> dict[str, Any]:
    series = _series(probe.value, shown) if probe.per_token else {"mean": _numbers(probe.value), "tokens": None}
    assert series is not None
    found = {"name": name, "axes": list(probe.axes), **series}
    if probe.regimes:
        parts = zip(probe.regimes, shares(probe.value, probe.regimes), strict=True)
        found["regimes"] = [
            {"name": regime.name, "range": _range(regime), "share": _number(share)} for regime, share in parts
        ]
    return found


def _range(regime: NamedRange) -> str:
    low, high = (math.isfinite(end) for end in (regime.low, regime.high))
    if low and high:
        return f"{regime.low:g} to {regime.high:g}"
    return f"from {regime.low:g}" if low else f"up to {regime.high:g}" if high else "any"


def _series(value: Tensor | None, shown: list[int]) -> dict[str, Any] | None:
    """(T, ...) as its mean over the tokens, and its values at those shown."""
    if value is None:
        return None
    return {"mean": _numbers(value.double().mean(0)), "tokens": _numbers(value[shown])}


def _numbers(value: Tensor) -> Any:
    """A tensor as nested lists of rounded numbers."""
    return _round(value.tolist())


def _round(value: Any) -> Any:
    return [_round(v) for v in value] if isinstance(value, list) else _number(value)


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
