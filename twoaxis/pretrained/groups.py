"""Training after a retrofit: which parameters are new, which are trained, and how fast.

    twoaxis.pretrained.groups.trainable(model, "new")              train the stream and the mixers, freeze the rest
    twoaxis.pretrained.groups.trainable(model, "all")
    twoaxis.pretrained.groups.trainable(model, ["model.trunk.stream.*", "lm_head.weight"])
    torch.optim.AdamW(optimizer_groups(model, lr=1e-3))

The learning rate is that of the new parameters, which have everything to learn; pretrained ones move at a tenth of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from twoaxis.pretrained.record import record_of

if TYPE_CHECKING:
    from torch import nn

Role = Literal["new", "pretrained"]

RATES: dict[Role, float] = {"new": 1.0, "pretrained": 0.1}
"""Multipliers of the learning rate. A stream's own parameter groups multiply theirs on top."""

STREAM = "model.trunk.stream."


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """Whether each parameter is new or pretrained; a model that is no retrofit is an error."""
    record = record_of(model)
    if record is None:
        raise ValueError(
            "this model is no retrofit: there is no retrofit.json in the folder it was loaded from, so nobody knows "
            "which of its parameters are new"
        )
    new, names = set(record.new), [name for name, _ in model.named_parameters()]
    if lost := sorted(new - set(names)):
        raise ValueError(f"retrofit.json speaks of another model: {lost[0]} is none of its {len(names)} parameters")
    return {name: "new" if name in new else "pretrained" for name in names}


def trainable(model: nn.Module, which: str | Sequence[str]) -> None:
    """Set which parameters get gradients; the others are frozen.

    Args:
        model: the model; "new" needs one that was retrofitted.
        which: "new", "all", or names and patterns of parameters such as "model.trunk.stream.*". The name of a module
            stands for all of its parameters.
    """
    chosen = set(select(model, which))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)


def select(model: nn.Module, which: str | Sequence[str]) -> list[str]:
    """The names of the parameters that `which` means, in the model's order; see `trainable`."""
    names = [name for name, _ in model.named_parameters()]
    wanted = [which] if isinstance(which, str) else list(which)
    if not wanted:
        raise ValueError("nothing is to be trained: give new, all, or names of parameters")
    found: set[str] = set()
    for word in wanted:
        if word == "all":
            found.update(names)
        elif word == "new":
            found.update(name for name, role in parameter_roles(model).items() if role == "new")
        else:
            found.update(_matches(word, names))
    if not found:
        raise ValueError(f"{', '.join(wanted)} means no parameter: this retrofit added none")
    return [name for name in names if name in found]


def _matches(word: str, names: list[str]) -> list[str]:
    matching = [name for name in names if name == word or name.startswith(f"{word}.") or fnmatchcase(name, word)]
    if matching:
        return matching
    modules = {name.rsplit(".", level)[0] for name in names for level in range(1, name.count(".") + 1)}
    close = difflib.get_close_matches(word, ["new", "all", *names, *sorted(modules)], n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"no parameter is called {word!r}{hint}; give new, all, names, or patterns such as *.attention.*")


def rate_multipliers(model: nn.Module, rates: dict[Role, float] | None = None) -> dict[str, float]:
    """What the learning rate of each parameter is multiplied with.

    Args:
        model: a retrofit.
        rates: for new and for pretrained parameters; None is `RATES`.
    """
    given: dict[Role, float] = {**RATES, **(rates or {})}
    found = {name: given[role] for name, role in parameter_roles(model).items()}
    for group in _stream_groups(model):
        for name in group.names:
            found[STREAM + name] *= group.rate
    return found


def optimizer_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, rates: dict[Role, float] | None = None
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: those that get gradients, by rate and decay.

    Args:
        model: a retrofit.
        lr: of new parameters.
        weight_decay: of matrices; vectors and what a stream says needs none get none.
        rates: see `rate_multipliers`.
    """
    multipliers = rate_multipliers(model, rates)
    undecayed = {STREAM + name for group in _stream_groups(model) if not group.decay for name in group.names}
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.dim() > 1 and name not in undecayed and ".norms." not in name
        group = {"params": [], "lr": lr * multipliers[name], "weight_decay": weight_decay if decays else 0.0}
        groups.setdefault((multipliers[name], decays), group)["params"].append(parameter)
    return list(groups.values())


def _stream_groups(model: Any) -> Any:
    return model.model.trunk.stream.parameter_groups()
