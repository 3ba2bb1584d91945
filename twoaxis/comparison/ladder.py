"""A rung on a frozen model: what of it learns, what it costs, and how a group of sites is switched off.

A group of sites is switched off after the training: in a `Switched` stream its sites see the plain residual, the
embedding and all increments, while everybody goes on writing to the method. A mixer's operators of the group are made
neutral, and the control's scales are put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twoaxis.comparison.probe_plan import Costs, Rung, group_of
from twoaxis.depth.blend import Blend, Both
from twoaxis.depth.counts import count
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Seen, Stream
from twoaxis.model.flops import forward_flops
from twoaxis.model.hf_model import TwoAxisForCausalLM
from twoaxis.pretrained.build import build, new_names
from twoaxis.pretrained.families import TRUNK
from twoaxis.pretrained.start import choose, is_norm, locals_of, read_method

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def make_model(config: PreTrainedConfig, tensors: Mapping[str, Tensor], rung: Rung, seed: int) -> TwoAxisForCausalLM:
    """The source with a rung on it, of which only the rung's parameters get gradients. The tensors are shared.

    Args:
        config: the source's.
        tensors: its parameters by our names; see `families.state`.
        rung: what is put on it.
        seed: of the new parameters that start at random.
    """
    start = choose(config, read_method(rung.stream, rung.mixer))
    dtype = tensors["model.embed_tokens.weight"].dtype
    own = {name: t.clone() if _is_control(name) else t for name, t in tensors.items()}  # the control moves them
    model = build(start.config, own.items(), dtype=dtype, seed=seed)
    chosen = set(learning(model, rung))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return model


def _is_control(name: str) -> bool:
    """Whether the control trains a parameter: the pre-norms and the final norm."""
    return is_norm(name) or name.startswith(f"{TRUNK}final_norm.")


def learning(model: TwoAxisForCausalLM, rung: Rung) -> list[str]:
    """Names of the parameters that learn."""
    if rung.control:
        return [name for name, _ in model.named_parameters() if _is_control(name)]
    names = new_names(model)
    if not names:
        raise ValueError(f"{rung.method} adds no parameters to this model: there is nothing to train")
    return names


def costs(config: PreTrainedConfig, rung: Rung, context: int) -> Costs:
    """What a rung adds; nothing is allocated."""
    ours = choose(config, read_method(rung.stream, rung.mixer)).config
    plain = choose(config, read_method("standard")).config
    with torch.device("meta"):
        model = TwoAxisForCausalLM(ours)
    of_rung, of_plain = forward_flops(ours, context).total, forward_flops(plain, context).total
    stream = count(model.model.trunk.stream)
    kept = stream.kept + sum(local.cost().kept for _, local in locals_of(model.model.trunk))
    return Costs(
        parameters=sum(model.get_parameter(name).numel() for name in learning(model, rung)),
        flops=of_rung - of_plain,
        flops_share=(of_rung - of_plain) / of_plain,
        live=stream.live / ours.hidden_size,
        kept=kept,
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
    trunk = model.model.trunk
    stream, blocks = trunk.stream, trunk.config.num_hidden_layers
    saved = [(parameter, parameter.detach().clone()) for parameter in model.parameters() if parameter.requires_grad]
    made: Switched | None = None
    try:
        with torch.no_grad():
            if rung.stream != "standard":
                trunk.stream = made = Switched(stream)
                closed = [site.index for site in stream.layout.sites if group_of(site.block, blocks) == off]
                made.gate[closed] = 0.0
            for name, local in locals_of(trunk):
                if group_of(int(name.split(".")[1]), blocks) == off:
                    local.neutral_()
            for name in start if rung.control else ():
                if group_of(_block(name, blocks), blocks) == off:
                    model.get_parameter(name).copy_(start[name])
        yield made
    finally:
        trunk.stream = stream
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
    trunk = model.model.trunk
    blocks = trunk.config.num_hidden_layers
    found: dict[str, list[tuple[float, int]]] = {}
    if rung.stream != "standard":
        for site in trunk.stream.layout.sites:
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
    part = name.removeprefix(TRUNK).split(".")[1]
    return int(part) if part.isdigit() else blocks
