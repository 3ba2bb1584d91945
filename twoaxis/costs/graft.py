"""How the graft of any family runs on meta tensors: the user's own model, experts and latent attention included.

    embedding ─► layer: norm ─► attention ─► norm ─► mlp ─► ... ─► norm ─► head          the family's own code
                  │ read      write ▲ │ read   write ▲                                   the stream's methods

What the stream's methods do is the stream's, what a norm does is a norm's, and whatever else a layer's code does
belongs to the sub-layer that ran last. Attention is one fused kernel, see `twoaxis.model.graft_from_scratch`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from twoaxis.base.meter import Meter
from twoaxis.costs.fuse import Part
from twoaxis.costs.trace import Kept, Recompute, Runner, longer
from twoaxis.model.graft_cache import RingLayer
from twoaxis.model.graft_layers import MixerSite, children_of, find_layers
from twoaxis.sequence.mixer import LocalOperator


class GraftRunner(Runner):
    """A graft of meta tensors."""

    def train(self, ids: Tensor, meter: Meter, recompute: Recompute) -> Tensor:
        """Logits of all tokens."""
        self.model.train()
        if recompute == "block":
            self.model.activation_checkpointing_enable()
        try:
            return self.model(input_ids=ids, use_cache=False).logits
        finally:
            self.model.activation_checkpointing_disable()

    def step(self, ids: Tensor, past: Any, meter: Meter) -> Any:
        """The next tokens, remembered; logits of the last one."""
        self.model.eval()
        cache = self.model.make_cache() if past is None else past
        self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def kept(self, past: Any) -> Kept:
        """Bytes of what is remembered."""
        found = self.model.cache_bytes(past)
        return Kept(found["backbone"], found["mixer"], found["stream"])

    def lengthened(self, past: Any, seen: int) -> Any:
        """The memory of a pass as `seen` tokens would have left it."""
        made = self.model.make_cache()
        layers: Any = zip(made.layers, past.layers, strict=False)
        for mine, theirs in layers:
            if isinstance(mine, RingLayer):
                mine.past = theirs.past.map(lambda ring: longer(ring, seen))._replace(seen=seen)
            elif getattr(theirs, "keys", None) is not None:
                shapes = [[*t.shape[:-2], seen, t.shape[-1]] for t in (theirs.keys, theirs.values)]
                mine.update(*(theirs.keys.new_empty(shape) for shape in shapes))
            else:
                raise ValueError(f"{type(theirs).__name__} keeps more than keys and values")
        return made

    @contextlib.contextmanager
    def following(self, meter: Meter) -> Iterator[None]:
        """Tell a meter which part of the model runs."""
        model, blocks = self.model, self.head.block
        undo = contextlib.ExitStack()

        def entering(module: nn.Module, part: Part) -> None:
            undo.callback(module.register_forward_pre_hook(lambda *_: setattr(meter, "part", part)).remove)
            if isinstance(module, LocalOperator):  # with its memory it is called by another name than modules are
                replace(module, "step", _inside(module.step, part, meter))

        def replace(owner: Any, name: str, made: Callable[..., Any]) -> None:
            owner.__dict__[name] = made
            undo.callback(owner.__dict__.pop, name, None)

        base = model.backbone.base_model
        entering(model.backbone, Part("embedding"))
        head = model.backbone.get_output_embeddings()
        entering(head, self.head)
        for module in (m for _, m in base.named_children() if m is not head):
            if "norm" in type(module).__name__.lower():
                entering(module, Part("norm", blocks, model.stream.layout.out.index))
        for number, layer in enumerate(find_layers(model.backbone)):
            self._follow_layer(layer, number, entering)
        for name in ("open", "read", "write", "rescale", "memory"):
            replace(model.stream, name, _watched(model.stream, name, meter))
        meter.part = Part("embedding")
        with undo:
            yield

    def _follow_layer(self, layer: nn.Module, number: int, entering: Callable[[nn.Module, Part], None]) -> None:
        """The parts of a layer: a child's work leads to the first site of its kind, or to the block's first."""
        sites = self.model.stream.sites_of(number)
        entering(layer, Part("norm", number, sites[0].index))
        mine: Any = layer._modules.get("twoaxis_mixer")
        if isinstance(mine, MixerSite):
            entering(mine.norm, Part("norm", number, sites[0].index))
            entering(mine.local, Part("mixer", number, sites[0].index))
        child: Any
        for _, child in children_of(layer):
            kind = child.joint.kind
            own = [site for site in sites if site.kind in (kind, "parallel")] or list(sites[-1:])
            part = Part("norm" if kind == "norm" else own[0].kind, number, own[0].index)
            entering(child, part)
            for name in child.joint.projections:
                entering(child.get_submodule(name), part)  # run before the child where something acts on their results
            for operator in (m for m in child.modules() if isinstance(m, LocalOperator)):
                entering(operator, part)


def _watched(stream: Any, name: str, meter: Meter) -> Callable[..., Any]:
    """A method of a stream during which the stream runs; what a sub-layer hands to `write` is its own from then on."""
    method = getattr(stream, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        before = meter.part
        site = args[1] if name in ("read", "write") else None
        block, index = (-1, 0) if site is None else (site.block, site.index + (name == "write"))
        meter.part = Part("stream", block, index)
        if name == "write":
            meter.hand_over([args[2]], meter.part)
        try:
            return method(*args, **kwargs)
        finally:
            meter.part = before

    return run


def _inside(method: Callable[..., Any], part: Part, meter: Meter) -> Callable[..., Any]:
    """A method during which a part runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        meter.part = part
        return method(*args, **kwargs)

    return run
