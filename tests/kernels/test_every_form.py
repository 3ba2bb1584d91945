"""Every form of every operator against its reference: values, gradients, and everything autograd allows.

A case is an operator with shapes of its inputs and options; every form that serves a case is held to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

from tests.support.numbers import close, randn
from twoaxis.kernels import OPERATORS, using
from twoaxis.kernels.dispatch import target
from twoaxis.kernels.operator import Operator

T = "tokens"


class Integers(tuple[int | str, ...]):
    """The shape of an input of small integers, which has no gradient."""


@dataclass(frozen=True)
class Case:
    """Inputs and options of an operator."""

    name: str
    """Of the operator."""
    shapes: tuple[Any, ...]
    """Of each input: T is the leading dimensions; a list of shapes is a list of tensors, None is left out."""
    options: dict[str, Any] = field(default_factory=dict)
    lead: tuple[int, ...] = (2, 3)

    @property
    def op(self) -> Operator[..., Any]:
        return OPERATORS[self.name]

    def inputs(self, dtype: torch.dtype = torch.float64, grad: bool = True) -> list[Any]:
        """Random inputs."""

        def make(shape: Any, seed: int) -> Any:
            if isinstance(shape, list):
                return [make(one, 10 * seed + i) for i, one in enumerate(shape)]
            if shape is None:
                return None
            sizes = [n for size in shape for n in (self.lead if size is T else (size,))]
            if isinstance(shape, Integers):
                return torch.randint(0, 4, sizes, generator=torch.Generator().manual_seed(seed))
            return randn(*sizes, seed=seed, dtype=dtype, grad=grad)

        return [make(shape, 1 + i) for i, shape in enumerate(self.shapes)]

    def __str__(self) -> str:
        options = (f"{key}={value}" for key, value in self.options.items())
        return " ".join((self.name, str(self.lead), str(self.shapes), *options)).replace(", ", ",").replace("'", "")


def rewrite(channels: int, width: int = 5, **options: Any) -> Case:
    return Case("delta_rewrite", ((T, channels, width), (T, width), (T,), (T, channels)), {"k_eps": 0.1} | options)


def weights(count: int, ways: int, kinds: str) -> Case:
    """A weighted sum with static, token or channel weights."""
    shapes = {"s": (ways, count), "t": (T, ways, count), "c": (ways, count, 5)}
    return Case("weighted_sum", ([(T, 5)] * count, *(shapes[kind] if kind in kinds else None for kind in "stc")))


def mix(weights: tuple[Any, ...] | None, gain: tuple[Any, ...] | None) -> Case:
    """A mix of three streams of width five; with a gain a sub-layer's output is added."""
    return Case("mix_streams", ((T, 3, 5), weights, None if gain is None else (T, 5), gain))


def window(
    window: int | None,
    n: int = 6,
    m: int = 6,
    groups: int = 2,
    bias: bool = False,
    sink: bool = False,
    reach: bool = False,
) -> Case:
    """Attention of the last n of m positions."""
    shapes = [(T, 2 * groups, n, 4), (T, 2, m, 4), (T, 2, m, 4 if window is None else 3)]
    extra = [(2 * groups, n, m) if bias else None, (2 * groups,) if sink else None, Integers((T, n)) if reach else None]
    return Case("attention", (*shapes, *extra), {"window": window, "scale": 0.7}, lead=(2,))


CASES = [
    *(rewrite(v, bound=bound, erase=erase) for v in (1, 3) for bound in (None, 3.7) for erase in (True, False)),
    replace(rewrite(2), lead=()),
    replace(rewrite(3, bound=0.0), lead=(2, 1024)),
    rewrite(5),  # the direction and the value have one shape
    *(
        Case("stream_logits", ((T, 3, 5), (4, 5)), {"norm": norm, "eps": eps}, lead)
        for norm in ("layer", "rms", "none")
        for eps, lead in ((0.1, (2, 3)), (0.0, (2, 3)), (0.1, ()))
    ),
    *(Case("read_streams", ((T, 3, 5), weights)) for weights in ((T, 3, 1), (3, 1), (3, 5))),
    Case("read_streams", ((T, 1, 5), (1, 5)), lead=()),
    *(mix(weights, gain) for weights, gain in (((T, 2, 3), (T, 2)), ((2, 3), (2,)), ((T, 2, 3), None))),
    *(mix(weights, gain) for weights in ((3,), None) for gain in ((T, 3), (3,))),
    replace(mix((3, 3), (T, 3)), lead=()),
    *(Case("stream_mean", ((T, n, 5),)) for n in (3, 1)),
    *(
        Case("sinkhorn", ((T, 4, 4),), {"iterations": iterations, "eps": eps, "first": first}, lead)
        for iterations, eps, first, lead in (
            *((iterations, eps, -1, (2, 3)) for iterations in (1, 3) for eps in (0.0, 0.01)),
            (3, 0.01, -2, (2, 3)),
            (3, 0.0, -2, ()),
        )
    ),
    *(weights(count, ways, kinds) for kinds in ("s", "t", "c", "st", "sc", "stc") for ways, count in ((1, 1), (2, 3))),
    replace(weights(2, 2, "stc"), lead=()),
    *(
        Case("rms_logits", ((T, 6), (n, heads, 6 // heads)), {"eps": eps}, lead)
        for n, heads, eps, lead in (
            *((n, heads, eps, (2, 3)) for n in (1, 4) for heads in (1, 2) for eps in (None, 0.1)),
            (6, 1, 0.0, (6,)),
            (2, 3, 0.1, ()),
        )
    ),
    *(Case("source_dots", (query, [(T, 5)] * 3)) for query in ((T, 2, 5), (T, 1, 5), (2, 5))),
    *(Case("softmax_read", ([(T, 6)] * 3, [(T, *heads)] * 3), {"scale": 3.0}) for heads in ((), (1,), (2,))),
    *(
        Case("query_read", ([(T, 6)] * 3, (h, 6 // h)), {"eps": eps, "scale": 2.0})
        for h in (1, 2)
        for eps in (None, 0.1)
    ),
    window(None),
    window(None, n=1, groups=1),
    window(None, bias=True, sink=True, reach=True),
    window(None, m=9, reach=True),
    *(
        window(w, n, m, sink=sink, reach=reach)
        for w, n, m in ((3, 37, 38), (20, 40, 40))
        for sink, reach in ((False, False), (True, True))
    ),
    window(1, groups=1),
    *(Case("depthwise_taps", ((2, 8, 3), (3, 4), reach), lead=()) for reach in (None, Integers((2, 5)))),
]


def forms(case: Case, differentiable: bool) -> Iterator[str]:
    """The forms that serve a case in eager mode."""
    inputs = case.inputs()
    for name, form in case.op.forms.items():
        serves = form.serves is None or form.serves(*inputs, **case.options)
        if serves and not form.compiled and (form.backward is not None or not differentiable):
            yield name


def every(*, differentiable: bool = True, where: Callable[[Case], bool] = lambda _: True) -> Any:
    """One test for each form of the cases that `where` chooses."""
    found = [(case, form) for case in CASES if where(case) for form in forms(case, differentiable)]
    return pytest.mark.parametrize(("case", "form"), found, ids=[f"{case} {form}" for case, form in found])


def of_each_operator() -> Any:
    """One test for the first case of each operator."""
    first = {case.name: case for case in reversed(CASES)}
    return pytest.mark.parametrize("case", first.values(), ids=first)


def flat(values: Any) -> list[Tensor]:
    """The tensors of nested inputs or outputs; integers have no gradient and stay what they are."""
    if isinstance(values, list | tuple):
        return [t for value in values for t in flat(value)]
    return [values] if isinstance(values, Tensor) and values.is_floating_point() else []


def like(values: Any, tensors: Iterator[Tensor]) -> Any:
    """`tensors` nested as `values` are."""
    if isinstance(values, list | tuple):
        return [like(value, tensors) for value in values]
    return next(tensors) if isinstance(values, Tensor) and values.is_floating_point() else values


@contextmanager
def only(op: Operator[..., Any], form: str) -> Iterator[list[str]]:
    """Run `form`, and list which passes of it ran."""
    ran: list[str] = []
    chosen = op.forms[form]
    with pytest.MonkeyPatch.context() as patch, using(form):
        for name in ("forward", "backward"):
            if (inner := getattr(chosen, name)) is not None:

                def counted(*a: Any, _inner: Any = inner, _name: str = name, **k: Any) -> Any:
                    ran.append(_name)
                    return _inner(*a, **k)

                patch.setattr(chosen, name, counted)
        yield ran


def probes(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A random gradient for each output."""
    return [randn(*out.shape, seed=90 + i, dtype=out.dtype) for i, out in enumerate(outputs)]


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], **how: Any) -> list[Tensor]:
    """Of the probed outputs, zero where a leaf is not used."""
    found = torch.autograd.grad(outputs, leaves, probes(outputs), allow_unused=True, **how)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]


def pairs(found: Sequence[Tensor], want: Sequence[Tensor], bound: float = 1e-12) -> None:
    for a, b in zip(found, want, strict=True):
        assert a.dtype == b.dtype
        assert a.isfinite().all()
        if b.numel():
            close(a, b, bound)
        else:
            assert a.shape == b.shape


def through(op: Operator[..., Any], form: str, inputs: list[Any], options: dict[str, Any]) -> list[Tensor]:
    with only(op, form) as ran:
        found = flat(op(*inputs, **options))
    assert ran == ["forward"]
    return found


@every(differentiable=False)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values(case: Case, form: str, dtype: torch.dtype) -> None:
    inputs = case.inputs(dtype, grad=False)
    want = flat(case.op.reference(*inputs, **case.options))
    bound = 1e-13 if dtype == torch.float64 else 2e-2
    pairs(through(case.op, form, inputs, case.options), want, bound)
    with torch.no_grad():
        pairs(through(case.op, form, case.inputs(dtype), case.options), want, bound)


@every()
def test_every_gradient_alone_and_all_of_them(case: Case, form: str) -> None:
    inputs = case.inputs()
    leaves = flat(inputs)
    want = gradients(flat(case.op.reference(*inputs, **case.options)), leaves)
    with only(case.op, form) as ran:
        pairs(gradients(flat(case.op(*inputs, **case.options)), leaves), want)
        for i, leaf in enumerate(leaves):
            alone = iter(t if t is leaf else t.detach() for t in leaves)
            (found,) = gradients(flat(case.op(*like(inputs, alone), **case.options)), [leaf])
            pairs([found], [want[i]])
    assert ran == ["forward", "backward"] * (1 + len(leaves))


@every()
def test_every_output_alone(case: Case, form: str) -> None:
    inputs = case.inputs()
    leaves = flat(inputs)
    ours, theirs = through(case.op, form, inputs, case.options), flat(case.op.reference(*inputs, **case.options))
    for one, other in zip(ours, theirs, strict=True):
        pairs(gradients([one], leaves, retain_graph=True), gradients([other], leaves, retain_graph=True))


@every()
def test_second_derivatives(case: Case, form: str) -> None:
    inputs = case.inputs()
    leaves = flat(inputs)

    def twice(outputs: list[Tensor]) -> list[Tensor]:
        first = gradients(outputs, leaves, create_graph=True)
        penalty = sum((g.square().sum() for g in first), outputs[0].square().sum())
        found = torch.autograd.grad(penalty, leaves, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]

    want = twice(flat(case.op.reference(*inputs, **case.options)))
    pairs(twice(through(case.op, form, inputs, case.options)), want, 1e-11)


def has_a_pair(case: Case) -> bool:
    sizes = [t.shape for t in flat(case.inputs())]
    return len(set(sizes)) < len(sizes)


@every(where=has_a_pair)
def test_one_tensor_given_twice(case: Case, form: str) -> None:
    """Inputs of one shape may be one tensor: its gradients add up, also when differentiated twice."""
    inputs = case.inputs()
    shared: dict[torch.Size, Tensor] = {}
    tensors = [shared.setdefault(t.shape, t) for t in flat(inputs)]
    leaves, inputs = list(shared.values()), like(inputs, iter(tensors))
    ours, theirs = through(case.op, form, inputs, case.options), flat(case.op.reference(*inputs, **case.options))
    first, want = (gradients(outputs, leaves, create_graph=True) for outputs in (ours, theirs))
    pairs(first, want)
    penalties = [torch.stack([g.square().sum() for g in found]).sum() for found in (first, want)]
    again = [torch.autograd.grad(penalty, leaves) for penalty in penalties]
    pairs(again[0], again[1], 1e-11)


@every()
def test_batches_of_gradients(case: Case, form: str) -> None:
    """`is_grads_batched` and `vmap` over a backward pass, without and with a second derivative after it."""
    inputs = case.inputs()
    leaves = flat(inputs)
    outputs, theirs = through(case.op, form, inputs, case.options), flat(case.op.reference(*inputs, **case.options))
    batch = [torch.stack([p, 2.0 * p, p.flip(0) if p.dim() else p]) for p in probes(outputs)]
    for create in (False, True):
        want = [
            torch.autograd.grad(theirs, leaves, [p[i] for p in batch], allow_unused=True, retain_graph=True)
            for i in range(3)
        ]
        how = {"allow_unused": True, "retain_graph": True, "create_graph": create}
        batched = torch.autograd.grad(outputs, leaves, batch, is_grads_batched=True, **how)
        mapped = torch.vmap(lambda g: torch.autograd.grad(outputs, leaves, g, retain_graph=True))(batch)
        for i, leaf in enumerate(leaves):
            each = [torch.zeros_like(leaf) if g[i] is None else g[i] for g in want]
            for found in (batched[i], mapped[i]):
                assert found is not None
                pairs([found], [torch.stack(each)])
            if create and batched[i].requires_grad:
                again = torch.autograd.grad(batched[i].square().sum(), leaves, allow_unused=True, retain_graph=True)
                assert any(g is not None for g in again)


@every()
def test_autocast_narrows_neither_pass(case: Case, form: str) -> None:
    inputs = case.inputs(torch.float32)
    leaves = flat(inputs)
    outside = through(case.op, form, inputs, case.options)
    with torch.autocast("cpu", torch.bfloat16):
        inside = through(case.op, form, inputs, case.options)
        reference = flat(case.op.reference(*inputs, **case.options))
    assert [t.dtype for t in reference] == [t.dtype for t in outside]
    for create in (False, True):
        want = gradients(outside, leaves, retain_graph=True, create_graph=create)
        for outputs in (outside, inside):
            assert all(torch.equal(a, b) for a, b in zip(outputs, outside, strict=True))
            with torch.autocast("cpu", torch.bfloat16):
                found = gradients(outputs, leaves, retain_graph=True, create_graph=create)
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@every()
def test_any_strides(case: Case, form: str) -> None:
    """Transposed in memory, and expanded from fewer numbers."""
    inputs = case.inputs()
    leaves = [t.detach() for t in flat(inputs)]
    turned = [t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t for t in leaves]
    copied = [t.narrow(-2, 0, 1).expand_as(t) if t.dim() > 1 else t for t in leaves]
    for tensors in (turned, copied):
        tensors = [t.detach().requires_grad_() for t in tensors]
        want = flat(case.op.reference(*like(inputs, iter(tensors)), **case.options))
        found = through(case.op, form, like(inputs, iter(tensors)), case.options)
        pairs(found, want, 1e-13)
        ones = [torch.ones((), dtype=out.dtype).expand_as(out) for out in want]
        a, b = (torch.autograd.grad(outs, tensors, ones, allow_unused=True) for outs in (found, want))
        pairs(flat(a), flat(b))


@every(where=lambda case: case.lead == (2, 3))
def test_an_empty_batch(case: Case, form: str) -> None:
    inputs = replace(case, lead=(0, 3)).inputs()
    leaves = flat(inputs)
    want = flat(case.op.reference(*inputs, **case.options))
    found = through(case.op, form, inputs, case.options)
    pairs(found, want)
    pairs(gradients(found, leaves), gradients(want, leaves))


@every()
def test_meta_tensors_take_the_same_calls(case: Case, form: str) -> None:
    real = flat(case.op(*case.inputs(), **case.options))
    inputs = [t.to("meta") if isinstance(t, Tensor) else t and [x.to("meta") for x in t] for t in case.inputs()]
    with target("cpu"):
        found = through(case.op, form, inputs, case.options)
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in real]
    grads = torch.autograd.grad(found, flat(inputs), [torch.empty_like(t) for t in found], allow_unused=True)
    assert [g.shape for g in grads if g is not None] == [t.shape for t in flat(inputs)]


@every()
def test_changing_an_input_before_the_backward_pass_raises(case: Case, form: str) -> None:
    inputs = case.inputs()
    outputs = through(case.op, form, inputs, case.options)
    with torch.no_grad():
        for leaf in flat(inputs):
            leaf.add_(1.0)
    with pytest.raises(RuntimeError, match=r"modified .*inplace"):
        gradients(outputs, flat(inputs))


@of_each_operator()
def test_compiled(case: Case) -> None:
    torch._dynamo.reset()
    inputs = case.inputs()
    leaves = flat(inputs)
    outputs = flat(torch.compile(case.op, backend="aot_eager", fullgraph=True)(*inputs, **case.options))
    want = flat(case.op.reference(*inputs, **case.options))
    pairs(outputs, want)
    pairs(gradients(outputs, leaves), gradients(want, leaves))


@pytest.mark.slow
@of_each_operator()
def test_compiled_autograd(case: Case) -> None:
    """A backward pass that a compiler traces runs the hand-written backward."""
    torch._dynamo.reset()
    inputs = case.inputs()
    leaves = flat(inputs)
    want = gradients(flat(case.op.reference(*inputs, **case.options)), leaves)
    outputs = flat(case.op(*inputs, **case.options))
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        torch.autograd.backward(outputs, probes(outputs))
    pairs([torch.zeros_like(t) if t.grad is None else t.grad for t in leaves], want)


def test_every_form_has_a_case() -> None:
    held = {(case.name, form) for case in CASES for form in forms(case, differentiable=False)}
    eager = {(name, form) for name, op in OPERATORS.items() for form in op.forms if not op.forms[form].compiled}
    assert held == eager - {("attention", "flex")}, "a form for GPUs is in test_attention.py"


def test_the_choice_of_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.name == "read_streams")
    inputs = case.inputs()
    with only(case.op, "few_tokens") as ran:  # which has no backward
        case.op(*inputs, **case.options)
        assert ran == []
        with using("reference"), torch.no_grad():
            case.op(*inputs, **case.options)
        assert ran == []
        with torch.no_grad():
            case.op(*inputs, **case.options)
        assert ran == ["forward"]
    with pytest.raises(ValueError, match=r"'fused' names no form: choose from auto, .*reference"), using("fused"):
        pass
    monkeypatch.setattr("twoaxis.kernels.operator._choice", "typo")  # as the environment sets it
    with pytest.raises(ValueError, match="names no form"):
        case.op(*inputs, **case.options)


def test_a_backward_written_by_hand_has_its_derivative_beside_it() -> None:
    written = {f"{op} {name}": form.backward for op, each in OPERATORS.items() for name, form in each.forms.items()}
    assert [what for what, backward in written.items() if backward and "d_" not in (backward.__doc__ or "")] == []
