"""Pipelines: devices share the depth of a `Decoder`, by torch's schedules; boundaries carry the packed state.

    tokens ─► stage 0 ── pack ──► stage 1 ── pack ──► stage 2 ─► logits, loss           P stages, V chunks on each
                      ◄─ gradients             ◄─ gradients

With several chunks on a device (`virtual`), a boundary carries only what its receiver has not got yet. A chunk *lends*
the tensors it received or made: later chunks of its device read a copy that is a leaf of their own graphs, and the
lender's backward pass, which comes after theirs, adds the leaf's gradient to its own.

    device 0    chunk 0 ── lend a ─────────────► chunk 2 reads a
                   └─ a ─► chunk 1 ── b ─────────► └ receives b alone

Every stage holds the whole stream, whose parameters all stages use, and a tied embedding stands at both ends:
`add_shared` adds their gradients after a step. Whoever clips counts them once: see `counted`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS
from torch.distributed.tensor import DTensor

from twoaxis.kernels.precision import widen
from twoaxis.model.decoder import Decoder
from twoaxis.model.stages import Boundary, boundaries, plan
from twoaxis.parallel.shard import AS_STORED, prepare_blocks

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Shelf = dict[int, Tensor]
"""Tensors of one micro-batch that a device keeps for its later chunks, by their numbers in the plan."""


class _Lend(torch.autograd.Function):
    """Identity of an output; its backward pass gives lent tensors the gradients that later chunks left in their copies.

    They hang on an output because a tensor that a chunk only lends on has no other way back.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, copies: Iterable[Tensor], *lent: Tensor) -> Tensor:
        ctx.copies = copies
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *grads, None, *[copy.grad for copy in ctx.copies]


class Stage(nn.Module):
    """Some blocks of a decoder, with the embedding before the first and the head behind the last."""

    decoder: Decoder
    sent = 0  # bytes per token that the last pass handed on

    def __init__(
        self,
        decoder: Decoder,
        blocks: range,
        came: Boundary | None,  # the boundary before it; None at the start
        goes: Boundary | None,  # and behind it; None at the end
        shelves: Sequence[Shelf],  # what the chunks of this device keep, one for each micro-batch
        keeps: bool,  # whether a later chunk of this device needs them
        autocast: Callable[[], Any],  # context manager of forward passes
    ) -> None:
        super().__init__()
        vars(self)["decoder"] = decoder  # not as a child: the stage has some of its modules only
        head = decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head
        ends = ([decoder.embed_tokens] if came is None else []) + ([decoder.norm, head] if goes is None else [])
        self.stream, self.blocks, self.ends = decoder.stream, blocks, nn.ModuleList(ends)
        self.layers = nn.ModuleList(decoder.layers[number] for number in blocks)
        self.came, self.goes, self.shelves, self.keeps = came, goes, shelves, keeps
        self.autocast, self.passes = autocast, 0

    def forward(self, *tensors: Tensor, reach: Tensor | None = None) -> Any:
        """From the tokens, or what the boundary before carries, to what the next device lacks of the state, or logits.

        For `reach` see `Decoder.forward`.
        """
        shelf = self.shelves[self.passes % len(self.shelves)]
        self.passes += 1
        lent: Shelf = {}
        with self.autocast():
            if self.came is None:
                x = self.decoder.embed(tensors[0])
                state = self.stream.open(x, reach=reach)
            else:
                x, lent = tensors[0], dict(zip(self.came.sent, tensors, strict=True))
                packed = [(shelf | lent)[n] for n in self.came.tensors]
                state = self.stream.unpack(packed, self.stream.sites_of(self.blocks.start)[0], reach=reach)
            info = self.decoder.info(x, None, reach, x.dtype)
            for block in self.layers:
                state = block(self.stream, state, info)
            if self.goes is None:
                out = [self.decoder.logits(self.decoder.norm(self.stream.close(state)))]
            else:
                made = dict(zip(self.goes.tensors, self.stream.pack(state), strict=True))
                out = [made[n].contiguous() for n in self.goes.sent]
                self.sent = sum(tensor[0, 0].nbytes for tensor in out)
                # what has come or is kept already is lent by whoever had it first
                lent = {n: made[n] for n in self.goes.sent if n not in shelf} | lent
        if self.keeps:
            copies = {n: tensor.detach().requires_grad_() for n, tensor in lent.items()}
            shelf |= copies
            out[0] = cast(Tensor, _Lend.apply(out[0], copies.values(), *lent.values()))
        else:
            shelf.clear()
        return out[0] if self.goes is None else tuple(out)


class Pipeline:
    """The stages of this process and the schedule that runs them.

    The model is on its device or on the meta device, and keeps only the modules that this process runs. Where processes
    hold the same stages and share every batch (`data`), the stages are sharded over them, a unit per block; the stream
    stays whole, as stages of several devices add its gradients. For `recompute` and `compile` see `shard`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        schedule: Schedule,  # gpipe has all forward passes, then all backward passes
        virtual: int = 1,  # chunks of blocks on each device
        micro_batches: int,  # that a batch is cut into
        loss: Callable[[Tensor, Tensor], Tensor],  # of the logits and labels of a micro-batch
        rows: int,  # of a micro-batch
        context: int,
        group: dist.ProcessGroup | None = None,  # the processes in the order of the stages; None is all of them
        data: DeviceMesh | None = None,
        device: torch.device | None = None,
        narrow: torch.dtype | None = None,  # that operators compute in, by autocast; None is that of the parameters
        cached: bool = True,  # whether a boundary leaves out what its receiver has
        recompute: int = 0,
        compile: bool = False,
    ) -> None:
        if not isinstance(model, Decoder):
            raise ValueError(
                f"{type(model).__name__} cannot be cut into a pipeline: its layers run in its family's own loop. "
                "Pipelines are for Decoder; use fsdp and tp for grafts"
            )
        rank, stages, blocks = dist.get_rank(group), dist.get_world_size(group), model.config.num_hidden_layers
        check_pipeline(schedule, blocks, stages, virtual, micro_batches)
        chunks, per = stages * virtual, blocks // (stages * virtual)
        self.group, self.data, self.peer = group, data, 0 if rank else stages - 1
        self.first, self.last, self.tied = rank == 0, rank == stages - 1, model.lm_head is None
        self.stream, dtype = model.stream, next(model.parameters()).dtype
        self.device = next(model.parameters()).device if device is None else device
        with torch.device("meta"):
            meta = Decoder(model.config).to(dtype)
        layout = (plan(meta, stages, virtual) if cached else plan(meta, chunks)).boundaries
        autocast = partial(torch.autocast, self.device.type, narrow, enabled=narrow is not None)
        packed, shelves = boundaries(meta, narrow), [{} for _ in range(micro_batches)]

        def crossing(chunk: int) -> tuple[Tensor, ...]:
            """Without content, what a chunk gets: tokens for the first, and logits come out of the last."""
            if chunk == 0:
                return (torch.empty(rows, context, dtype=torch.long, device="meta"),)
            if chunk == chunks:
                tensors = [torch.empty(1, 1, model.config.vocab_size, dtype=narrow or dtype, device="meta")]
            else:
                boundary = layout[chunk - 1]
                by_number = dict(zip(boundary.tensors, packed[boundary.block], strict=True))
                tensors = [by_number[n] for n in boundary.sent]
            return tuple(t.new_empty(rows, context, *t.shape[2:]).requires_grad_() for t in tensors)

        self.stages: list[Stage] = []
        made: list[Any] = []
        for chunk in range(rank, chunks, stages):
            came, goes = layout[chunk - 1] if chunk else None, layout[chunk] if chunk < chunks - 1 else None
            keeps, own = cached and chunk + stages < chunks, range(chunk * per, (chunk + 1) * per)
            stage = Stage(model, own, came, goes, shelves, keeps, autocast)
            prepare_blocks(list(stage.layers), recompute=recompute, compile=compile)
            if data is not None:  # a unit per block, and one for the ends
                for block in stage.layers:
                    fully_shard(block, mesh=data, mp_policy=AS_STORED)
                ignored: Any = {"ignored_params": set(model.stream.parameters()), "reshard_after_forward": False}
                fully_shard(stage, mesh=data, mp_policy=AS_STORED, **ignored)
            given = {"input_args": crossing(chunk), "output_args": crossing(chunk + 1), "group": group}
            made.append(PipelineStage(stage, chunk, chunks, self.device, **given))
            self.stages.append(stage)
        _keep_only(model, self.stages)
        options: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": loss, "scale_grads": False}
        several = ScheduleInterleaved1F1B if schedule == "interleaved" else ScheduleLoopedBFS
        single = Schedule1F1B if schedule == "1f1b" else ScheduleGPipe
        self.schedule: Any = several(made, **options) if virtual > 1 else single(made[0], **options)

    def step(self, tokens: Tensor, labels: Tensor, reach: Tensor | None = None) -> Tensor | None:
        """Add the gradients of a batch to the parameters'; its summed loss in the process of the last stage.

        After the last batch of a step `add_shared` completes them.
        """
        losses: list[Tensor] = []
        wanted = {"target": labels, "losses": losses} if self.last else {}
        self.schedule.step(*[tokens][: self.first], **wanted, reach=reach)
        return torch.stack(losses).sum().detach() if losses else None

    @torch.no_grad()
    def logits(self, tokens: Tensor, reach: Tensor | None = None) -> Tensor | None:
        """The logits of a batch, in the process of the last stage."""
        # without losses: the schedule runs forward passes alone
        loss, self.schedule._loss_fn = self.schedule._loss_fn, None
        try:
            return self.schedule.eval(*[tokens][: self.first], reach=reach)
        finally:
            self.schedule._loss_fn = loss

    def counted(self, name: str) -> bool:
        """Whether this process is the one that counts a parameter; several have the stream's, and a tied embedding."""
        return self.first or not name.startswith(("stream.", *("embed_tokens.",) * self.tied))

    def add_shared(self) -> None:
        """Add the gradients of parameters that several stages have.

        The stream's are averaged over `data` too, as sharding does with all others.
        """
        shared = list(self.stream.parameters())
        if shared:
            # one exchange; a first number says in how many processes a parameter has a gradient at all
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in shared]
            there = torch.tensor([float(p.grad is not None) for p in shared], device=self.device)
            flat = torch.cat([there, *(widen(part).flatten() for part in parts)])
            for group in (self.group, *(self.data.get_all_groups() if self.data is not None else ())):
                dist.all_reduce(flat, group=group)
            flat /= 1 if self.data is None else self.data.size()
            there, *sums = flat.split([len(shared), *(p.numel() for p in shared)])
            for parameter, count, total in zip(shared, there.tolist(), sums, strict=True):
                parameter.grad = total.view_as(parameter).to(parameter.dtype) if count else None
        if self.tied and (self.first or self.last):
            grad = self.stages[0 if self.first else -1].decoder.embed_tokens.weight.grad
            mine = grad.to_local() if isinstance(grad, DTensor) else cast(Tensor, grad)
            theirs, swap = torch.empty_like(mine), partial(dist.P2POp, group=self.group, group_peer=self.peer)
            for work in dist.batch_isend_irecv([swap(dist.isend, mine.contiguous()), swap(dist.irecv, theirs)]):
                work.wait()
            mine.add_(theirs)


def _keep_only(model: nn.Module, kept: Sequence[nn.Module]) -> None:
    """Replace the modules of a model that no stage of this process has by empty ones; the names of the others stay."""
    wanted = {id(module) for root in kept for module in root.modules()}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) not in wanted and any(True for _ in child.parameters(recurse=False)):
                setattr(parent, name, nn.Module())


def check_pipeline(schedule: Schedule, blocks: int, stages: int, virtual: int, micro_batches: int) -> None:
    """Refuse degrees that do not fit, with the numbers."""
    fit = [n for n in range(1, blocks + 1) if blocks % (n * virtual) == 0]
    cut = f"{stages} stages" + (f" of {virtual} chunks each" if virtual > 1 else "")
    looped, cuts, least = schedule == "interleaved", stages * virtual, f"the {stages} stages, not {micro_batches}"
    needs = f"schedule {schedule} needs"
    for wrong, said in (
        (blocks % cuts, f"{blocks} blocks cannot be cut into {cut}; {fit or 'no number of'} stages can"),
        (looped and virtual == 1, f"{needs} several chunks: give virtual of at least 2, or 1f1b"),
        (schedule == "1f1b" and virtual > 1, f"schedule 1f1b has one chunk, not {virtual}: give interleaved"),
        (schedule == "1f1b" and micro_batches < stages, f"{needs} at least as many micro-batches as {least}"),
        (looped and micro_batches % stages, f"{needs} micro-batches in multiples of {least}"),
    ):
        if wrong:
            raise ValueError(said)
