"""Parameter groups: which parameters learn, which of them decay, and how fast each learns.

    role      parameters                                                            decays                 rate
    matrix    weights of linear layers and embeddings, stacked experts              yes                    1
    router    scores of experts                                                     yes, in float32        1
    norm      scales of norms                                                       no                     1
    bias      biases                                                                no                     1
    taps      weights of convolutions along time                                    no                     1
    other     anything else, such as attention sinks                                no                     1
    stream    parameters of a residual stream                                       as its method says     as it says

The same rule serves training, retrofits and probes, for our own models and those of transformers. A tied embedding is
the head's matrix too; an untied one decays likewise, as in the code most methods were published with.

    trainable(model, ["stream.*", "embed_tokens.weight"])
    torch.optim.AdamW(param_groups(model, lr=1e-3, weight_decay=0.1))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from twoaxis.base.method import ParameterGroup
from twoaxis.base.registry import did_you_mean
from twoaxis.depth.stream import Stream

Role = Literal["matrix", "router", "norm", "bias", "taps", "other", "stream"]

DECAYED: tuple[Role, ...] = ("matrix", "router")
"""Roles to which weight decay applies; a stream's method says itself."""
FLOAT32: tuple[Role, ...] = ("router",)
"""Roles that stay in float32 whatever the model's dtype; a stream's method says itself."""


def roles(model: nn.Module) -> dict[str, Role]:
    """The role of every parameter, by name."""
    streams = [path for path, _ in outer_streams(model)]
    known: dict[str, Role] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        inside = any(path == stream or path.startswith(f"{stream}.") for stream in streams)
        parent, _, own = path.rpartition(".")
        routes = own in ("gate", "router") and hasattr(model.get_submodule(parent), "experts")  # it chooses among them
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:  # a tied parameter has the role of its first place, as it has that name
                seen.add(id(parameter))
                full = f"{path}.{name}" if path else name
                known[full] = "stream" if inside else _role(module, full, parameter.dim(), routes)
    return known


def _role(module: nn.Module, name: str, dimensions: int, routes: bool) -> Role:
    kind, own = type(module).__name__, name.rpartition(".")[2]
    if own.endswith("bias"):
        return "bias"
    if "norm" in own.lower() or "norm" in kind.lower():
        return "norm"
    if routes:
        return "router"
    # Conv1D is transformers' name for the transposed linear layers of GPT-2.
    if isinstance(module, nn.Linear | nn.Embedding) or (kind == "Conv1D" and dimensions == 2):
        return "matrix"
    if dimensions == 3 and "experts" in name.split("."):
        return "matrix"
    return "taps" if "conv" in kind.lower() else "other"


def outer_streams(model: nn.Module) -> list[tuple[str, Stream]]:
    """Streams of a model with their paths; what a stream wraps, as `Blend` does, is part of it."""
    inside: set[nn.Module] = set()
    streams: list[tuple[str, Stream]] = []
    for path, module in model.named_modules():  # what is outside comes first
        if isinstance(module, Stream) and module not in inside:
            streams.append((path, module))
            inside |= {*module.modules()}
    return streams


def group_parameters(model: nn.Module, rates: Mapping[str, float] | None = None) -> list[ParameterGroup]:
    """The parameters that learn, in groups of one decay and rate, in a fixed order; each is in exactly one group."""
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not learning:
        raise ValueError("no parameter of the model learns; choose others with train")
    known = roles(model)
    if unknown := sorted(set(rates or {}) - set(known)):
        raise ValueError(f"a learning-rate multiplier names {unknown[0]}, which the model lacks")
    treated = {name: (role in DECAYED, 1.0, role in FLOAT32) for name, role in known.items() if role != "stream"}
    treated |= _stream_treatment(model, known)
    grouped: dict[tuple[bool, float, bool], list[str]] = {}
    for name in learning:
        decay, rate, float32 = treated[name]
        grouped.setdefault((decay, rate * (rates or {}).get(name, 1.0), float32), []).append(name)
    order = sorted(grouped, key=lambda kind: (not kind[0], -kind[1], kind[2]))
    return [ParameterGroup(tuple(grouped[kind]), *kind) for kind in order]


def _stream_treatment(model: nn.Module, known: Mapping[str, Role]) -> dict[str, tuple[bool, float, bool]]:
    """Decay, rate and float32 of streams' parameters, as their methods say."""
    treated: dict[str, tuple[bool, float, bool]] = {}
    for path, stream in outer_streams(model):
        for group in stream.parameter_groups():
            for name in (f"{path}.{name}" for name in group.names):
                if name in treated:
                    raise ValueError(f"{name} is in two parameter groups of its stream {stream.name}")
                if known.get(name) != "stream":
                    raise ValueError(f"a parameter group of the stream {stream.name} names {name}, which it lacks")
                treated[name] = group[1:]
    if missing := sorted(name for name, role in known.items() if role == "stream" and name not in treated):
        raise ValueError(f"{missing[0]} is in no parameter group: its stream must name it in one")
    return treated


def param_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0, rates: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Groups for a torch optimiser, with `names` and with `peak_lr` for schedules that change `lr`."""
    parameters = dict(model.named_parameters())
    return [
        {"params": [parameters[name] for name in group.names], "names": group.names}
        | {"lr": lr * group.rate, "peak_lr": lr * group.rate, "weight_decay": weight_decay if group.decay else 0.0}
        for group in group_parameters(model, rates)
    ]


def trainable(model: nn.Module, which: str | Sequence[str], *, new: Sequence[str] = ()) -> None:
    """Set which parameters get gradients; the others are frozen. See `select` for the arguments."""
    chosen = set(select(model, which, new=new))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)


def select(model: nn.Module, which: str | Sequence[str], *, new: Sequence[str] = ()) -> list[str]:
    """Names of parameters, in the model's order.

    Args:
        model: the model.
        which: "all", "new", "norms", or names and patterns such as "stream.*". The name of a module stands for all
            of its parameters.
        new: the parameters that "new" means; of a retrofit, `twoaxis.pretrained.record.new_parameters` knows them.
    """
    names = [name for name, _ in model.named_parameters()]
    wanted = [which] if isinstance(which, str) else list(which)
    if not wanted:
        raise ValueError("nothing is to be trained: give new, norms, all, or names of parameters")
    known = {"all": names, "new": new, "norms": [name for name, role in roles(model).items() if role == "norm"]}
    chosen: set[str] = set()
    for word in wanted:
        chosen.update(known[word] if word in known else _matches(word, names))
    if not chosen:
        raise ValueError(f"{', '.join(wanted)} means no parameter: this model has no new ones")
    return [name for name in names if name in chosen]


def _matches(word: str, names: list[str]) -> list[str]:
    matching = [name for name in names if name == word or name.startswith(f"{word}.") or fnmatchcase(name, word)]
    if matching:
        return matching
    modules = {name.rsplit(".", level)[0] for name in names for level in range(1, name.count(".") + 1)}
    hint = did_you_mean(word, ["new", "norms", "all", *names, *sorted(modules)])
    raise ValueError(
        f"no parameter is called {word!r}{hint}; give new, norms, all, names, or patterns such as *.attention.*"
    )
