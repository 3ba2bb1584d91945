"""Pipelines: devices share the depth of a `Decoder`, by torch's schedules; boundaries carry the packed state.

    tokens ─► stage 0 ── pack ──► stage 1 ── pack ──► stage 2 ─► logits, loss           P stages, V chunks on each
                      ◄─ gradients             ◄─ gradients

With several chunks on a device (`virtual`), a boundary carries only what its receiver has not got yet. A chunk *lends*
the tensors it received or made to later chunks of its device, which *borrow* them: the gradient of a borrowed tensor
goes into a drawer, and the lender's backward pass, which comes later, adds the drawer to its own.

    device 0    chunk 0 ── lend a ─────────────► chunk 2 borrows a
                   └─ a ─► chunk 1 ── b ─────────► └ receives b alone

Every stage holds the whole stream, whose parameters all stages use, and a tied embedding stands at both ends:
`add_shared` adds their gradients after a step. Whoever clips counts them once: see `counted`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS
from torch.distributed.tensor import DTensor

from twoaxis.depth.stream import Stream
from twoaxis.kernels.precision import widen
from twoaxis.model.decoder import Block, Decoder
from twoaxis.model.stages import Boundary, boundaries, plan
from twoaxis.parallel.shard import make_policy, prepare_blocks

Schedule = Literal["gpipe", "1f1b", "interleaved"]
ContextMaker = Callable[[], contextlib.AbstractContextManager[Any]]
Loss = Callable[[Tensor, Tensor], Tensor]
"""Function of the logits and the labels of a micro-batch."""
Drawer = list[Tensor]
"""Gradients that wait for the chunk that lent their tensor."""
Shelf = dict[int, tuple[Tensor, Drawer]]
"""Tensors of one micro-batch that a device keeps for its later chunks, by their numbers in the plan."""


class _Lend(torch.autograd.Function):
    """Identity; its backward pass adds what later chunks of this device left in the drawer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, drawer: Drawer) -> Tensor:
        ctx.drawer = drawer
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        for left in ctx.drawer:
            grad = left if grad is None else grad + left
        ctx.drawer.clear()
        return grad, None


class _Borrow(torch.autograd.Function):
    """A kept tensor, whose gradient goes into the drawer; the anchor only makes it part of the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: Tensor, drawer: Drawer) -> Tensor:
        ctx.drawer = drawer
        return kept.view_as(kept)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.drawer.append(grads[0])
        return None, None, None


class _Tie(torch.autograd.Function):
    """Identity of the first tensor; the backward passes of the others run after it, also where nothing here read them.

    Without it a tensor that a chunk only lends on has no way back, and what waits in its drawer would be lost.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, *lent: Tensor) -> Tensor:
        ctx.others = len(lent)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], *[None] * ctx.others


class Stage(nn.Module):
    """Blocks `first` to `last` of a decoder, with the embedding or the head where they are the first or the last.

    Args:
        decoder: whose blocks; parts of it that the stage does not need are left out, and the names of the others stay.
        first, last: blocks, the last not included.
        came, goes: the boundaries before and after it; None at the ends.
        shelves: what the chunks of this device keep, by the number of the micro-batch; None keeps nothing.
        final: whether no later chunk of this device needs the shelf.
        micro_batches: of a batch.
        context_manager: that forward passes run in, such as autocast.

    Attributes:
        sent: bytes per token that the last pass handed on.
    """

    def __init__(
        self,
        decoder: Decoder,
        first: int,
        last: int,
        came: Boundary | None,
        goes: Boundary | None,
        shelves: dict[int, Shelf] | None,
        final: bool,
        micro_batches: int,
        context_manager: ContextMaker = contextlib.nullcontext,
    ) -> None:
        super().__init__()
        self.context_manager = context_manager
        self.decoder = prune(decoder, first, last)
        self.first, self.last, self.came, self.goes = first, last, came, goes
        self.shelves, self.final, self.micro_batches = shelves, final, micro_batches
        self.passes = self.sent = 0

    def forward(self, *tensors: Tensor, reach: Tensor | None = None) -> Any:
        """The packed state after its blocks; of the last stage, the logits.

        Args:
            *tensors: the tokens, or what the boundary before it carries.
            reach: see `Decoder.forward`.
        """
        with self.context_manager():
            return self._forward(tensors, reach)

    def _forward(self, tensors: tuple[Tensor, ...], reach: Tensor | None) -> Any:
        decoder, stream = self.decoder, self.decoder.stream
        number = self.passes % self.micro_batches
        self.passes += 1
        shelf: Shelf = {} if self.shelves is None else self.shelves.setdefault(number, {})
        have: dict[int, Tensor] = {}
        if self.came is None:
            x = decoder.embed(tensors[0])
            state, shape, dtype = stream.open(x, reach=reach), x.shape, x.dtype
        else:
            have = self._received(tensors, shelf)
            packed = [have[n] for n in self.came.tensors]
            state = stream.unpack(packed, stream.sites_of(self.first)[0], reach=reach)
            shape, dtype = tensors[0].shape, tensors[0].dtype
        info = decoder.info(tensors[0], 0, reach, dtype)
        for number_of_block in range(self.first, self.last):
            state, _ = cast(Block, decoder.layers[number_of_block])(stream, state, None, info)
        if self.goes is None:
            out = [decoder.logits(decoder.norm(stream.close(state)))]
        else:
            packed = dict(zip(self.goes.tensors, stream.pack(state), strict=True))
            out = [self._handed_on(n, packed[n], have, shelf).contiguous() for n in self.goes.sent]
            self.sent = sum(t.numel() * t.element_size() for t in out) // (shape[0] * shape[1])
        if self.final and self.shelves is not None:
            self.shelves.pop(number, None)
        if have:
            out[0] = cast(Tensor, _Tie.apply(out[0], *have.values()))
        return out[0] if self.goes is None else tuple(out)

    def _received(self, tensors: Sequence[Tensor], shelf: Shelf) -> dict[int, Tensor]:
        """The packed state by number: what has come, and what an earlier chunk of this device keeps."""
        assert self.came is not None
        have: dict[int, Tensor] = {}
        for n, tensor in zip(self.came.sent, tensors, strict=True):
            shelf[n] = tensor.detach(), []
            have[n] = cast(Tensor, _Lend.apply(tensor, shelf[n][1]))
        for n in self.came.tensors:
            if n not in have:
                have[n] = cast(Tensor, _Borrow.apply(tensors[0], *shelf[n]))
        return have

    def _handed_on(self, n: int, tensor: Tensor, have: dict[int, Tensor], shelf: Shelf) -> Tensor:
        """A tensor for the next stage; one that was made here is lent to later chunks too."""
        if self.shelves is None or n in have:
            return tensor
        drawer: Drawer = []
        lent = cast(Tensor, _Lend.apply(tensor, drawer))
        shelf[n] = lent.detach(), drawer
        return lent


def prune(decoder: Decoder, first: int, last: int) -> Decoder:
    """A decoder without the blocks before `first` and from `last` on; the other modules are the same, names too."""
    whole = decoder.config.num_hidden_layers
    made = copy.copy(decoder)
    made._modules = dict(decoder._modules)
    made.layers = nn.ModuleList(
        block if first <= number < last else nn.Module() for number, block in enumerate(decoder.layers)
    )
    if last < whole:
        made.norm, made.lm_head = nn.Identity(), None
    if first and not (last == whole and decoder.lm_head is None):
        made.embed_tokens = cast(Any, None)
    return made


class Pipeline:
    """The stages of this process and the schedule that runs them.

    Args:
        model: a `Decoder`, on its device or on the meta device. Its modules become those of the stages.
        schedule: gpipe (all forward passes, then all backward passes), 1f1b, or interleaved for several chunks.
        stages: devices that share the depth.
        virtual: chunks of blocks on each device.
        micro_batches: that a batch is cut into.
        group: the processes of this pipeline, in the order of the stages; None is all of them.
        loss: of a micro-batch.
        rows, context: of a micro-batch.
        increments: dtype of what sub-layers write; None is that of the parameters.
        cached: whether a boundary leaves out what its receiver has.
        recompute, compile: see `shard`.
        shard: called with each stage, before the schedule is made.
        context_manager: that forward passes run in, such as autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        schedule: Schedule,
        stages: int,
        virtual: int = 1,
        micro_batches: int,
        loss: Loss,
        rows: int,
        context: int,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        increments: torch.dtype | None = None,
        cached: bool = True,
        recompute: int = 0,
        compile: bool = False,
        shard: Callable[[Stage], Any] = lambda stage: None,
        context_manager: ContextMaker = contextlib.nullcontext,
    ) -> None:
        if not isinstance(model, Decoder):
            raise ValueError(
                f"{type(model).__name__} cannot be cut into a pipeline: its layers run in its family's own loop. "
                "Pipelines are for Decoder; use fsdp and tp for grafts"
            )
        check_pipeline(schedule, model.config.num_hidden_layers, stages, virtual, micro_batches)
        self.group, self.rank, self.count = group, dist.get_rank(group), stages
        if dist.get_world_size(group) != stages:
            raise ValueError(
                f"a pipeline of {stages} stages needs {stages} processes, not {dist.get_world_size(group)}"
            )
        self.device = next(model.parameters()).device if device is None else device
        chunks, per = stages * virtual, model.config.num_hidden_layers // (stages * virtual)
        meta = _on_meta(model)
        layout = plan(meta, stages, virtual if cached else 1) if virtual == 1 or cached else plan(meta, chunks)
        packed = boundaries(meta, increments)
        shelves: dict[int, Shelf] | None = {} if cached and virtual > 1 else None

        def example(chunk: int) -> tuple[Tensor, ...]:
            """What crosses the boundary before a chunk, without content."""
            if chunk in (0, chunks):
                tokens = torch.empty(rows, context, dtype=torch.long, device="meta")
                logits = torch.empty(
                    rows, context, model.config.vocab_size, device="meta", dtype=_logits_dtype(model, increments)
                )
                return (tokens if chunk == 0 else logits.requires_grad_(),)
            boundary = layout.boundaries[chunk - 1]
            by_number = dict(zip(boundary.tensors, packed[boundary.block], strict=True))
            return tuple(
                torch.empty(
                    rows, context, *by_number[n].shape[2:], dtype=by_number[n].dtype, device="meta"
                ).requires_grad_()
                for n in boundary.sent
            )

        self.stages: list[Stage] = []
        made = []
        for chunk in range(self.rank, chunks, stages):
            came = layout.boundaries[chunk - 1] if chunk else None
            goes = layout.boundaries[chunk] if chunk < chunks - 1 else None
            first = chunk * per
            stage = Stage(
                model, first, first + per, came, goes, shelves, chunk + stages >= chunks, micro_batches, context_manager
            )
            prepare_blocks(list(stage.decoder.layers)[first : first + per], recompute=recompute, compile=compile)
            shard(stage)
            self.stages.append(stage)
            made.append(
                PipelineStage(
                    stage,
                    chunk,
                    chunks,
                    self.device,
                    input_args=example(chunk),
                    output_args=example(chunk + 1),
                    group=group,
                )
            )
        self.first, self.last = self.rank == 0, self.rank == (chunks - 1) % stages
        several = ScheduleInterleaved1F1B if schedule == "interleaved" else ScheduleLoopedBFS
        single = Schedule1F1B if schedule == "1f1b" else ScheduleGPipe
        options: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": loss, "scale_grads": False}
        self.schedule: Any = several(made, **options) if virtual > 1 else single(made[0], **options)
        self.tied = model.lm_head is None

    def step(self, tokens: Tensor, labels: Tensor, reach: Tensor | None = None) -> Tensor | None:
        """Add the gradients of a batch to the parameters'; its summed loss in the process of the last stage.

        After the last batch of a step `add_shared` completes them.
        """
        losses: list[Tensor] = []
        wanted = {"target": labels, "losses": losses} if self.last else {}
        more = {} if reach is None else {"reach": reach}
        self.schedule.step(*((tokens,) if self.first else ()), **wanted, **more)
        return torch.stack(losses).sum().detach() if losses else None

    @torch.no_grad()
    def logits(self, tokens: Tensor, reach: Tensor | None = None) -> Tensor | None:
        """The logits of a batch, in the process of the last stage."""
        more = {} if reach is None else {"reach": reach}
        # without losses: the schedule runs forward passes alone
        loss, self.schedule._loss_fn = self.schedule._loss_fn, None
        try:
            return self.schedule.eval(*((tokens,) if self.first else ()), **more)
        finally:
            self.schedule._loss_fn = loss

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this process by the decoder's names, each once."""
        seen: set[int] = set()
        for stage in self.stages:
            for name, parameter in stage.decoder.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    @property
    def stream(self) -> Stream:
        """Which every stage holds."""
        return self.stages[0].decoder.stream

    def counted(self, name: str) -> bool:
        """Whether this process is the one that counts a parameter: several have the stream's and a tied embedding."""
        if name.startswith("stream."):
            return self.first
        return self.first or not (self.tied and name.startswith("embed_tokens."))

    def add_data(self, mesh: DeviceMesh) -> None:
        """Average the stream's gradients over the pipelines of a mesh, as sharding does with all others."""
        for parameter in self.stream.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=mesh.get_group())
                parameter.grad /= mesh.size()

    def add_shared(self) -> None:
        """Add the gradients of parameters that several stages have."""
        shared = list(self.stream.parameters())
        if shared:
            # one exchange; a last number says in how many processes a parameter has a gradient at all
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in shared]
            there = torch.tensor([float(p.grad is not None) for p in shared], device=self.device)
            flat = torch.cat([there, *(widen(part).flatten() for part in parts)])
            dist.all_reduce(flat, group=self.group)
            there, *sums = flat.split([len(shared), *(p.numel() for p in shared)])
            for parameter, count, total in zip(shared, there.tolist(), sums, strict=True):
                parameter.grad = total.view_as(parameter).to(parameter.dtype) if count else None
        if self.tied and (self.first or self.last):
            weight = self.stages[0 if self.first else -1].decoder.embed_tokens.weight
            assert weight.grad is not None
            mine = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
            theirs = torch.empty_like(mine)
            other = self.count - 1 if self.first else 0
            exchange = [
                dist.P2POp(dist.isend, mine.contiguous(), group=self.group, group_peer=other),
                dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=other),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            mine.add_(theirs)


def shard_stage(stage: Stage, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Shard a stage, a unit per block. The stream stays whole: stages of several devices add its gradients."""
    policy = make_policy(dtype)
    for block in list(stage.decoder.layers)[stage.first : stage.last]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    stream = set(stage.decoder.stream.parameters())
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=stream)


def check_pipeline(schedule: Schedule, blocks: int, stages: int, virtual: int, micro_batches: int) -> None:
    """Refuse degrees that do not fit, with the numbers."""
    if blocks % (stages * virtual):
        fit = [n for n in range(1, blocks + 1) if blocks % (n * virtual) == 0]
        cut = f"{stages} stages" + (f" of {virtual} chunks each" if virtual > 1 else "")
        raise ValueError(f"{blocks} blocks cannot be cut into {cut}; {fit or 'no number of'} stages can")
    if schedule == "interleaved" and virtual == 1:
        raise ValueError(
            "schedule interleaved needs several chunks on each device: give virtual of at least 2, or 1f1b"
        )
    if schedule == "1f1b" and virtual > 1:
        raise ValueError(f"schedule 1f1b has one chunk on each device, not {virtual}: give interleaved")
    if schedule != "gpipe" and micro_batches < stages:
        raise ValueError(
            f"schedule {schedule} needs at least as many micro-batches as the {stages} stages, not {micro_batches}"
        )
    if schedule == "interleaved" and micro_batches % stages:
        raise ValueError(
            f"schedule interleaved needs micro-batches in multiples of the {stages} stages, not {micro_batches}"
        )


def _on_meta(model: Decoder) -> Decoder:
    """The same model without content, for what its boundaries carry."""
    with torch.device("meta"):
        return Decoder(model.config).to(next(model.parameters()).dtype)


def _logits_dtype(model: Decoder, increments: torch.dtype | None) -> torch.dtype:
    return increments or next(model.parameters()).dtype
