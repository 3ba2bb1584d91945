"""What the tests of local mixers share: the comparison, random parameters, running in chunks, a small decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twoaxis import Decoder, DecoderConfig
from twoaxis.ring import Ring
from twoaxis.sequence.mixer import LocalOperator

TIGHT = 1e-10


def close(got: Tensor | None, want: Tensor | None, bound: float = TIGHT) -> None:
    """Equal up to `bound` of the largest entry; an array of zeros would compare with anything, so it is refused."""
    assert got is not None
    assert want is not None
    assert got.shape == want.shape, f"{tuple(got.shape)} is not {tuple(want.shape)}"
    largest = want.abs().max().item()
    assert largest > 0, "the expected array is all zeros"
    error = (got - want).abs().max().item() / largest
    assert error <= bound, f"off by {error:.2e} (bound {bound:.0e})"


def all_close(got: Sequence[Tensor | None], want: Sequence[Tensor | None], bound: float = TIGHT) -> None:
    for ours, theirs in zip(got, want, strict=True):
        close(ours, theirs, bound)


def normal(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def randomise(module: nn.Module, spread: float = 0.5, seed: int = 1) -> None:
    """Every parameter N(0, spread), in float64, so that nothing is neutral by accident."""
    module.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, spread, generator=generator)


def in_chunks(
    local: LocalOperator, x: Tensor, lengths: Sequence[int], reach: Tensor | None = None, past: Ring | None = None
) -> tuple[Tensor, Ring]:
    """`x` through `local.step`, chunk by chunk."""
    assert sum(lengths) == x.shape[1]
    ring, outs, at = local.start() if past is None else past, [], 0
    for length in lengths:
        part = None if reach is None else reach[:, at : at + length]
        y, ring = local.step(x[:, at : at + length], ring, reach=part)
        outs.append(y)
        at += length
    return torch.cat(outs, dim=1), ring


def small_decoder(**options: Any) -> Decoder:
    """Two blocks of width 8 in float64 with random parameters, grouped-query attention included."""
    shape: dict[str, Any] = {"vocabulary": 17, "width": 8, "blocks": 2, "heads": 2, "kv_heads": 1, "hidden": 12}
    model = Decoder(DecoderConfig(**(shape | options)))
    randomise(model)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 17, (batch, length), generator=torch.Generator().manual_seed(seed))


def check_decoder_chunks(model: Decoder, lengths: Sequence[int] = (1, 4, 2, 1, 1, 3)) -> None:
    """One pass and any chunks of it give the same logits."""
    ids = tokens(3, sum(lengths))
    want, past, at = model(ids), model.start(), 0
    for length in lengths:
        logits, past = model.step(ids[:, at : at + length], past)
        close(logits, want[:, at : at + length])
        at += length


def check_decoder_documents(model: Decoder) -> None:
    """Packed documents equal separate runs, and left padding changes nothing."""
    from twoaxis import document_reach, padding_reach

    ids = tokens(1, 9)
    reach = document_reach(torch.tensor([[0, 0, 1, 1, 1, 1, 2, 3, 3]]))
    parts = [model(ids[:, a:b]) for a, b in ((0, 2), (2, 6), (6, 7), (7, 9))]
    close(model(ids, reach=reach), torch.cat(parts, dim=1))
    short = tokens(2, 5, seed=1)
    padded = torch.cat([tokens(2, 3, seed=2), short], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]] * 2)
    close(model(padded, reach=padding_reach(mask))[:, 3:], model(short))


def same_start(model: Decoder, plain: Decoder) -> None:
    """Two decoders of one seed give the same logits, to a bit."""
    ids = tokens(2, 7)
    assert torch.equal(model(ids), plain(ids))
    assert model(ids).abs().max() > 0
