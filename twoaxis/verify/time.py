"""Claims along time, for anything that reads a sequence whole or in steps: an operator, a decoder, somebody's model.

A `Stepper` says how. `along_time` lifts each claim to subjects: it is measured on the operators of a mixer and on the
decoders around a method. On another model call the function itself, from `TIME`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.verify.claim import Result, claim, deviation, worst
from twoaxis.window import document_reach, padding_reach

if TYPE_CHECKING:
    from twoaxis.verify.subject import Subject

BOUND = 1e-12


class Stepper(NamedTuple):
    """A model that reads a sequence whole or in steps, with a memory that is a value.

    Attributes:
        module: called with (x, reach=), with `start(spare)` and `step(x, past, reach=)`; a memory has `trim`,
            `reorder` and `repeat`.
        draw: random inputs from a seed, a batch size and a length: tokens (B, T), or activations (B, T, C).
        kept: numbers per sequence in a memory that must not grow with the sequence.
    """

    module: Any
    draw: Callable[[int, int, int], Tensor]
    kept: Callable[[Any], int]

    def inputs(self, seed: int, batch: int = 2, time: int = 12) -> Tensor:
        """A random batch."""
        return self.draw(seed, batch, time)

    def whole(self, x: Tensor, reach: Tensor | None = None) -> Tensor:
        """The outputs (B, T, ...) of whole sequences."""
        return self.module(x, reach=reach)

    def start(self, spare: int = 0) -> Any:
        """The memory before the first token."""
        return self.module.start(spare)

    def step(self, x: Tensor, past: Any, reach: Tensor | None = None) -> tuple[Tensor, Any]:
        """The outputs of the next tokens, and the memory after them."""
        return self.module.step(x, past, reach=reach)


Along = Callable[[Stepper, int], Result]
TIME: dict[str, Along] = {}
"""Every claim along time by its name: a function of a stepper and a seed."""


def along_time(name: str) -> Callable[[Along], Along]:
    """Decorator: register a claim about steppers, and the same claim about subjects."""

    def add(measure: Along) -> Along:
        @claim("time", name)
        @torch.no_grad()
        def lifted(subject: Subject) -> Result:
            found = {where: measure(stepper, subject.seed) for where, stepper in subject.steppers()}
            where, measured = max(found.items(), key=lambda pair: pair[1].severity)
            detail = f"{where}: {measured.detail}" if measured.detail else f"worst: {where}"
            return measured._replace(detail=detail, instances=sum(m.instances for m in found.values()))

        lifted.__doc__ = measure.__doc__
        TIME[name] = measure
        return measure

    return add


def in_steps(
    model: Stepper, x: Tensor, cuts: Sequence[int], *, reach: Tensor | None = None, past: Any = None
) -> tuple[Tensor, Any]:
    """Run `x` chunk by chunk: the outputs side by side, and the memory after the last chunk."""
    past, outputs, begin = model.start() if past is None else past, [], 0
    for length in cuts:
        chunk = slice(begin, begin + length)
        y, past = model.step(x[:, chunk], past, None if reach is None else reach[:, chunk])
        outputs.append(y)
        begin += length
    return torch.cat(outputs, dim=1), past


def splits(length: int, seed: int) -> list[tuple[int, ...]]:
    """Ways to cut a sequence: whole, token by token, uneven, a prompt and three tokens, at random."""
    generator = torch.Generator().manual_seed(seed)
    cuts, left = [], length
    while left:
        cuts.append(int(torch.randint(1, left + 1, (1,), generator=generator)))
        left -= cuts[-1]
    return [(length,), (1,) * length, (2, 1, 5, length - 8), (length - 3, 1, 1, 1), tuple(cuts)]


@along_time("time: the past does not see the future")
def causal(model: Stepper, seed: int) -> Result:
    """A changed token changes nothing before it, and does change its own output."""
    x, other = model.inputs(seed), model.inputs(seed + 1)
    before, error, positions = model.whole(x), 0.0, (1, x.shape[1] // 2, x.shape[1] - 1)
    for position in positions:
        changed = x.clone()
        changed[:, position] = other[:, position]
        after = model.whole(changed)
        error = max(error, deviation(after[:, :position], before[:, :position]))
        if torch.equal(after[:, position], before[:, position]) and not torch.equal(changed, x):
            return Result(float("inf"), 1e-13, "an output does not depend on its own token")
    return Result(error, 1e-13, instances=len(positions))


@along_time("time: chunks = one pass")
def chunks(model: Stepper, seed: int) -> Result:
    """A sequence cut into chunks of any size, with the memory carried along, gives the outputs of one pass."""
    x = model.inputs(seed)
    whole = model.whole(x)
    return worst({str(c): deviation(in_steps(model, x, c)[0], whole) for c in splits(x.shape[1], seed)}, BOUND)


@along_time("time: packed documents = separate documents")
def documents(model: Stepper, seed: int) -> Result:
    """Documents side by side in one sequence give what they give alone, in one pass and in chunks."""
    x = model.inputs(seed)
    lengths = [5, 1, 3, x.shape[1] - 9]
    marks = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(x.shape[0], -1)
    reach = document_reach(marks)
    apart = torch.cat([model.whole(part) for part in x.split(lengths, dim=1)], dim=1)
    cuts = (4, 4, x.shape[1] - 8)
    errors = {"one pass": deviation(model.whole(x, reach), apart)}
    return worst(errors | {"in chunks": deviation(in_steps(model, x, cuts, reach=reach)[0], apart)}, BOUND)


@along_time("time: left padding changes nothing")
def padding(model: Stepper, seed: int) -> Result:
    """A row padded on the left gives what it gives alone, beside a row that is not padded, in chunks too."""
    x, pad = model.inputs(seed), 4
    mask = torch.ones(x.shape[:2], dtype=torch.long)
    mask[0, :pad] = 0
    reach = padding_reach(mask)
    alone, other = model.whole(x[:1, pad:])[0], model.whole(x[1:])[0]
    padded, stepped = model.whole(x, reach), in_steps(model, x, (3, 4, x.shape[1] - 7), reach=reach)[0]
    pairs = {"padded row": (padded[0, pad:], alone), "other row": (padded[1], other), "chunks": (stepped[1], other)}
    pairs["padded row in chunks"] = (stepped[0, pad:], alone)
    return worst({name: deviation(*pair) for name, pair in pairs.items()}, BOUND)


@along_time("time: trimmed tokens leave no trace")
def trim(model: Stepper, seed: int) -> Result:
    """Up to `spare` tokens can be taken back; a window that has moved on without spare positions refuses."""
    x, draft = model.inputs(seed), model.inputs(seed + 1)
    whole, errors = model.whole(x), {}
    for count in (1, 3):
        drafted = torch.cat([x[:, :8], draft[:, :count]], dim=1)
        _, past = in_steps(model, drafted, (5, 3, count), past=model.start(spare=3))
        errors[f"{count} tokens"] = deviation(model.step(x[:, 8:], past.trim(count))[0], whole[:, 8:])
    _, before = in_steps(model, x, (x.shape[1] - 1,))
    _, past = model.step(x[:, -1:], before)
    if 0 < model.kept(before) == model.kept(past):
        try:
            past.trim(1)
        except ValueError:
            return worst(errors, BOUND)
        return Result(float("inf"), BOUND, "a full window without spare positions lets itself be trimmed")
    return worst(errors, BOUND)


@along_time("time: reordered and repeated rows continue")
def rows(model: Stepper, seed: int) -> Result:
    """Rows of the memory in another order, selected or repeated, continue as those rows would."""
    x, done = model.inputs(seed, batch=3), 7
    whole, errors = model.whole(x)[:, done:], {}
    _, past = model.step(x[:, :done], model.start())
    for order in ([2, 0, 1], [1], [0, 0, 2]):
        y, _ = model.step(x[order, done:], past.reorder(torch.tensor(order)))
        errors[f"rows {order}"] = deviation(y, whole[order])
    y, _ = model.step(x[:, done:].repeat_interleave(2, 0), past.repeat(2))
    return worst(errors | {"every row twice": deviation(y, whole.repeat_interleave(2, 0))}, BOUND)


@along_time("time: memory does not grow")
def memory(model: Stepper, seed: int) -> Result:
    """What is kept between tokens is the same after a sequence and after one three times as long."""
    length = model.inputs(seed).shape[1]
    held = []
    for time in (length, 3 * length):
        _, past = in_steps(model, model.inputs(seed, time=time), (time - 5, 1, 4))
        held.append(model.kept(past))
    return Result(abs(held[1] - held[0]), detail=f"{held[0]} numbers after {length} tokens, then {held[1]}")
