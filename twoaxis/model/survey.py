"""What decoder layers do to their residual, found by one dry run with the plain sum.

    events of a layer                                  what they mean
    norm reads, attention runs, an addition            one site: attention
    norm reads, MLP runs, an addition                  one site: mlp
    attention and MLP run, an addition                 one site: parallel
    an addition to a sum that nobody has read          the site before it adds in two steps: rounding, not bitwise

A sub-layer that mixes tokens, whatever it is (attention, a state-space layer, linear attention), is an `attention` for
placements, any other one an `mlp`; layers may have three or four of them.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.depth.registry import stream
from twoaxis.depth.stream import Seen
from twoaxis.model import joins
from twoaxis.model.joins import GraftedChild, Refused, Residual

NORM = re.compile(r"norm|^ln|layer_?norm", re.I)
MIXES = re.compile(r"attn|attention|mixer|mamba|ssm|conv|recurrent|temporal|time_mix|delta|retention|lightning", re.I)
MLP = re.compile(r"mlp|moe|ffn|feed|expert|sparse|glu|ff_?\b|dense|fc", re.I)
PROJECTIONS = (re.compile(r"^q(uery)?(_|$)"), re.compile(r"^k(ey)?(_|$)"), re.compile(r"^v(alue)?(_|$)"))
TOKENS = 12
"""Length of the dry run."""
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far another order of the same sums may lead, relative to the largest logit; families' norms compute in float32
whatever the model's dtype."""


class Branch(NamedTuple):
    """A sub-layer that a mixer or separate ways can act in.

    Attributes:
        child: its name in the layer.
        norm: name of the norm whose output it gets as it is; "" where it gets the read itself, None where neither.
        projections: its linear layers that get its input as it is, with their channels.
    """

    child: str
    norm: str | None
    projections: tuple[tuple[str, int], ...]


class Form(NamedTuple):
    """What one layer does.

    Attributes:
        kinds: its sites in order: attention, mlp or parallel.
        addends: by site, how many additions make up the write.
        outputs: by site, the last linear layers before the addition, which initial values are scaled for.
        attention, mlp: the sub-layers of these kinds, the first of each.
    """

    kinds: tuple[str, ...]
    addends: tuple[int, ...]
    outputs: tuple[tuple[str, ...], ...]
    attention: Branch | None
    mlp: Branch | None

    @staticmethod
    def read(document: Any) -> Form:
        """From JSON."""
        kinds, addends, outputs, *branches = document
        found = [b and Branch(b[0], b[1], tuple((str(n), int(c)) for n, c in b[2])) for b in branches]
        return Form(tuple(kinds), tuple(addends), tuple(tuple(names) for names in outputs), *found)


def kind_of(name: str, module: nn.Module) -> str:
    """What a child of a layer is: by its name, and by its class where the name says nothing."""
    if isinstance(module, nn.Dropout):
        return "other"
    for text in (name, type(module).__name__):
        for kind, pattern in (("norm", NORM), ("attention", MIXES), ("mlp", MLP)):
            if pattern.search(text):
                return kind
    return "other"


class Node:
    """A value of the residual in the dry run: whether a child has read it, and which additions made it."""

    def __init__(self, joined: bool) -> None:
        self.joined, self.read = joined, False


class Plain(NamedTuple):
    """The state of the dry run: the plain sum."""

    x: Tensor
    node: Node


class Survey:
    """A dry run with the plain sum, which writes down what the layers do."""

    def __init__(self) -> None:
        self.forms: list[Form] = []
        self.where, self.width = "the model", 0
        self.hidden: list[Tensor] = []  # norms' outputs: kept, so that no other tensor takes their place in memory

    def open(self, x: Tensor) -> Residual:
        """Layer 0 is called."""
        self.width = x.shape[-1]
        return Residual(self, Plain(x, Node(False)))

    def read(self, state: Plain) -> Seen:
        """The sum."""
        state.node.read = True
        return Seen(state.x)

    def enter_layer(self, layer: Any, residual: Residual) -> Residual:
        """A layer begins."""
        self._end()
        self.layer, self.where = layer, layer.joint.where
        self.kinds: list[str] = []
        self.addends: list[int] = []
        self.outputs: list[tuple[str, ...]] = []
        self.branches: dict[str, Branch] = {}
        self.ran: list[tuple[str, str]] = []
        self.norms: dict[str, Tensor] = {}
        self.newest = Node(False)
        return residual.like(Plain(residual.state.x, self.newest))

    def enter(self, child: GraftedChild, call: Callable[..., Any], given: Any, args: Any, kwargs: Any) -> Any:
        """A child of the layer runs, on the residual or on something else."""
        name, kind = child.joint.where.partition(".")[2], child.joint.kind
        own: Tensor | None = None
        norm: str | None = None
        if given is not None:
            own, norm = given.x, ""
            args, kwargs = child.put(given, own, args, kwargs)
        else:
            tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
            fed = [(n, t) for n, out in self.norms.items() for t in tensors if t is out]
            norm, own = fed[0] if fed else (None, None)
        found: list[tuple[str, int]] = []
        last: list[str] = []
        with self._watched(child, own, found, last):
            out = call(*args, **kwargs)
        if kind == "norm" and given is not None and isinstance(out, Tensor):
            self.norms[name] = out
            self.hidden.append(out)
        if kind in ("attention", "mlp"):
            self.branches.setdefault(kind, Branch(name, norm, tuple(found)))
        self.ran.append((kind, ".".join(filter(None, (name, last[-1]))) if last else ""))
        return out

    @contextmanager
    def _watched(self, child: nn.Module, own: Tensor | None, found: list[Any], last: list[str]) -> Iterator[None]:
        """Note which linear layers of `child` run, and which get its own input as it is."""
        hooks = []

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
                last.append(name)
                if own is not None and args and args[0] is own and "." not in name and name:
                    found.append((name, out.shape[-1]))

            return hook

        for name, module in child.named_modules():
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                hooks.append(module.register_forward_hook(note(name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def join(self, residual: Residual, y: Any) -> Residual:
        """An addition."""
        shape = residual.shaped or residual.state.x.shape  # not residual.x, which would count as a read
        if not isinstance(y, Tensor) or tuple(y.shape) != tuple(shape):
            raise Refused(f"{self.where} adds a {describe(y)} to its residual, not an increment of its shape")
        node = residual.state.node
        if node is not self.newest:
            raise Refused(f"{self.where} adds to a residual that it has added to before")
        if node.joined and not node.read and not self.ran:
            self.addends[-1] += 1
        else:
            kinds = {kind for kind, _ in self.ran}
            both = kinds >= {"attention", "mlp"}
            self.kinds.append("parallel" if both else "attention" if "attention" in kinds else "mlp")
            self.addends.append(1)
            by_kind = {("attention" if k == "attention" else "mlp"): name for k, name in self.ran if name}
            self.outputs.append(tuple(by_kind.values()) if both else tuple(by_kind.values())[-1:])
        self.ran, self.newest = [], Node(True)
        return residual.like(Plain(residual.state.x + y.view(residual.state.x.shape), self.newest))

    def scale(self, residual: Residual, factor: Any) -> Residual:
        """The residual is multiplied: by a number, a number per channel, or a tensor with one of a kind."""
        if isinstance(factor, Residual):
            raise Refused(f"{self.where} multiplies its residual by itself")
        return residual.like(Plain(residual.state.x * factor, residual.state.node))

    def close(self, residual: Residual) -> Tensor:
        """The last layer returned."""
        self._end()
        return residual.x

    def _end(self) -> None:
        if self.where == "the model":
            return
        if not self.kinds:
            raise Refused(f"{self.where} adds nothing to its residual where it can be seen: the sum is inside a child")
        branches = (self.branches.get("attention"), self.branches.get("mlp"))
        self.forms.append(Form(tuple(self.kinds), tuple(self.addends), tuple(self.outputs), *branches))


def describe(value: Any) -> str:
    """A value in a message."""
    return f"tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def sample(model: nn.Module, length: int = TOKENS) -> Tensor:
    """Tokens for a dry run, (1, T)."""
    embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    size = embedding.weight.shape[0]
    return (torch.arange(3, 3 + length, device=embedding.weight.device) % size)[None]


@contextmanager
def announced(run: Any) -> Iterator[None]:
    """Layers take part in `run` while this is active."""
    token = joins.CURRENT.set(run)
    try:
        yield
    finally:
        joins.CURRENT.reset(token)


@torch.no_grad()
def survey(model: nn.Module) -> Survey:
    """A dry run that has gone through every layer of a model; `attach` must have been called."""
    run, layers = Survey(), joins.find_layers(model)
    was = model.training
    try:
        with announced(run):
            model.eval()(sample(model), use_cache=False)
    except Refused:
        raise
    except Exception as error:  # whatever their code does with something that is no tensor
        raise Refused(f"{run.where} cannot carry a stream: {type(error).__name__}: {first_line(error)}") from error
    finally:
        model.train(was)
    if len(run.forms) != len(layers):
        raise Refused(f"{type(model).__name__}: {len(run.forms)} of its {len(layers)} layers ran")
    return run


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the largest number; 0.0 only where all are equal to the last bit."""
    if torch.equal(ours, theirs):
        return 0.0
    found = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-30)
    return float(found) if bool(found.isfinite()) else float("inf")


class Architecture(NamedTuple):
    """What was found out about a model's layers: stored with it, so that loading needs no dry run.

    Attributes:
        forms: of each layer.
        width: of the residual stream, which an embedding may be narrower than.
        exact: how the plain stream equals the untouched model: bitwise or rounding.
        packs: whether packed documents, told apart by positions that begin anew, give what each gives alone.
        digest: of the source of the layers' classes; another one may add elsewhere, and is proved anew.
    """

    forms: tuple[Form, ...]
    width: int
    exact: str
    packs: bool
    digest: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON, every form once."""
        once = list(dict.fromkeys(self.forms))
        layers = [once.index(form) for form in self.forms]
        return {**self._asdict(), "forms": once, "layers": layers}

    @staticmethod
    def from_dict(document: Any) -> Architecture:
        """From JSON."""
        try:
            once = [Form.read(form) for form in document["forms"]]
            forms = tuple(once[i] for i in document["layers"])
            rest = [document[name] for name in Architecture._fields[1:]]
            return Architecture(forms, *rest)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"survey in config.json cannot be read ({error!r}); retrofit the model anew") from None


@torch.no_grad()
def examine(model: nn.Module) -> Architecture:
    """Make the layers of a model able to carry a stream and prove it, against logits taken before it is touched."""
    tokens, was = sample(model), model.training
    try:
        before = model.eval()(tokens, use_cache=False).logits
        if not bool(before.isfinite().all()):
            raise ValueError("the logits are not finite: the model overflows in this dtype; choose another")
        layers = joins.attach(model, kind_of)
        found = survey(model)
        exact = prove(model, found.forms, found.width, before)
        return Architecture(tuple(found.forms), found.width, exact, _packs(model, tokens), digest(layers))
    finally:
        model.train(was)


@torch.no_grad()
def prove(model: nn.Module, forms: Sequence[Form], width: int, before: Tensor) -> str:
    """How exactly a pass with the plain stream gives the logits of the untouched model; refused where it does not."""
    plain = stream("standard", blocks=len(forms), width=width, kinds=[form.kinds for form in forms])
    sites = [count for form in forms for count in form.addends]
    run = joins.Bare(plain, sites, [("x",)] * (len(sites) + 1))
    with announced(run):
        after = model(sample(model), use_cache=False).logits
    found = difference(after, before)
    if found > TOLERANCE[before.dtype]:
        where = type(joins.find_layers(model)[0]).__name__
        raise Refused(f"{where}: with its additions taken over the logits differ by {found:.2g} of the largest")
    return "bitwise" if found == 0.0 else "rounding"


@torch.no_grad()
def _packs(model: nn.Module, tokens: Tensor) -> bool:
    cut = TOKENS // 2 - 1
    positions = torch.cat([torch.arange(cut), torch.arange(TOKENS - cut)]).to(tokens.device)[None]
    try:
        together = model(tokens, position_ids=positions, use_cache=False).logits
        alone = [model(part, use_cache=False).logits for part in (tokens[:, :cut], tokens[:, cut:])]
    except Exception:  # a family that knows no position ids
        return False
    return difference(together, torch.cat(alone, dim=1)) <= max(1e-3, TOLERANCE[together.dtype])


def digest(layers: nn.ModuleList) -> str:
    """Of the source of the layers' classes: another one may add elsewhere."""
    sources = {inspect.getsource(joins.original_class(layer)) for layer in layers}
    return hashlib.sha256("\n".join(sorted(sources)).encode()).hexdigest()[:16]
