"""The rungs of a probe: what is put on a frozen model, what of it learns, and how a group of sites is switched off.

    rung      what a read may choose                                method
    control   nothing: the pre-norms' scales learn                  the source itself
    scalar    one number per earlier block                          denseformer
    channel   one number per earlier block and channel              deep_cross_attention, second version
    token     one number per group of sub-layers, for each token    attention_residuals
    window    attention over the last four sub-layers               depth_attention, thin
    multiway  numbers for each token, for q, k, v and the residual  muddformer
    conv      the last four tokens, by fixed taps                   short_conv
    swa       the last sixteen tokens, by attention                 short_swa, thin

All of them start as the source. The control is there because a model gains on a text by adapting to it, whatever
learns: what the scales of its norms gain on the same text in the same steps is not the stream's merit.

A group of sites is switched off after the training: in a `Switched` stream its sites see the plain residual, the
embedding and all increments, while everybody goes on writing to the method. A mixer's operators of the group are made
neutral, and the control's scales are put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.base.files import short_hash
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

THIRDS = {1: ("all",), 2: ("early", "late"), 3: ("early", "middle", "late")}
"""Groups of sites by how many there are: thirds of the blocks, the out site with the last ones."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A method, or the control, on a frozen model."""

    name: str
    """What tables call it."""
    what: str
    """What a read may choose, in words."""
    stream: str = "standard"
    """NAME[:option=value,...]"""
    mixer: str | None = None
    """The same, of a mixer."""
    rate: float = 0.001
    """Learning rate."""

    @property
    def control(self) -> bool:
        """Whether the norms' scales learn, because there is no method."""
        return self.stream == "standard" and self.mixer is None

    @property
    def method(self) -> str:
        """Its spelling."""
        if self.control:
            return "norm scales"
        parts = [] if self.stream == "standard" else [self.stream]
        return " + ".join([*parts, *([] if self.mixer is None else [self.mixer])])

    @property
    def key(self) -> str:
        """Stands for everything that can change a number; the names are not part of it."""
        return short_hash({"stream": self.stream, "mixer": self.mixer, "rate": self.rate})

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


CONTROL = Rung(name="control", what="nothing: the pre-norms' scales learn", rate=0.003)
LADDER = (
    Rung(name="scalar", what="one number per earlier block", stream="denseformer", rate=0.0003),
    Rung(
        name="channel",
        what="one number per earlier block and channel",
        stream="deep_cross_attention:version=2,ways=single",
        rate=0.003,
    ),
    Rung(
        name="token",
        what="one number per four sub-layers, for each token",
        stream="attention_residuals:block_size=4",
        rate=0.0001,
    ),
    Rung(
        name="window",
        what="attention over the last four sub-layers",
        stream="depth_attention:heads=3,head_width=16",
        rate=0.00003,
    ),
    Rung(
        name="multiway", what="numbers for each token, for q, k, v and the residual", stream="muddformer", rate=0.00003
    ),
    Rung(name="conv", what="the last four tokens, by fixed taps", mixer="short_conv", rate=0.003),
    Rung(name="swa", what="the last sixteen tokens, by attention", mixer="short_swa:heads=3,head_width=16", rate=0.001),
)
"""The default rungs.

Their rates are such that one first step of Adam, which moves every number by the rate, costs SmolLM2 at most 0.02 nats
per token on text that the step has not seen. Numbers that act in sums, as those of a matrix that every site shares,
need smaller ones: the projections of `window` wreck a model of 30 blocks in one step of 0.0003.
"""


def own_rate(stream: str, mixer: str | None) -> float | None:
    """The learning rate that the ladder has for a method, whatever its options; None if it is not on the ladder."""
    method = read_method(stream, mixer)
    for rung in (CONTROL, *LADDER):
        known = read_method(rung.stream, rung.mixer)
        if (known.stream, known.mixer) == (method.stream, method.mixer):
            return rung.rate
    return None


class Costs(NamedTuple):
    """What a rung adds to the source, by the formulas.

    Attributes:
        parameters: that learn here. The control's are the source's own: it adds none.
        flops: per token and forward pass.
        flops_share: the same divided by the source's.
        live: numbers per token alive across sites at their most, in widths; the plain residual has 1.
        kept: numbers per sequence kept between tokens when decoding.
    """

    parameters: int
    flops: int
    flops_share: float
    live: float
    kept: int


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


def group_names(blocks: int) -> tuple[str, ...]:
    """The groups of sites of a model with so many blocks."""
    return THIRDS[min(3, blocks)]


def group_of(block: int, blocks: int) -> str:
    """The group of a block; the out site is block `blocks` and belongs to the last group."""
    names = group_names(blocks)
    return names[min(block, blocks - 1) * len(names) // blocks]


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
    stream, blocks = trunk.stream, trunk.config.blocks
    saved: list[tuple[nn.Parameter, Tensor]] = []
    made: Switched | None = None

    def lose(parameter: nn.Parameter) -> None:
        saved.append((parameter, parameter.detach().clone()))

    try:
        if rung.stream != "standard":
            made = Switched(stream)
            for site in stream.layout.sites:
                if off is not None and group_of(site.block, blocks) == off:
                    made.gate[site.index] = 0.0
            trunk.stream = made
        with torch.no_grad():
            for name, local in locals_of(trunk):
                if off is not None and group_of(int(name.split(".")[1]), blocks) == off:
                    for parameter in local.parameters():
                        lose(parameter)
                    local.neutral_()
            for name in start if rung.control else ():
                if off is not None and group_of(_block(name, blocks), blocks) == off:
                    lose(model.get_parameter(name))
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
    blocks = trunk.config.blocks
    found: dict[str, list[float]] = {name: [] for name in group_names(blocks)}
    if rung.stream != "standard":
        for site in trunk.stream.layout.sites:
            found[group_of(site.block, blocks)].append(departures[site.index])
        return {name: sum(values) / len(values) for name, values in found.items() if values}
    moved: dict[str, tuple[float, int]] = {}
    for name, before in start.items():
        group = group_of(_block(name, blocks), blocks)
        squares, numbers = moved.get(group, (0.0, 0))
        change = (model.get_parameter(name).detach() - before).double()
        moved[group] = squares + change.square().sum().item(), numbers + change.numel()
    return {name: (squares / numbers) ** 0.5 for name, (squares, numbers) in moved.items()}


def _block(name: str, blocks: int) -> int:
    """The block of a parameter that belongs to one; the final norm counts as the out site."""
    part = name.removeprefix(TRUNK).split(".")[1]
    return int(part) if part.isdigit() else blocks
