"""What decoder layers do to their residual, found by one dry run with the plain sum.

    events of a layer                                  what they mean
    norm reads, attention runs, an addition            one site: attention
    norm reads, MLP runs, an addition                  one site: mlp
    attention and MLP run, an addition                 one site: parallel
    an addition to a sum that nobody has read          the site before it adds in two steps: rounding, not bitwise

A sub-layer that mixes tokens, whatever it is (attention, a state-space layer, linear attention), is an `attention` for
placements, any other one an `mlp`; layers may have three or four of them.

A model on the meta device cannot be surveyed, because masks look at numbers, and a large one should not have to be
built for it: `survey_of` runs a narrow twin, which has the same classes, layers, layer types and ratios of heads at a
small width, so that its layers do the same things to their residual in the same order.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from twoaxis.base.options import check_type
from twoaxis.depth.registry import stream
from twoaxis.depth.stream import Seen
from twoaxis.model import graft_layers, graft_residual
from twoaxis.model.graft_layers import GraftedChild
from twoaxis.model.graft_residual import Refused, Residual
from twoaxis.model.initialise import CONV1D

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
        projections: its linear layers that get its input as it is.
    """

    child: str
    norm: str | None
    projections: tuple[str, ...]


class Form(NamedTuple):
    """What one layer does.

    Attributes:
        kinds: its sites in order: attention, mlp or parallel.
        addends: by site, how many additions make up the write.
        outputs: by site, the last linear layers before the addition, which initial values are scaled for.
        readers: by site, the norms that the residual goes into; "" for anything else that it goes into.
        attention, mlp: the sub-layers of these kinds, the first of each.
    """

    kinds: tuple[str, ...]
    addends: tuple[int, ...]
    outputs: tuple[tuple[str, ...], ...]
    readers: tuple[tuple[str, ...], ...]
    attention: Branch | None
    mlp: Branch | None


def kind_of(name: str, module: nn.Module) -> str:
    """What a child of a layer is: by its name, and by its class where the name says nothing."""
    if isinstance(module, nn.Dropout):
        return "other"
    for text in (name, type(module).__name__):
        for kind, pattern in (("norm", NORM), ("attention", MIXES), ("mlp", MLP)):
            if pattern.search(text):
                return kind
    return "other"


@dataclass(eq=False)
class Node:
    """A value of the residual in the dry run: whether an addition made it, and whether a child has read it."""

    joined: bool = False
    read: bool = False


class Plain(NamedTuple):
    """The state of the dry run: the plain sum."""

    x: Tensor
    node: Node


class Survey:
    """A dry run with the plain sum, which writes down what the layers do."""

    def __init__(self) -> None:
        self.forms: list[Form] = []
        self.where, self.width = "the model", 0
        self.closed: Tensor | None = None  # what the last layer returned
        self.final = ""
        self.hidden: list[Tensor] = []  # norms' outputs: kept, so that no other tensor takes their place in memory

    def open(self, x: Tensor) -> Residual:
        """Layer 0 is called."""
        self.width = x.shape[-1]
        return Residual(self, Plain(x, Node()))

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
        self.readers: list[tuple[str, ...]] = []
        self.reading: list[str] = []
        self.branches: dict[str, Branch] = {}
        self.ran: list[tuple[str, str]] = []
        self.norms: dict[str, Tensor] = {}
        self.newest = Node()
        return residual.like(Plain(residual.state.x, self.newest))

    def enter(self, child: GraftedChild, call: Callable[..., Any], given: Any, args: Any, kwargs: Any) -> Any:
        """A child of the layer runs, on the residual or on something else."""
        name, kind = child.joint.where.partition(".")[2], child.joint.kind
        own: Tensor | None = None
        norm: str | None = None
        if given is not None:
            own, norm = given.x, ""
            self.reading.append(name if kind == "norm" else "")
            args, kwargs = child.put(given, own, args, kwargs)
        else:
            tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
            fed = [(n, t) for n, out in self.norms.items() for t in tensors if t is out]
            norm, own = fed[0] if fed else (None, None)
        found: list[str] = []
        last: list[str] = []

        def note(linear: str, args: tuple[Any, ...], out: Any) -> None:
            if out.shape[-1] == self.width:  # not a router, nor a gate of one number
                last.append(linear)
            if own is not None and args and args[0] is own and linear and "." not in linear:
                found.append(linear)

        linears = [(n, m) for n, m in child.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == CONV1D]
        with ExitStack() as hooks:
            for linear, module in linears:
                hook = module.register_forward_hook(lambda _, args, out, linear=linear: note(linear, args, out))
                hooks.callback(hook.remove)
            out = call(*args, **kwargs)
        if kind == "norm" and given is not None and isinstance(out, Tensor):
            self.norms[name] = out
            self.hidden.append(out)
        if kind in ("attention", "mlp"):
            self.branches.setdefault(kind, Branch(name, norm, tuple(found)))
        self.ran.append((kind, ".".join(filter(None, (name, last[-1]))) if last else ""))
        return out

    def join(self, residual: Residual, y: Any) -> Residual:
        """An addition."""
        shape = residual.shaped or residual.state.x.shape  # not residual.x, which would count as a read
        if not isinstance(y, Tensor) or tuple(y.shape) != tuple(shape):
            raise Refused(f"{self.where} adds a {describe(y)} to its residual, not an increment of its shape")
        x, node = residual.state
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
            self.readers.append(tuple(self.reading))
        self.ran, self.reading, self.newest = [], [], Node(joined=True)
        return residual.like(Plain(x + y.view(x.shape), self.newest))

    def scale(self, residual: Residual, factor: Any) -> Residual:
        """The residual is multiplied: by a number, a number per channel, or a tensor with one of a kind."""
        if isinstance(factor, Residual):
            raise Refused(f"{self.where} multiplies its residual by itself")
        return residual.like(residual.state._replace(x=residual.state.x * factor))

    def close(self, residual: Residual) -> Tensor:
        """The last layer returned."""
        self._end()
        self.closed = residual.x
        return self.closed

    def _end(self) -> None:
        if self.where == "the model":
            return
        if not self.kinds:
            raise Refused(f"{self.where} adds nothing to its residual where it can be seen: the sum is inside a child")
        branches = (self.branches.get("attention"), self.branches.get("mlp"))
        sites = (tuple(self.kinds), tuple(self.addends), tuple(self.outputs), tuple(self.readers))
        self.forms.append(Form(*sites, *branches))


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
    token = graft_residual.CURRENT.set(run)
    try:
        yield
    finally:
        graft_residual.CURRENT.reset(token)


@torch.no_grad()
def survey(model: nn.Module) -> Survey:
    """A dry run that has gone through every layer of a model; `attach` must have been called."""
    run, layers, was = Survey(), graft_layers.find_layers(model), model.training

    def note(name: str, args: tuple[Any, ...]) -> None:
        if args and args[0] is run.closed is not None:
            run.final = name

    try:
        with announced(run), ExitStack() as hooks:
            for name, module in model.named_modules():
                if name and kind_of(name.rpartition(".")[2], module) == "norm":
                    hook = module.register_forward_pre_hook(lambda _, args, name=name: note(name, args))
                    hooks.callback(hook.remove)
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
        packs: whether packed documents, separated by positions that begin anew, give what each gives alone.
        digest: of the source of the layers' classes; another one may add elsewhere, and is proved anew.
        final: name of the norm behind the last layer; "" where something else comes first.
    """

    forms: tuple[Form, ...]
    width: int
    exact: str
    packs: bool
    digest: str
    final: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON, every form once."""
        once = list(dict.fromkeys(self.forms))
        layers = [once.index(form) for form in self.forms]
        return {**self._asdict(), "forms": once, "layers": layers}

    @staticmethod
    def from_dict(document: Any) -> Architecture:
        """From JSON."""
        try:
            once = [_record(Form, form) for form in document["forms"]]
            if any(len({*map(len, form[:4])}) != 1 or min(form.addends) < 1 for form in once):
                raise ValueError("a form has not one entry for each site")
            forms = [once[i] for i in document["layers"]]
            return _record(Architecture, [forms, *(document[name] for name in Architecture._fields[1:])])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"survey in config.json cannot be read ({error!r}); retrofit the model anew") from None


def _record(cls: Any, values: Any) -> Any:
    """A named tuple of JSON's lists; a ValueError names a field that is of another type."""
    made = []
    for (name, hint), value in zip(get_type_hints(cls).items(), values, strict=True):
        made.append(_record(Branch, value) if hint == Branch | None and value else _tuples(value))
        check_type(name, made[-1], hint)
    return cls(*made)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@torch.no_grad()
def examine(model: nn.Module, before: Tensor | None = None) -> Architecture:
    """Make the layers of a model able to carry a stream and prove it, against the logits of `sample` that were taken
    before it was touched; None takes them here."""
    tokens, was = sample(model), model.training
    try:
        model.eval()
        plain: Tensor = model(tokens, use_cache=False).logits if before is None else before
        if not bool(plain.isfinite().all()):
            raise ValueError("the logits are not finite: the model overflows in this dtype; choose another")
        layers = graft_layers.attach(model, kind_of)
        found = survey(model)
        exact = prove(model, found.forms, found.width, plain)
        packs = _packs(model, tokens)
        return Architecture(tuple(found.forms), found.width, exact, packs, digest(layers), found.final)
    finally:
        model.train(was)


@torch.no_grad()
def prove(model: nn.Module, forms: Sequence[Form], width: int, before: Tensor) -> str:
    """How exactly a pass with the plain stream gives the logits of the untouched model; refused where it does not."""
    plain = stream("standard", blocks=len(forms), width=width, kinds=[form.kinds for form in forms])
    sites = [count for form in forms for count in form.addends]
    run = graft_residual.Bare(plain, sites, [("x",)] * (len(sites) + 1))
    with announced(run):
        after = model(sample(model), use_cache=False).logits
    found = difference(after, before)
    if found > TOLERANCE[before.dtype]:
        where = type(graft_layers.find_layers(model)[0]).__name__
        raise Refused(f"{where}: with its additions taken over the logits differ by {found:.2g} of the largest")
    return "bitwise" if found == 0.0 else "rounding"


@torch.no_grad()
def prove_cached(model: Any, tokens: Tensor) -> None:
    """Refuse a graft that exchanges keys and values where the family does more with cached ones than attend to them."""
    where, cache, cut = type(model.backbone).__name__, model.make_cache(), TOKENS // 2
    whole = model(tokens, use_cache=False).logits
    try:
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in tokens.split(cut, dim=1)]
    except Refused:
        raise
    except Exception as error:  # a mask cut to the keys of this pass, or the like
        raise Refused(
            f"{where} cannot exchange keys with a cache: {type(error).__name__}: {first_line(error)}"
        ) from error
    if (found := difference(torch.cat(parts, dim=1), whole)) > TOLERANCE[whole.dtype]:
        raise Refused(f"{where}: with keys exchanged before they are cached the logits differ by {found:.2g}")


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
    sources = {inspect.getsource(graft_layers.original_class(layer)) for layer in layers}
    return hashlib.sha256("\n".join(sorted(sources)).encode()).hexdigest()[:16]


HEAD = 8
"""Channels of a twin's head."""
HEADS = re.compile(r"(num|decoder)_(attention_)?heads|n_heads?|num_query_groups")
KEY_HEADS = re.compile(r"num_(key_value|kv)_heads|n_head_kv")
WIDTHS = re.compile(r"hidden_size|d_model|n_embd|dim|embed_dim|word_embed_proj_dim|embedding_size|lru_width")
SMALL = (
    (re.compile(r".*head_dim|d_kv|kv_channels"), HEAD),
    (re.compile(r".*(intermediate|ffn_hidden|mlp_hidden|expert_hidden)_size|.*ffn_dim|n_inner|d_ff|dff|d_inner"), 16),
    (re.compile(r".*lora_rank"), 8),
    (re.compile(r"rotary_dim"), 4),
    (re.compile(r"vocab_size.*"), 64),
    (re.compile(r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length"), 64),
)
"""Fields that are numbers of channels, tokens or positions, and what they are in a twin at most."""


def narrow(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same family and layers at a small width."""
    fields = {name: value for name, value in config.to_dict().items() if not name.endswith("token_id")}
    heads = max([value for name, value in fields.items() if HEADS.fullmatch(name) and isinstance(value, int)] or [1])
    keys = [value for name, value in fields.items() if KEY_HEADS.fullmatch(name) and isinstance(value, int)]
    shared = heads // min(keys) if keys and heads % min(keys) == 0 else 1
    fewer = 2 * shared if heads > 2 * shared else heads

    def small(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [small(name, each) for each in value]
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if HEADS.fullmatch(name) or KEY_HEADS.fullmatch(name):
            return max(1, value * fewer // heads)
        if WIDTHS.fullmatch(name):
            return min(value, fewer * HEAD)
        return next((min(value, most) for pattern, most in SMALL if pattern.fullmatch(name)), value)

    made = {name: small(name, value) for name, value in fields.items()}
    made["query_pre_attn_scalar"] = fields.get("query_pre_attn_scalar") and HEAD
    known = {name: value for name, value in made.items() if name in fields and name != "dtype"}
    return type(config).from_dict({**known, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None})


_FOUND: dict[str, Architecture] = {}
"""Surveys by the twin's configuration: models that differ in width alone have one."""


def survey_of(config: PreTrainedConfig) -> Architecture:
    """What the layers of a family's model do, found on a narrow twin."""
    text: Any = config.get_text_config(decoder=True)
    try:
        twin: Any = narrow(config)
        key = json.dumps(twin.to_dict(), sort_keys=True, default=str)
        if key not in _FOUND:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.manual_seed(0)
                _FOUND[key] = examine(AutoModelForCausalLM.from_config(copy.deepcopy(twin)).float())
        found = _FOUND[key]
        inside = twin.get_text_config(decoder=True)
    except Refused:
        raise
    except Exception as error:  # whatever a family's classes do with sizes that they did not expect
        raise Refused(
            f"{config.model_type} cannot be looked at without weights ({type(error).__name__}: {first_line(error)}); "
            "build it with some"
        ) from error
    if found.width != inside.hidden_size:
        raise Refused(f"{config.model_type}: its residual is {found.width} wide in a twin of {inside.hidden_size}")
    return found._replace(width=text.hidden_size)
