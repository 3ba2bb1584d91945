"""The claims along time on a model that is not ours, and on one that breaks each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.support.foreign import byte_llama
from tests.support.steppers import Memory, Stepped, transformers_stepper
from twoaxis.verify.time import TIME, Stepper, splits


@pytest.fixture(scope="module")
def llama() -> Stepper:
    return transformers_stepper(byte_llama())


@pytest.mark.parametrize("name", TIME)
@torch.no_grad()
def test_a_transformers_model_holds_the_claim(llama: Stepper, name: str) -> None:
    assert TIME[name](llama).holds


class Forgets(Stepped):
    """Every step begins from nothing."""

    def step(self, tokens: Tensor, past: Memory, reach: Tensor | None = None) -> tuple[Tensor, Memory]:
        return super().step(tokens, self.start(), reach)


class SeesEveryDocument(Stepped):
    def __call__(self, tokens: Tensor, reach: Tensor | None = None) -> Tensor:
        return super().__call__(tokens)


class LooksAhead(Stepped):
    def __call__(self, tokens: Tensor, reach: Tensor | None = None) -> Tensor:
        logits = super().__call__(tokens, reach)
        return logits + logits.mean(1, keepdim=True)


class KeepsItsOrder(Stepped):
    """Trimming and reordering change nothing."""

    def start(self, spare: int = 0) -> Memory:
        class Stubborn(Memory):
            def changed(self, method: str, argument: Any) -> Memory:
                return self

        return Stubborn(super().start().cache)

    def step(self, tokens: Tensor, past: Memory, reach: Tensor | None = None) -> tuple[Tensor, Memory]:
        logits, after = super().step(tokens, past, reach)
        return logits, type(past)(after.cache)


DOCUMENTS, PADDING = "time: packed documents = separate documents", "time: left padding changes nothing"
TRIM, ROWS = "time: trimmed tokens leave no trace", "time: reordered and repeated rows continue"


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        (Forgets, ("time: chunks = one pass", DOCUMENTS, PADDING, TRIM, ROWS)),
        (SeesEveryDocument, (DOCUMENTS, PADDING)),
        (LooksAhead, ("time: the past does not see the future", "time: chunks = one pass")),
        (KeepsItsOrder, (TRIM,)),
    ],
)
@torch.no_grad()
def test_a_fault_is_seen(llama: Stepper, fault: Callable[[Any], Stepped], names: tuple[str, ...]) -> None:
    faulty = llama._replace(module=fault(llama.module.model))
    assert [name for name in names if TIME[name](faulty).holds] == []


@torch.no_grad()
def test_memory_that_grows_is_seen(llama: Stepper) -> None:
    growing = llama._replace(kept=lambda past: past.cache.get_seq_length())
    assert TIME["time: memory does not grow"](growing).error == 24


@torch.no_grad()
def test_cuts_cover_a_sequence(llama: Stepper) -> None:
    assert {sum(cuts) for cuts in splits(12, 3)} == {12}
    logits, past = llama.in_steps(llama.inputs(), (5, 7))
    assert logits.shape[:2] == (2, 12)
    assert past.cache.get_seq_length() == 12
