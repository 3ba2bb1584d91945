"""How the graft of any family runs on meta tensors: the user's own model, experts and latent attention included.

    embedding ─► layer: norm ─► attention ─► norm ─► mlp ─► ... ─► norm ─► head          the family's own code
                  │ read      write ▲ │ read   write ▲                                   the stream's methods

Whatever a layer's own code does belongs to the norm or the sub-layer that began last. Attention is one fused kernel,
see `twoaxis.model.graft_from_scratch`.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    def places(self) -> Iterator[tuple[nn.Module, Part]]:
        """Modules with the part that begins where they run."""
        model, out = self.model, self.model.stream.layout.out
        head = model.backbone.get_output_embeddings()
        yield model.backbone, Part("embedding")
        yield head, self.head
        for module in (m for _, m in model.backbone.base_model.named_children() if m is not head):
            if "norm" in type(module).__name__.lower():
                yield module, Part("norm", out.block, out.index)
        for number, layer in enumerate(find_layers(model.backbone)):
            yield from self._of_layer(layer, number)

    def _of_layer(self, layer: nn.Module, number: int) -> Iterator[tuple[nn.Module, Part]]:
        """Those of a layer: a child's work leads to the first site of its kind, or to the block's first."""
        sites = self.model.stream.sites_of(number)
        yield layer, Part("norm", number, sites[0].index)
        mine: Any = layer._modules.get("twoaxis_mixer")
        if isinstance(mine, MixerSite):
            yield mine.norm, Part("norm", number, sites[0].index)
            yield mine.local, Part("mixer", number, sites[0].index)
        child: Any
        for _, child in children_of(layer):
            kind = child.joint.kind
            own = [site for site in sites if site.kind in (kind, "parallel")] or list(sites[-1:])
            part = Part("norm" if kind == "norm" else own[0].kind, number, own[0].index)
            yield child, part
            for name in child.joint.projections:
                yield child.get_submodule(name), part  # run before the child where something acts on their results
            for operator in (m for m in child.modules() if isinstance(m, LocalOperator)):
                yield operator, part
