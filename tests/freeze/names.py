"""How the recorders reach the package: the only file of `tests.freeze` that depends on the names of the package.

`before.json` has the paths at the frozen commit and never changes. What has moved since stands in `MOVED`, renamed
parameters in `RENAMED`, renamed options in `FIELDS`. Where more than a name has changed, the functions below branch on
`frozen()`.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

MOVED: dict[str, str] = {
    "TrainConfig": "twoaxis.training.config:TrainConfig",
    "train": "twoaxis.training.train:train",
    "Interrupted": "twoaxis.base.interrupt:Interrupted",
    "resolve": "twoaxis.training.setup:resolve",
    "make_model": "twoaxis.training.setup:make_model",
    "load_data": "twoaxis.data.load:load_data",
    "weights": "twoaxis.training.checkpoint:weights",
    "checkpoints": "twoaxis.training.checkpoint:checkpoints",
    "rank": "twoaxis.training.engines.place:rank",
    "retrofit": "twoaxis.pretrained.retrofit:retrofit",
    "peak_memory": "twoaxis.training.measure:peak_memory",
    "instances": "tests.support.decoders:instances",
    "DecoderConfig": "twoaxis.model.config:ModelConfig",
    "make_fake": "tests.comparison.fake_comparison:make_fake",
}
"""Paths of today for names of before.json that live elsewhere now, as "module:attribute"."""

RENAMED: list[tuple[str, str]] = [
    (r"\.query\.(\d+)$", r".token.\1"),
    (r"^(model\.trunk\.)?norms\.(\d+)\.(attention|parallel)\.", r"\1layers.\2.input_layernorm."),
    (r"^(model\.trunk\.)?norms\.(\d+)\.mlp\.", r"\1layers.\2.post_attention_layernorm."),
    (r"^(model\.trunk\.)?norms\.(\d+)\.mixer\.", r"\1layers.\2.mixer.norm."),
    (r"^(model\.trunk\.)?blocks\.", r"\1layers."),
    (r"^embedding\.", "embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^(model\.trunk\.)?final_norm\.", r"\1norm."),
    (r"\.parallel\.(attention|mlp)\.", r".\1."),
    (r"\.attention\.points\.locals\.attention\.", ".self_attn.before."),
    (r"\.attention\.points\.locals\.qkv\.", ".self_attn.inside."),
    (r"\.mlp\.points\.locals\.mlp\.", ".mlp.before."),
    (r"\.mlp\.points\.locals\.hidden\.", ".mlp.inside."),
    (r"\.attention\.query\.", ".self_attn.q_proj."),
    (r"\.attention\.key\.", ".self_attn.k_proj."),
    (r"\.attention\.value\.", ".self_attn.v_proj."),
    (r"\.attention\.output\.", ".self_attn.o_proj."),
    (r"\.attention\.query_norm$", ".self_attn.q_norm.weight"),
    (r"\.attention\.key_norm$", ".self_attn.k_norm.weight"),
    (r"\.mlp\.(gate|up|down)\.", r".mlp.\1_proj."),
]
"""Regular expression and replacement, tried in order on a frozen parameter's name; all that match are applied."""

COUNTED_ANEW = ("attention_residuals", "deep_cross_attention:version=2,ways=single,window=1")
"""Beginnings of labels whose counts differ on purpose: a read of one source is a read, a window holds one less."""

FIELDS: dict[str, str] = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "blocks": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
}
"""Names of today for options of the decoder's configuration."""

GIVEN_UP: dict[str, str] = {}
"""What changed on purpose, by "part/item" (`*` matches any text): why `compare` passes over it."""

LOOSER: dict[str, float] = {}
"""Items that may differ more than their part allows, by "part/item" (`*` matches any text): the relative bound."""

ROOT = Path(__file__).resolve().parents[2]
"""Of the tree this file is in."""

_PATHS: dict[str, str] = json.loads(Path(__file__).with_name("before.json").read_text())


def check_tree() -> None:
    """Refuse a process that imports the package of another tree than its recorders'."""
    import twoaxis

    if (there := Path(twoaxis.__file__).resolve().parents[1]) != ROOT:
        raise RuntimeError(f"twoaxis is imported from {there}, the recorders are in {ROOT}; set PYTHONPATH")


def frozen() -> bool:
    """Whether this process runs in the frozen tree; `make` sets the variable."""
    return os.environ.get("TWOAXIS_FREEZE_SIDE") == "before"


def find(name: str) -> Any:
    """The object that before.json calls `name`, in the tree that this process imports."""
    path = _PATHS[name] if frozen() else MOVED.get(name, _PATHS[name])
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


LABELS: list[tuple[str, str]] = [
    (r"^embed_tokens\.", "embedding."),
    (r"^lm_head\.", "head."),
    (r"^layers\.", "blocks."),
    (r"\.self_attn\.before$", ".attention.points.locals.attention"),
    (r"\.self_attn\.inside$", ".attention.points.locals.qkv"),
    (r"\.mlp\.before$", ".mlp.points.locals.mlp"),
    (r"\.mlp\.inside$", ".mlp.points.locals.hidden"),
    (r"\.self_attn\.q_proj\.", ".attention.query."),
    (r"\.self_attn\.k_proj\.", ".attention.key."),
    (r"\.self_attn\.v_proj\.", ".attention.value."),
    (r"\.self_attn\.o_proj\.", ".attention.output."),
    (r"\.mlp\.(gate|up|down)_proj\.", r".mlp.\1."),
]
"""What initial values are drawn by, from today's names to those of the frozen commit."""


@contextlib.contextmanager
def frozen_start() -> Iterator[None]:
    """Models that are made inside start with the weights of the frozen commit, by which tensors were called there."""
    initial: Any = import_module("twoaxis.model.initialise")
    drawn = initial.named_generator

    def draw(seed: int, name: str, like: Tensor) -> Any:
        for pattern, replacement in LABELS:
            name = re.sub(pattern, replacement, name)
        with torch.random.fork_rng(devices=[]):  # a model took its seed from torch's generator there
            torch.manual_seed(seed)
            seed = int(torch.randint(0, 2**31, (1,)))
        return drawn(seed, name, like)

    initial.named_generator = draw
    try:
        yield
    finally:
        initial.named_generator = drawn


def parameter(name: str) -> str:
    """Today's name of a parameter that had `name` at the frozen commit."""
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


# the decoder


def decoder_config(fields: dict[str, Any]) -> Any:
    """A decoder's configuration from fields of the frozen commit; lists of JSON become tuples."""
    made = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    if not frozen():
        made = {FIELDS.get(name, name): value for name, value in made.items()}
        if "block" in made:
            made["parallel_block"] = made.pop("block") == "parallel"
        options = dict(fields.get("stream_options") or {})
        if made.get("stream") == "manifold_hyper_connections" and options.get("form") != "deepseek":
            made["stream_options"] = {"start": "paper", **options}  # the default of the frozen commit
    return find("DecoderConfig")(**made)


def decoder(fields: dict[str, Any], seed: int) -> Any:
    """A decoder with its own initial weights."""
    return find("Decoder")(decoder_config(fields), seed)


def load_parameters(model: Any, weights: dict[str, Tensor]) -> None:
    """Copy weights by their names of today; a name that only one side has is a `KeyError`."""
    here = dict(model.named_parameters())
    if differing := sorted(set(here) ^ set(weights)):
        raise KeyError(f"{differing[0]} is a parameter on one side only; say how it is called in names.RENAMED")
    with torch.no_grad():
        for name, tensor in weights.items():
            here[name].copy_(tensor)


def with_documents(model: Any, tokens: Tensor, ends: Tensor) -> Tensor:
    """Logits of packed documents, each of which ends where `ends` is True."""
    before = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], dim=1)
    return model(tokens, reach=find("document_reach")(before.long().cumsum(1)))


def in_chunks(model: Any, tokens: Tensor, cuts: Sequence[int]) -> tuple[Tensor, dict[str, int]]:
    """Logits of a prompt in chunks, and the bytes that are kept after it: of the stream, of windows, of the prefix."""
    past, rows = model.start(), []
    for chunk in tokens.split(list(cuts), dim=1):
        logits, past = model.step(chunk, past)
        rows.append(logits)
    rings = [ring for of_site in past.sublayers for ring in of_site]
    kept = {
        "stream": sum(ring.nbytes() for ring in past.stream),
        "local": sum(ring.nbytes() for ring in rings if ring.window is not None),
        "attention": sum(ring.nbytes() for ring in rings if ring.window is None),
    }
    return torch.cat(rows, dim=1), kept


def boundaries(model: Any, x: Tensor) -> list[list[list[int]]]:
    """Shapes per token of the packed state before each block and at the end, with zeros in place of increments."""
    stream, made = model.stream, []
    state = stream.open(x)
    for site in stream.layout.sites:
        if site.first:
            made.append([list(t.shape[2:]) for t in stream.pack(state)])
        if site.index < len(stream.sites):
            seen = stream.read(state, site)
            state = stream.write(state, site, torch.zeros_like(x), seen, model.site_norm(site)(seen))
    made.append([list(t.shape[2:]) for t in stream.pack(state)])
    return made


def counts(fields: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Parameters and FLOPs by part, and what the stream declares."""
    config = decoder_config(fields)
    stream = config.make_stream()
    cost = stream.cost() if frozen() else import_module("twoaxis.depth.counts").count(stream)
    return {
        "parameters": find("count_parameters")(config)._asdict(),
        "forward": find("forward_flops")(config, tokens)._asdict(),
        "training": find("training_flops")(config, tokens)._asdict(),
        "cost": cost._asdict(),
    }


# training


def train(fields: dict[str, Any], folder: Path, watch: Callable[[int, float | None], None]) -> bool:
    """Run a training in `folder`; False where it was interrupted and can be continued."""
    if not frozen() and fields.get("mixer") == "short_swa":
        fields = fields | {"mixer": "short_swa:start=zero"}  # the default of the frozen commit
    try:
        train = find("train")
        told = "watch" if "watch" in inspect.signature(train).parameters else "on_step"
        train(find("TrainConfig")(**fields), folder, **{told: watch})
    except find("Interrupted"):
        return False
    return True


def initial_weights(fields: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of a run before its first step."""
    config = find("resolve")(find("TrainConfig")(**fields))
    data = find("load_data")(config)
    vocabulary = data.vocabulary if frozen() else data.vocab_size
    return find("weights")(find("make_model")(config, vocabulary, data.end))


def final_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a finished run."""
    return load_file(folder / "model" / "model.safetensors")


def checkpoint(folder: Path) -> dict[str, Tensor]:
    """Of a stopped run: NAME of every weight, and NAME/exp_avg, NAME/exp_avg_sq of what learns."""
    newest = find("checkpoints")(folder / "checkpoints")[0]
    moments = load_file(newest / "optimizer.safetensors")
    return load_file(newest / "model.safetensors") | {k: v for k, v in moments.items() if not k.endswith("/step")}


def retrofit(model: Any, out: Path, stream: str, mixer: str | None) -> None:
    """Put a method on a transformers model and save it."""
    find("retrofit")(model, stream=stream, mixer=mixer, out=out, tokens=32)


# commands


def save_model(folder: Path, fields: dict[str, Any], weights: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """Save a small language model with these fields of a preset; the weights it has, or the given ones."""
    if not frozen():
        from twoaxis.model.save import save_decoder

        model = find("Decoder")(find("preset")("nano", **fields), 3)
        if weights is not None:
            bare = {re.sub(r"^model\.(trunk\.)?", "", parameter(name)): tensor for name, tensor in weights.items()}
            load_parameters(model, bare)
        folder.mkdir(parents=True, exist_ok=True)
        save_decoder(folder, model)
        return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    torch.manual_seed(3)
    model = find("TwoAxisForCausalLM")(find("preset")("nano", **fields))
    if weights is not None:
        load_parameters(model, {parameter(name): tensor for name, tensor in weights.items()})
    model.save_pretrained(folder)
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def command(*words: str) -> tuple[int, str]:
    """Exit code and output of a command of the command line, run in this process."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    before, sys.argv = sys.argv, ["twoaxis", *words]
    code: Any = 0
    try:
        with contextlib.redirect_stdout(output):
            find("main")()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    return int(code or 0), output.buffer.getvalue().decode()  # type: ignore[attr-defined]
