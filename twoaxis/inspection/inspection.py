"""An inspection: what every site of one or more models read, mixed and wrote on a prompt, as plain values.

    twoaxis, torch, prompt                              what ran
    models      one entry for each:
      model, stream, mixer, parameters, ...             what it is
      tokens      [{id, text}]                          the prompt, token by token
      shown       positions of the tokens that have numbers of their own below
      columns     names of all sources, oldest first
      sites       [{index, block, kind, label, sources, weights, effective, norm, increment, cosine, quantities}]

Every number is {mean, tokens}: the mean over all tokens of the prompt, and one entry per shown token (null where it is
the same for all). `weights` are [way][source], with `sources` their columns; `effective` is the mean over the ways. A
quantity has its name, with the mixer's in front if it is a mixer's, the names of its axes, what it means and, where the
method has regimes, the share of tokens in each. Numbers are rounded to six digits; what is no number is null.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from twoaxis.base.machine import versions
from twoaxis.base.method import NamedRange, Quantity
from twoaxis.data.tokenizer import Encoded, Tokenizer, load_tokenizer
from twoaxis.depth.site import OUT
from twoaxis.inspection.measure import shares
from twoaxis.inspection.trace import Look, Trace, find_stream, trace
from twoaxis.model.load import check_folder, load_model
from twoaxis.show.document import Document, Showable

BUDGET = 1_000_000
"""Numbers of single tokens that a description holds at most; of longer prompts it has evenly spaced tokens."""


@dataclass(frozen=True)
class Inspection(Showable):
    """What models did on a prompt.

    Attributes:
        prompt: the text.
        models: what each is and did, side by side.
    """

    prompt: str
    models: tuple[dict[str, Any], ...]

    def __add__(self, other: Inspection) -> Inspection:
        """The models of both, side by side."""
        if other.prompt != self.prompt:
            raise ValueError("models stand side by side on one prompt; these inspections have two")
        return dataclasses.replace(self, models=self.models + other.models)

    def to_dict(self) -> dict[str, Any]:
        """As the module's docstring says."""
        made_with = {name: version for name, version in versions().items() if name in ("twoaxis", "torch")}
        return {**made_with, "prompt": self.prompt, "models": list(self.models)}

    def rows(self) -> list[dict[str, Any]]:
        """A row for each site of each model: the means over tokens of its norms, and the weight of each source."""
        return [_row(model, site) for model in self.models for site in model["sites"]]

    def document(self) -> Document:
        """Tables, grids and charts."""
        from twoaxis.inspection.report import make_document

        return make_document(self)


@torch.inference_mode()
def inspect(
    model: nn.Module | str | Path, tokenizer: Tokenizer | None = None, prompt: str = "", *, name: str = ""
) -> Inspection:
    """Run a prompt through a model and describe what happened.

        twoaxis.inspect("runs/delta", prompt="def read(path):") + twoaxis.inspect("runs/plain", prompt=...)

    Args:
        model: a model with one residual stream, or the folder of one.
        tokenizer: the model's, from `load_tokenizer`; None is the folder's.
        prompt: the text; not empty, and not longer than the model is made for.
        name: what to call the model; a folder is called by its path.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give some text with --prompt, or --prompt - to read it from stdin")
    if isinstance(model, str | Path):
        folder, name = check_folder(model), name or str(model)
        model = cast(nn.Module, load_model(folder))
        tokenizer = load_tokenizer(str(folder), model.config.vocab_size) if tokenizer is None else tokenizer  # type: ignore[union-attr]
    if tokenizer is None:
        raise ValueError("a model at hand needs its tokenizer, from twoaxis.data.tokenizer.load_tokenizer")
    (encoded,) = tokenizer.encode([prompt], sizes=True, prompt=True)
    config: Any = model.config
    foreign = hasattr(config, "get_text_config")  # a model of transformers
    shape = config.get_text_config() if foreign else config
    limit = getattr(shape, "max_position_embeddings", None)
    if limit is not None and len(encoded.ids) > limit:
        raise ValueError(f"the prompt has {len(encoded.ids):,} tokens, the model is made for {limit:,}: shorten it")
    stream, was_training = find_stream(model), model.training
    ids = torch.from_numpy(encoded.ids)[None].to(next(model.parameters()).device)
    how = {"use_cache": False, "logits_to_keep": 1} if foreign else {}  # else it keeps a cache and all logits
    model.eval()
    try:
        with trace(model) as found:
            model(ids, **how)
    finally:
        model.train(was_training)
    facts = {
        "model": name,
        **{key: getattr(config, key) for key in ("stream", "placement", "blend", "mixer")},
        **{key: dict(getattr(config, key) or {}) for key in ("stream_options", "mixer_options")},
        "blocks": stream.layout.blocks,
        "width": stream.layout.width,
        "parameters": sum(p.numel() for p in model.parameters()),
        "stream_parameters": sum(p.numel() for p in stream.parameters()),
        "tokenizer": tokenizer.name,
        "tokens": pieces(encoded, prompt),
    }
    return Inspection(prompt, (facts | describe(found),))


def pieces(encoded: Encoded, text: str) -> list[dict[str, Any]]:
    """The tokens with the text each stands for; bytes that are no whole character are written as \\xNN."""
    ends = list(itertools.accumulate(encoded.sizes.tolist(), initial=0))
    texts = [text.encode()[start:end].decode(errors="backslashreplace") for start, end in itertools.pairwise(ends)]
    return [{"id": token, "text": piece} for token, piece in zip(encoded.ids.tolist(), texts, strict=True)]


def describe(found: Trace) -> dict[str, Any]:
    """The newest pass of a trace: the sources of all sites and what happened at each; of a batch, the first row."""
    looks = [_first_row(look) for look in found.looks]
    length = len(looks[0].norm)
    count = max(1, min(length, BUDGET // max(1, sum(_size(look) for look in looks))))
    shown = [round(i * (length - 1) / max(1, count - 1)) for i in range(count)]
    columns = merge_sources([look.sources for look in looks])
    return {"shown": shown, "columns": columns, "sites": [_site(look, columns, shown) for look in looks]}


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
    """The first sequence of the batch: tensors that begin with T; the mixers' quantities beside the stream's."""
    tensors = {
        name: None if (tensor := getattr(look, name)) is None else tensor[0]
        for name in ("weights", "norm", "increment", "cosine")
    }
    inner = {f"{local.name}: {name}": p for local in look.inner for name, p in local.probes.items()}
    probes = {n: p._replace(value=p.value[0]) if p.per_token else p for n, p in (look.probes | inner).items()}
    return look._replace(**tensors, probes=probes)


def _size(look: Look) -> int:
    """Numbers per token."""
    weights = 0 if look.weights is None else look.weights[0].numel() + 1
    return weights + 3 + sum(p.value[0].numel() for p in look.probes.values() if p.per_token)


def _site(look: Look, columns: list[str], shown: list[int]) -> dict[str, Any]:
    site, effective = look.site, look.effective
    return {
        "index": site.index,
        "block": site.block,
        "kind": site.kind,
        "label": OUT if site.kind == OUT else f"{site.block} {site.kind}",
        "sources": [columns.index(name) for name in look.sources],
        "weights": _series(look.weights, shown),
        "effective": None if effective is None else _series(effective.mean(-1), shown),
        **{key: _series(getattr(look, key), shown) for key in ("norm", "increment", "cosine")},
        "quantities": [_quantity(name, quantity, shown) for name, quantity in look.probes.items()],
    }


def _row(model: Mapping[str, Any], site: Mapping[str, Any]) -> dict[str, Any]:
    """A site as one row of numbers; of several ways that a site reads, the weights are the first one's."""
    row = {"model": model["model"], "site": site["label"]}
    row |= {key: site[key]["mean"] for key in ("norm", "increment", "cosine") if site[key]}
    weights = site["weights"]["mean"][0] if site["weights"] else [None] * len(site["sources"])
    return row | {model["columns"][place]: weight for place, weight in zip(site["sources"], weights, strict=True)}


def _quantity(name: str, quantity: Quantity, shown: list[int]) -> dict[str, Any]:
    value = quantity.value
    series = _series(value, shown) if quantity.per_token else {"mean": _numbers(value.tolist()), "tokens": None}
    found = {"name": name, "axes": list(quantity.axes), "meaning": quantity.meaning, **(series or {})}
    if quantity.regimes:
        found["regimes"] = [
            {"name": regime.name, "range": _range(regime), "share": _numbers(share)}
            for regime, share in zip(quantity.regimes, shares(value, quantity.regimes), strict=True)
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
    return {"mean": _numbers(value.double().mean(0).tolist()), "tokens": _numbers(value[shown].tolist())}


def _numbers(value: Any) -> Any:
    """Nested lists of rounded numbers."""
    if isinstance(value, list):
        return [_numbers(entry) for entry in value]
    return float(f"{value:.6g}") if math.isfinite(value) else None
