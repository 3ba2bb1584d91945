"""Counting floating-point operations as they run, for cost formulas and orders of growth."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ONE_PER_OUTPUT = {"add", "add_", "sub", "rsub", "mul", "mul_", "div", "div_", "neg", "pow", "square", "lerp"}
ONE_PER_OUTPUT |= {"exp", "rsqrt", "sigmoid", "tanh"}
ONE_PER_INPUT = {"sum", "mean"}


class FlopCount(TorchDispatchMode):
    """Counts operations while active: 2 per multiply-add, 1 per element of other arithmetic.

    A sum of products is 2 per term wherever it runs: like the one inside a matrix product, one that begins with a plain
    product and goes on in place has the first addition counted too.

    Attributes:
        flops: operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.begun: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += _flops(func, args, out)
        name = func._schema.name
        if name == "aten::mul":
            self.begun.add(out.data_ptr())
        elif name == "aten::addcmul_" and out.data_ptr() in self.begun:
            self.begun.remove(out.data_ptr())
            self.flops += out.numel()
        return out


def _flops(func: Any, args: Any, out: Any) -> int:
    name = func._schema.name.removeprefix("aten::")
    if name in ("mm", "bmm"):
        return 2 * out.numel() * args[0].shape[-1]
    if name in ("addmm", "baddbmm"):
        return 2 * out.numel() * args[1].shape[-1]
    if name in ("mv", "dot", "vdot"):
        return 2 * args[0].numel()
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        q, k = args[0], args[1]
        return 2 * 2 * q.numel() * k.shape[-2]
    if name in ("addcmul", "addcmul_"):
        return 2 * out.numel()
    if name == "linalg_vector_norm":
        return 2 * args[0].numel()
    if name in ("_softmax", "_fused_rms_norm"):
        return 4 * args[0].numel()
    if name == "native_layer_norm":  # mean, centring, mean square, scaling; then the learned scale and shift
        return (5 + sum(affine is not None for affine in args[2:4])) * args[0].numel()
    if name in ONE_PER_OUTPUT and isinstance(out, Tensor):
        return out.numel()
    if name in ONE_PER_INPUT:
        return args[0].numel()
    return 0


def growth(small: int, large: int, factor: float) -> float:
    """The exponent with which a count grew when a size grew by `factor`."""
    return math.log(large / small) / math.log(factor)
