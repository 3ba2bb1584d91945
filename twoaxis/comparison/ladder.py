"""A rung on a frozen model: what of it learns, what it costs, and how a group of sites is switched off.

A group of sites is switched off after the training: in a `Switched` stream its sites see the plain residual, the
embedding and all increments, while everybody goes on writing to the method. A mixer's operators of the group are made
neutral, and the control's scales are put back.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twoaxis.comparison.probe_plan import Costs, Rung, group_of
from twoaxis.depth.blend import Blend, Both
from twoaxis.depth.counts import count
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Seen, Stream
from twoaxis.model.family import FAMILIES, from_family
from twoaxis.model.flops import forward_flops
from twoaxis.model.graft import TwoAxisForCausalLM, graft
from twoaxis.model.survey import MIXES, NORM
from twoaxis.pretrained.start import choose, read_method

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def make_model(source: PreTrainedModel, rung: Rung, seed: int) -> TwoAxisForCausalLM:
    """The source with a rung on it, of which only the rung's parameters get gradients.

    Args:
        source: is left alone; its tensors are shared, but for the norms, which the control moves.
        rung: what is put on it.
        seed: of the new parameters that start at random.
    """
    shared = {id(p): p for name, p in source.named_parameters() if not _is_norm(name)}
    config: Any = source.config.get_text_config(decoder=True)
    kinds: list[tuple[str, ...]] = [("attention", "mlp")] * config.num_hidden_layers
    methods = choose(read_method(rung.stream, rung.mixer), config.hidden_size, kinds).methods
    model = graft(copy.deepcopy(source, shared), methods, seed=seed)
    chosen = set(learning(model, rung))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return model


def _is_norm(name: str) -> bool:
    """Whether a parameter belongs to a norm of the residual: a layer's or the final one, none inside the attention."""
    *outer, module, _ = name.split(".")
    return NORM.search(module) is not None and not any(MIXES.search(part) for part in outer)


def learning(model: TwoAxisForCausalLM, rung: Rung) -> list[str]:
    """Names of the parameters that learn: the norms for the control."""
    names = model.new_parameters()
    if rung.control:
        return [name for name, _ in model.named_parameters() if _is_norm(name) and name not in names]
    if not names:
        raise ValueError(f"{rung.method} adds no parameters to this model: there is nothing to train")
    return names


def costs(source: PreTrainedModel, rung: Rung, context: int) -> Costs:
    """What a rung adds."""
    model = make_model(source, rung, 0)
    stream, locals_ = count(model.stream), [local.cost() for _, local in model.local_operators()]
    added = stream.flops + sum(cost.flops for cost in locals_)
    config: Any = source.config.get_text_config(decoder=True)
    if config.model_type in FAMILIES:
        plain = forward_flops(from_family(config), context).total
    else:  # a multiply-add per parameter
        plain = 2 * sum(parameter.numel() for parameter in source.parameters())
    return Costs(
        parameters=sum(model.get_parameter(name).numel() for name in learning(model, rung)),
        flops=added,
        flops_share=added / plain,
        live=stream.live / model.config.architecture.width,
        kept=stream.kept + sum(cost.kept for cost in locals_),
    )


class Switched(Blend):
    """A trained stream of which some sites can be switched off, and whose reads are held against the plain residual.

    Args:
        method: the trained stream.
    """

    name = "switched"

    def __init__(self, method: Stream) -> None:
        super().__init__(method)
        self.gate.requires_grad_(False)
        self.gate.fill_(1.0)
        self.departures: dict[int, float] = {}

    def _read(self, value: Both, site: Site) -> Seen:
        seen = super()._read(value, site)
        ways = [way for way in (seen.x, seen.q, seen.k, seen.v) if way is not None]
        scale = value.plain.norm().clamp_min(1e-30)
        self.departures[site.index] = max(((way - value.plain).norm() / scale).item() for way in ways)
        return seen


@contextlib.contextmanager
def switched(
    model: TwoAxisForCausalLM, rung: Rung, off: str | None, start: Mapping[str, Tensor]
) -> Iterator[Switched | None]:
    """The trained model with one group of sites switched off, or none; as it was when the block ends.

    Args:
        model: trained.
        rung: what is on it.
        off: name of the group; None switches nothing off.
        start: the learning parameters before the training.

    Yields:
        stream: that has the method's reads of the latest pass; None without a stream.
    """
    stream, blocks = model.stream, model.stream.layout.blocks
    saved = [(parameter, parameter.detach().clone()) for parameter in model.parameters() if parameter.requires_grad]
    made: Switched | None = None
    try:
        with torch.no_grad():
            if rung.stream != "standard":
                model.stream = made = Switched(stream)
                closed = [site.index for site in stream.layout.sites if group_of(site.block, blocks) == off]
                made.gate[closed] = 0.0
            for name, local in model.local_operators():
                if group_of(_block(name, blocks), blocks) == off:
                    local.neutral_()
            for name in start if rung.control else ():
                if group_of(_block(name, blocks), blocks) == off:
                    model.get_parameter(name).copy_(start[name])
        yield made
    finally:
        model.stream = stream
        with torch.no_grad():
            for parameter, value in saved:
                parameter.copy_(value)


def sizes(
    model: TwoAxisForCausalLM, rung: Rung, start: Mapping[str, Tensor], departures: Mapping[int, float]
) -> dict[str, float]:
    """How much the trained parameters do in each group of sites.

    For a stream: the mean over the group's sites of how far their reads depart from the plain residual, relative to
    it. For a mixer or the control: the root mean square of how far their parameters moved.

    Args:
        model: trained.
        rung: what is on it.
        start: the learning parameters before the training.
        departures: by index of the site; see `Switched`.
    """
    blocks = model.stream.layout.blocks
    found: dict[str, list[tuple[float, int]]] = {}
    if rung.stream != "standard":
        for site in model.stream.layout.sites:
            found.setdefault(group_of(site.block, blocks), []).append((departures[site.index], 1))
        return {name: _ratio(values) for name, values in found.items()}
    for name, before in start.items():
        change = (model.get_parameter(name).detach() - before).double()
        group = group_of(_block(name, blocks), blocks)
        found.setdefault(group, []).append((change.square().sum().item(), change.numel()))
    return {name: _ratio(values) ** 0.5 for name, values in found.items()}


def _ratio(values: list[tuple[float, int]]) -> float:
    return sum(value for value, _ in values) / sum(number for _, number in values)


def _block(name: str, blocks: int) -> int:
    """The block of a parameter that belongs to one; the final norm counts as the out site."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    return int(numbers[0]) if numbers else blocks
