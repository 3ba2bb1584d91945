"""What a method adds inside a layer of someone else's, or takes over: mixers, norms of separate ways and reads."""

from __future__ import annotations

import copy
import inspect
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel

from twoaxis.depth.site import OUT
from twoaxis.depth.stream import Stream
from twoaxis.model import graft_layers
from twoaxis.model.config import Methods
from twoaxis.model.graft_residual import Refused
from twoaxis.model.graft_survey import PROJECTIONS, Architecture, Branch
from twoaxis.model.sublayers import POINTS


def family_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The family's model: of the class that its configuration names, as for text with images, or the causal LM."""
    named: Any = getattr(transformers, (config.architectures or [""])[0], None)
    generates = inspect.isclass(named) and issubclass(named, GenerationMixin)
    if generates and cast(Any, named).config_class is type(config):
        return cast(Any, named)._from_config(config)
    return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))


def furnish(layer: nn.Module, block: int, found: Architecture, methods: Methods, stream: Stream, eps: float) -> None:
    """Put mixers and further norms into a layer, or say by name why they have no place there."""
    form, width, where = found.forms[block], found.width, type(layer).__name__
    made = methods.make_mixer() if methods.has_mixer(block) else None
    for point in () if made is None else made.points:
        assert made is not None
        if point == "site":
            own = eps if stream.normed(stream.sites_of(block)[0]) else None
            layer.twoaxis_mixer = graft_layers.MixerSite(f"{block}", made.build(point, width), width, own)
            continue
        host, place = POINTS[point]
        kind = "mlp" if host == "mlp" else "attention"
        branch = _branch(form, kind, where, f"the mixer's point {point!r}")
        channels = _project(layer, branch, kind, where, point) if place == "inside" else width
        sublayer = layer.get_submodule(branch.child)
        sublayer.add_module(f"twoaxis_{place}", made.build(point, width, channels))
        _wrap(layer, branch)
    for site in stream.sites_of(block):
        if "k" in (ways := stream.ways(site)):
            branch = _branch(form, "attention", where, f"{methods.stream}'s separate ways")
            _project(layer, branch, "ways", where, f"{methods.stream}'s separate ways")
            _wrap(layer, branch)
            _copy_norm(layer, branch, ways[1:])
        if stream.changes_kv(site):
            _wrap(layer, _branch(form, "attention", where, f"the keys and values that {methods.stream} changes"))


def take_norms(backbone: nn.Module, layers: nn.ModuleList, found: Architecture, stream: Stream, eps: float) -> Any:
    """Put identities in the place of the norms behind reads that the stream normalises itself."""
    scales: dict[int, Tensor] = {}
    taken: list[tuple[Any, str, nn.Module]] = []  # replaced at the end, so that a refusal leaves all of them
    for site in stream.layout.sites:
        if stream.normed(site) or site.kind == "mixer":
            continue
        parent: Any = backbone if site.kind == OUT else layers[site.block]
        where = f"{stream.name} normalises what {type(parent).__name__} reads"
        readers: tuple[str, ...] = (found.final,)
        if site.kind != OUT:
            own = [s for s in stream.sites_of(site.block) if s.kind != "mixer"]
            readers = found.forms[site.block].readers[own.index(site)]
        if len(readers) != 1 or not readers[0]:
            given = ", ".join(name or "something that is no norm" for name in readers) or "no norm"
            raise Refused(f"{where} at its {site.kind} site, where it has {given} and not one norm to take over")
        norm: Any = parent.get_submodule(readers[0])
        if (parameter := next(norm.parameters(), None)) is None or not parameter.is_meta:
            if (scale := _scale(norm, found.width, eps)) is None:
                raise Refused(
                    f"{where}, and {readers[0]} is no RMSNorm with an epsilon of {eps:g} that it could take over"
                )
            scales[site.index] = scale
        blank = nn.Identity()
        if site.kind != OUT:
            graft_layers.become(blank, graft_layers.GraftedChild, norm.joint)
        taken.append((parent, readers[0], blank))
    for parent, name, blank in taken:
        parent.set_submodule(name, blank)
    return scales


@torch.no_grad()
def _scale(norm: nn.Module, width: int, eps: float) -> Tensor | None:
    """w of a norm that computes x / sqrt(mean(x²) + eps) * w, in whatever way it is stored; None if it does not."""
    plain = copy.deepcopy(norm).float()
    weight = next((p.detach() for p in norm.parameters() if p.shape == (width,)), None)
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    x = x.to(next((p.device for p in norm.parameters()), x.device))
    x = x * x.new_tensor([[1.0], [30.0], [eps**0.5]])  # the last one tells epsilons apart
    expected, found = F.rms_norm(x, (width,), eps=eps), plain(x)
    for scale in (torch.ones_like(x[0]),) if weight is None else (weight, 1.0 + weight):
        if torch.allclose(found, expected * scale.float(), rtol=1e-4, atol=1e-6):
            return scale.clone()
    return None


def _project(layer: nn.Module, branch: Branch, kind: str, where: str, what: str) -> int:
    """Note which projections of a sub-layer are acted on, and how many channels they have."""
    sublayer = layer.get_submodule(branch.child)
    projections: dict[str, Any] = {name: sublayer.get_submodule(name) for name in branch.projections}
    found: dict[str, Any] = {
        n: getattr(m, "out_features", None) or m.nf for n, m in projections.items()
    }  # GPT-2 has nf
    if kind == "mlp":
        inner = {getattr(m, "in_features", None) for n, m in sublayer.named_children() if n not in found}
        found = {n: c for n, c in found.items() if c in inner or c / 2 in inner or not inner - {None}}
    else:
        by_way = [[n for n in found if pattern.search(n)] for pattern in PROJECTIONS]
        if all(len(names) == 1 for names in by_way):
            found = {n: found[n] for (n,) in by_way}
        elif kind == "ways" or len(found) != 1:
            found = {}
    if not found:
        shape = "fused or latent" if kind != "mlp" else "inside experts"
        raise Refused(f"{where}: {branch.child} has no projections of its own for {what}: they are {shape}")
    cast(Any, sublayer).joint.projections = tuple(found)
    return sum(found.values())


def _wrap(layer: nn.Module, branch: Branch) -> None:
    if branch.norm:
        cast(Any, layer.get_submodule(branch.norm)).joint.wraps = True


def _copy_norm(layer: nn.Module, branch: Branch, ways: tuple[str, ...]) -> None:
    """One copy more of the attention's pre-norm for every way but the first; none where there is no pre-norm."""
    if not branch.norm:
        return
    norm = layer.get_submodule(branch.norm)
    for way in ways:
        plain = copy.deepcopy(norm)
        plain.__class__ = graft_layers.original_class(norm)
        del plain.joint
        for name in [n for n in plain._modules if n.startswith("twoaxis_")]:
            del plain._modules[name]
        norm.add_module(f"twoaxis_norm_{way}", plain)


def _branch(form: Any, kind: str, where: str, what: str) -> Branch:
    branch: Branch | None = getattr(form, kind)
    if branch is None:
        raise Refused(f"{where} has no {kind} module of its own for {what}")
    if branch.norm is None:
        raise Refused(f"{where}: something stands between the norm and {branch.child}, so {what} cannot be there")
    return branch


@torch.no_grad()
def narrow_new_(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Bring new parameters to the model's dtype and device; what a stream wants in float32 stays at least that."""
    wide = {name for group in model.stream.parameter_groups() if group.float32 for name in group.names}
    for name, parameter in model.stream.named_parameters():
        target = torch.promote_types(dtype, torch.float32) if name in wide else dtype
        parameter.data = parameter.data.to(device, target)
    for _, local in model.local_operators():
        local.to(device, dtype)
    for module in model.modules():
        if isinstance(module, graft_layers.MixerSite):
            module.norm.to(device, dtype)


def check_attention(backbone: Any, wanted: Any, now: bool = True) -> None:
    """Refuse an attention function that the family would ignore, or that would be fetched from a hub."""
    for name in wanted.values() if isinstance(wanted, dict) else (wanted,):
        if name is None or name == "eager":
            continue
        if "/" in name:
            raise ValueError(f"attn_implementation={name!r} would fetch code from a hub, which is never done here")
        if name != "sdpa" and not (backbone._supports_attention_backend or backbone._can_set_attn_implementation()):
            raise ValueError(f"attn_implementation={name!r} is ignored by {type(backbone).__name__}; leave it out")
        if now and backbone.config._attn_implementation != name:
            got = backbone.config._attn_implementation
            raise ValueError(f"{type(backbone).__name__} does not take attn_implementation={name!r}; it has {got!r}")
