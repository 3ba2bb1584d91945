"""The model of a run that begins from a pretrained one: read, given a method, with the parameters chosen that learn.

    begin("SmolLM2.gguf", stream="denseformer", train="new+norms")

A process that will fork runs reads the source once (`hold`): all of them share the weights that do not learn, and only
what learns is copied. What is frozen is therefore never written either; a digest stands for it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from twoaxis.base.files import file_sha256, read_json
from twoaxis.base.machine import quietly
from twoaxis.base.registry import did_you_mean
from twoaxis.model.load import KINDS, model_folder
from twoaxis.pretrained.choose_start import Start, choose, read_method
from twoaxis.pretrained.record import Begun

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from twoaxis.model.graft import TwoAxisForCausalLM
    from twoaxis.pretrained.source import Source

FIELDS = ("placement", "blend", "mixer_blocks", "lora")
"""Fields of the model that a retrofit takes; `lora` is the rank of additions to linear layers."""


def is_ours(source: str) -> bool:
    """Whether a source is a folder with a model of ours, which training goes on with, and not one to retrofit."""
    place = model_folder(source)
    if not (place / "config.json").is_file():
        return False
    document = read_json(place / "config.json")
    return isinstance(document, dict) and document.get("model_type") in KINDS


def check_method(source: str, stream: str, mixer: str | None, fields: Mapping[str, Any]) -> tuple[Source, Start]:
    """The source, its weights not yet read, and how a method starts on it; refuses one that does not fit."""
    for name in fields:
        if name not in FIELDS:
            hint = did_you_mean(name, FIELDS)
            raise ValueError(f"model.{name} cannot be chosen{hint}: the shape is that of {source}")
    asked = read_method(stream, mixer, **{name: value for name, value in fields.items() if name != "lora"})
    found = _open(source, _signature(source))
    return found, choose(asked, *found.shape())


def begin(
    source: str, *, stream: str = "standard", mixer: str | None = None, fields: Mapping[str, Any], train: str, seed: int
) -> TwoAxisForCausalLM:
    """The model before its first step, in float32 on the CPU; parameters that do not learn are frozen.

    Args:
        source: what `retrofit` takes.
        stream: NAME[:option=value,...], as is `mixer`.
        fields: see `FIELDS`.
        train: what learns, see `twoaxis.model.groups.select`.
        seed: of the new parameters that start at random.
    """
    from twoaxis.model.graft import graft
    from twoaxis.model.groups import trainable
    from twoaxis.pretrained.low_rank import add_low_rank

    found, start = check_method(source, stream, mixer, fields)
    held = _HELD.get((source, _signature(source)))
    plain = _load(found) if held is None else _twin(held)
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    model = graft(plain, start.methods, seed=seed)
    new = model.new_parameters()
    if fields.get("lora") is not None:
        new += add_low_rank(model, fields["lora"], seed)
    model.begun = Begun(found, start, seed, tuple(new), parameters)  # type: ignore[assignment]
    trainable(model, words(train), new=new)
    for parameter in model.parameters() if held is not None else ():
        if parameter.requires_grad:
            parameter.data = parameter.data.clone()
    return model


def words(train: str) -> list[str]:
    """What learns, word by word: "new+norms" and "new,norms" are the same."""
    return [word.strip() for word in train.replace("+", ",").split(",") if word.strip()]


_HELD: dict[tuple[str, str], PreTrainedModel] = {}


def hold(source: str) -> None:
    """Keep the weights of a source in memory, for the models of this process and of those it forks."""
    key = source, _signature(source)
    if key not in _HELD:
        _HELD.clear()
        _HELD[key] = _load(_open(*key))


def release() -> None:
    """Forget what `hold` keeps."""
    _HELD.clear()


def _load(source: Source) -> PreTrainedModel:
    """The source in float32, its weights in memory of their own.

    In the mapped file they lie at the file's alignment, on which last bits of matrix products depend, and they would
    change with a file that somebody rewrites during the run.
    """
    import torch
    import transformers  # noqa: F401  before `quietly`, which silences what is imported

    with quietly():
        model = source.load(torch.float32).requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _twin(held: PreTrainedModel) -> PreTrainedModel:
    """The same model with modules of its own around the same numbers."""
    from torch import nn

    return copy.deepcopy(held, {id(p): nn.Parameter(p.data, requires_grad=False) for p in held.parameters()})


def source_digest(source: str) -> str:
    """Digest of the files of a source: a run does not go on with another one than it began with."""
    return _digest(source, _signature(source))


@lru_cache(maxsize=4)
def _digest(source: str, signature: str) -> str:
    if is_ours(source):
        place = model_folder(source)
        names = sorted([*place.glob("*.safetensors"), place / "config.json"])
        files = {path.name: file_sha256(path) for path in names}
    else:
        files = _open(source, signature).digest()
    return hashlib.sha256("".join(f"{name} {sha}\n" for name, sha in sorted(files.items())).encode()).hexdigest()


@lru_cache(maxsize=4)
def _open(source: str, signature: str) -> Source:
    from twoaxis.data.tokenizer import need_transformers

    need_transformers()
    from twoaxis.pretrained.source import open_source

    return open_source(source)


def _signature(source: str) -> str:
    """Changes when a file of a source does; of a name on the hub, whose files do not, it is empty."""
    path = model_folder(source)
    files = sorted(path.glob("*")) if path.is_dir() else [path] if path.exists() else []
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return ";".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
