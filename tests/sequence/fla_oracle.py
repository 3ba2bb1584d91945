"""Compares ShortConv with flash-linear-attention's kernels, run by Triton's interpreter on the CPU.

    TRITON_INTERPRET=1 python -m tests.sequence.fla_oracle

prints one line of JSON: what was compared, and how far it is off relative to the largest entry. A process of its own,
because the interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from twoaxis import document_reach
from twoaxis.sequence.short_conv import ShortConv


def relative(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert want.abs().max() > 0
    return ((got - want).abs().max() / want.abs().max()).item()


def one_configuration_each(module: Any) -> None:
    """Keep one launch configuration per kernel: choosing between several needs a GPU to time them."""
    for found in vars(module).values():
        kernel: Any = found
        while type(kernel).__module__.startswith(("triton", "fla")):
            if hasattr(kernel, "configs"):
                kernel.configs = kernel.configs[:1]
            kernel = getattr(kernel, "fn", None)


def whole_sequences(causal_conv1d: Any, errors: dict[str, float]) -> None:
    """Forward and every gradient, with and without bias, activation and residual."""
    for kernel, activation, bias, residual in (
        (4, "silu", False, False),
        (4, "none", False, True),
        (3, "silu", True, False),
        (2, "none", True, False),
        (3, "silu", True, True),
        (4, "none", False, False),
    ):
        options = {"kernel": kernel, "activation": activation, "bias": bias, "where": "qkv", "residual": residual}
        ours = ShortConv(16, **options, start="uniform")
        x, g = torch.randn(2, 11, 16, requires_grad=True), torch.randn(2, 11, 16)
        leaves = [x, *ours.parameters()]
        theirs, _ = causal_conv1d(
            x=x,
            weight=ours.weight.squeeze(1),
            bias=ours.bias,
            residual=x if residual else None,
            activation=None if activation == "none" else activation,
        )
        name = f"k{kernel} {activation} bias={bias} residual={residual}"
        errors[name] = relative(ours(x), theirs)
        pairs = (torch.autograd.grad((y * g).sum(), leaves) for y in (ours(x), theirs))
        for leaf, (got, want) in zip(("x", "weight", "bias"), zip(*pairs, strict=True), strict=False):
            errors[f"{name} d{leaf}"] = relative(got, want)


def chunks_and_documents(causal_conv1d: Any, errors: dict[str, float]) -> None:
    """Continuation from a state, whose oldest of k inputs is dead weight, and packed documents."""
    ours, x = ShortConv(16, where="qkv"), torch.randn(1, 12, 16)
    weight = ours.weight.squeeze(1)
    with torch.no_grad():
        _, state = causal_conv1d(x=x[:, :5], weight=weight, activation="silu", output_final_state=True)
        theirs, _ = causal_conv1d(x=x[:, 5:], weight=weight, activation="silu", initial_state=state)
        _, ring = ours.step(x[:, :5], ours.start())
        errors["kept inputs"] = relative(ring.tensors()[0].transpose(1, 2), state[..., 1:])
        errors["continuation"] = relative(ours.step(x[:, 5:], ring)[0], theirs)
        bounds = torch.tensor([0, 2, 3, 8, 12])
        theirs, _ = causal_conv1d(x=x, weight=weight, activation="silu", cu_seqlens=bounds)
        numbers = torch.repeat_interleave(torch.arange(4), bounds.diff())[None]
        errors["documents"] = relative(ours(x, reach=document_reach(numbers)), theirs)


def main() -> None:
    import fla.modules.causal_conv1d.ops as ops

    torch.set_num_threads(1)
    torch.manual_seed(0)
    one_configuration_each(ops)
    errors: dict[str, float] = {}
    whole_sequences(ops.causal_conv1d, errors)
    chunks_and_documents(ops.causal_conv1d, errors)
    module = ops.ShortConvolution(16, 4, bias=True, activation="silu")
    ours = ShortConv(16, bias=True, where="qkv")
    ours.load_state_dict(module.state_dict())
    x = torch.randn(2, 7, 16)
    errors["state dict"] = relative(ours(x), module(x)[0])
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
