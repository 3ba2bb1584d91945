"""Claims along time, for anything that reads a sequence whole or in steps: an operator, a decoder, somebody's model.

A `Stepper` says how. Each claim is measured on the operators of a mixer and on the decoders around a method; on another
model call the function itself, from `TIME`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.verify.claim import Result, as_result, claim, deviation
from twoaxis.window import document_reach, padding_reach

BOUND = 1e-12


class Stepper(NamedTuple):
    """A model that reads a sequence whole or in steps, with a memory that is a value."""

    # called with (x, reach=), with `start(spare)` and `step(x, past, reach=)`; a memory has trim, reorder and repeat
    module: Any
    draw: Callable[[int, int, int], Tensor]  # inputs from a seed, batch and length: tokens (B, T), or (B, T, C)
    kept: Callable[[Any], int]  # numbers per sequence in a memory that must not grow with the sequence
    seed: int = 0  # of the inputs

    def inputs(self, offset: int = 0, batch: int = 2, time: int = 12) -> Tensor:
        """A random batch."""
        return self.draw(self.seed + offset, batch, time)

    def in_steps(self, x: Tensor, cuts: Sequence[int], *, reach: Any = None, past: Any = None) -> tuple[Tensor, Any]:
        """Run `x` chunk by chunk: the outputs side by side, and the memory after the last chunk."""
        past, outputs, begin = self.module.start() if past is None else past, [], 0
        for length in cuts:
            chunk = slice(begin, begin + length)
            y, past = self.module.step(x[:, chunk], past, reach=None if reach is None else reach[:, chunk])
            outputs.append(y)
            begin += length
        return torch.cat(outputs, dim=1), past


Along = Callable[[Stepper], Any]
TIME: dict[str, Callable[[Stepper], Result]] = {}
"""Every claim along time by its name, as a function of a stepper."""


def along_time(name: str, bound: float = BOUND) -> Callable[[Along], Along]:
    """Decorator: register a claim about steppers, and the same claim about subjects."""

    def add(measure: Along) -> Along:
        @functools.wraps(measure)
        @torch.no_grad()
        def run(stepper: Stepper) -> Any:
            return as_result(measure(stepper), bound)

        TIME[name] = claim("time", name, over=lambda subject: subject.steppers())(run)
        return measure

    return add


def splits(length: int, seed: int) -> list[tuple[int, ...]]:
    """Ways to cut a sequence: whole, token by token, uneven, a prompt and three tokens, at random."""
    generator = torch.Generator().manual_seed(seed)
    cuts, left = [], length
    while left:
        cuts.append(int(torch.randint(1, left + 1, (1,), generator=generator)))
        left -= cuts[-1]
    return [(length,), (1,) * length, (2, 1, 5, length - 8), (length - 3, 1, 1, 1), tuple(cuts)]


@along_time("time: the past does not see the future", 1e-13)
def causal(model: Stepper) -> Any:
    """A changed token changes nothing before it, and does change its own output."""
    x, other = model.inputs(), model.inputs(1)
    before, errors = model.module(x), {}
    for position in (1, x.shape[1] // 2, x.shape[1] - 1):
        changed = x.clone()
        changed[:, position] = other[:, position]
        after = model.module(changed)
        errors[f"token {position}"] = deviation(after[:, :position], before[:, :position])
        if torch.equal(after[:, position], before[:, position]) and not torch.equal(changed, x):
            return ["an output does not depend on its own token"]
    return errors


@along_time("time: chunks = one pass")
def chunks(model: Stepper) -> Any:
    """A sequence cut into chunks of any size, with the memory carried along, gives the outputs of one pass."""
    x = model.inputs()
    whole = model.module(x)
    return {str(cuts): deviation(model.in_steps(x, cuts)[0], whole) for cuts in splits(x.shape[1], model.seed)}


@along_time("time: packed documents = separate documents")
def documents(model: Stepper) -> Any:
    """Documents side by side in one sequence give what they give alone, in one pass and in chunks."""
    x = model.inputs()
    lengths = [5, 1, 3, x.shape[1] - 9]
    marks = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(x.shape[0], -1)
    reach = document_reach(marks)
    apart = torch.cat([model.module(part) for part in x.split(lengths, dim=1)], dim=1)
    stepped, _ = model.in_steps(x, (4, 4, x.shape[1] - 8), reach=reach)
    return {"one pass": deviation(model.module(x, reach=reach), apart), "in chunks": deviation(stepped, apart)}


@along_time("time: left padding changes nothing")
def padding(model: Stepper) -> Any:
    """A row padded on the left gives what it gives alone, beside a row that is not padded, in chunks too."""
    x, pad = model.inputs(), 4
    mask = torch.ones(x.shape[:2], dtype=torch.long)
    mask[0, :pad] = 0
    reach = padding_reach(mask)
    alone, other = model.module(x[:1, pad:])[0], model.module(x[1:])[0]
    stepped, _ = model.in_steps(x, (3, 4, x.shape[1] - 7), reach=reach)
    found = {"one pass": model.module(x, reach=reach), "in chunks": stepped}
    errors = {f"padded row, {how}": deviation(out[0, pad:], alone) for how, out in found.items()}
    return errors | {f"other row, {how}": deviation(out[1], other) for how, out in found.items()}


@along_time("time: trimmed tokens leave no trace")
def trim(model: Stepper) -> Any:
    """Up to `spare` tokens can be taken back; a window that has moved on without spare positions refuses."""
    x, draft = model.inputs(), model.inputs(1)
    whole, errors = model.module(x), {}
    for count in (1, 3):
        drafted = torch.cat([x[:, :8], draft[:, :count]], dim=1)
        _, past = model.in_steps(drafted, (5, 3, count), past=model.module.start(3))
        errors[f"{count} tokens"] = deviation(model.module.step(x[:, 8:], past.trim(count))[0], whole[:, 8:])
    _, before = model.in_steps(x, (x.shape[1] - 1,))
    _, past = model.module.step(x[:, -1:], before)
    if 0 < model.kept(before) == model.kept(past):
        try:
            past.trim(1)
        except ValueError:
            return errors
        return ["a full window without spare positions lets itself be trimmed"]
    return errors


@along_time("time: reordered and repeated rows continue")
def rows(model: Stepper) -> Any:
    """Rows of the memory in another order, selected or repeated, continue as those rows would."""
    x, done = model.inputs(batch=3), 7
    whole, errors = model.module(x)[:, done:], {}
    _, past = model.module.step(x[:, :done], model.module.start())
    for order in ([2, 0, 1], [1], [0, 0, 2]):
        y, _ = model.module.step(x[order, done:], past.reorder(torch.tensor(order)))
        errors[f"rows {order}"] = deviation(y, whole[order])
    y, _ = model.module.step(x[:, done:].repeat_interleave(2, 0), past.repeat(2))
    return errors | {"every row twice": deviation(y, whole.repeat_interleave(2, 0))}


@along_time("time: memory does not grow")
def memory(model: Stepper) -> Any:
    """What is kept between tokens is the same after a sequence and after one three times as long."""
    length, held = model.inputs().shape[1], []
    for time in (length, 3 * length):
        _, past = model.in_steps(model.inputs(time=time), (time - 5, 1, 4))
        held.append(model.kept(past))
    return Result(abs(held[1] - held[0]), detail=f"{held[0]} numbers after {length} tokens, then {held[1]}")
