"""A decoder in a folder: config.json and safetensors, written and read without transformers.

    as the graft of a family that has its options, which every tool of transformers opens
    config.json          {"model_type": "twoaxis", "format": 1, "text_config": {...}, "stream": ..., "survey": ...}
                         and the fields of `ModelConfig` in "decoder_config", until transformers writes the folder anew
    model.safetensors    every weight, by the names in the graft
    modeling_twoaxis.py  one import of this package, for programs that do not import it

    where no family has them (`why_no_graft` says which)
    config.json          {"model_type": "twoaxis_decoder", "format": 1, "decoder_config": {...}}
    model.safetensors    every weight, by the names in `Decoder`

A file that is missing, damaged or of another shape is a `ValueError` that names it and the field.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from twoaxis.base.files import file_errors, read_json, write_json, write_text
from twoaxis.base.options import check_names
from twoaxis.base.plugins import write_origins
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.decoder_as_graft import FORMAT, GRAFT, graft_document, graft_key, read_graft

DECODER = "twoaxis_decoder"
"""The `model_type` of a folder that holds a decoder which is no graft."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"
MODULE = "modeling_twoaxis"
CODE = '''"""Loads this folder with the installed twoaxis package."""

from twoaxis.model.graft import TwoAxisConfig, TwoAxisForCausalLM, TwoAxisModel

__all__ = ["TwoAxisConfig", "TwoAxisForCausalLM", "TwoAxisModel"]
'''
AUTO_MAP = {
    "AutoConfig": f"{MODULE}.TwoAxisConfig",
    "AutoModel": f"{MODULE}.TwoAxisModel",
    "AutoModelForCausalLM": f"{MODULE}.TwoAxisForCausalLM",
}
"""What lets a folder load with `trust_remote_code=True` where twoaxis is installed but not imported."""


def save_decoder(folder: str | Path, model: Decoder) -> None:
    """Write a decoder into a folder that is there."""
    path, tensors = Path(folder), {name: p.detach() for name, p in model.named_parameters()}
    if why_no_graft(model.config) is None:
        write_json(path / CONFIG, graft_document(model.config, model.embed_tokens.weight.dtype))
        write_loader(path)
        tensors = {graft_key(name): tensor for name, tensor in tensors.items()}
    else:
        write_json(path / CONFIG, {"model_type": DECODER, "format": FORMAT, "decoder_config": model.config.to_dict()})
    write_origins(path, model.config.classes)
    save_tensors(path / WEIGHTS, tensors)


def why_no_graft(config: ModelConfig) -> str | None:
    """What keeps a decoder from being saved as the graft of a family; None where nothing does."""
    try:
        graft_document(config, torch.float32)
    except ValueError as error:
        return str(error)
    return None


def load_decoder(folder: str | Path) -> Decoder:
    """The decoder of a folder, on the CPU, in the dtype it was saved in."""
    path = Path(folder)
    config = read_config(path / CONFIG)
    try:
        with torch.device("meta"):
            model = Decoder(config)
    except ValueError as error:  # a stream that this shape cannot have
        raise ValueError(f"{path / CONFIG}: {error}") from error
    renamed = graft_key if read_json(path / CONFIG)["model_type"] == GRAFT else str
    tensors = load_tensors(path / WEIGHTS)
    here = {renamed(name): (name, parameter) for name, parameter in model.named_parameters()}
    shapes = {key: (tensor.shape, here[key][1].shape) for key, tensor in tensors.items() if key in here}
    other = {key: pair for key, pair in shapes.items() if pair[0] != pair[1]}
    whole = [key for key, tensor in tensors.items() if not tensor.is_floating_point()]
    what = f"{path / WEIGHTS} does not fit its {CONFIG}"
    check_keys(what, set(here) - set(tensors), set(tensors) - set(here), other, whole)
    model.load_state_dict({here[key][0]: tensor for key, tensor in tensors.items()}, assign=True)
    return model


def check_keys(
    what: str, missing: Iterable[str], unexpected: Iterable[str], other: Mapping[str, Any], whole: Iterable[str] = ()
) -> None:
    """Refuse weights whose keys, shapes (there and in the model) or numbers are others than a model's."""
    shapes = [f"{key} {tuple(there)}, the model has {tuple(here)}" for key, (there, here) in other.items()]
    faults = {"missing": missing, "unexpected": unexpected, "of another shape": shapes, "not of floating point": whole}
    if found := [f"{fault}: {', '.join(sorted(keys))}" for fault, keys in faults.items() if keys]:
        raise ValueError(f"{what}; {'; '.join(found)}")


def is_decoder(document: Any) -> bool:
    """Whether the config.json of a folder is as a decoder wrote it, so that it is read as one."""
    return isinstance(document, dict) and (document.get("model_type") == DECODER or "decoder_config" in document)


def read_config(path: Path) -> ModelConfig:
    """The configuration in a decoder's folder."""
    document = read_json(path)
    if not is_decoder(document):
        raise ValueError(f"{path} is not the configuration of a decoder: it has no field decoder_config")
    try:
        if document.get("format") != FORMAT:
            raise ValueError(f"format is {document.get('format')!r}, this version reads {FORMAT}; save it anew")
        if not isinstance(document.get("decoder_config"), dict):
            raise ValueError(
                f"decoder_config must hold the fields of a decoder, got {document.get('decoder_config')!r}"
            )
        if document.get("model_type") != DECODER:
            return read_graft(document)
        check_names(document, dict.fromkeys(("model_type", "format", "decoder_config")), "a decoder's config.json")
        return ModelConfig.from_dict(document["decoder_config"], "a decoder")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file; one that the system refuses is a `FileError` that names it."""
    with system_errors(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; one that is damaged is a `ValueError` that names it."""
    with file_errors(path, "read"):
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"the weights in {path} cannot be read: {str(error).splitlines()[0]}") from error


@contextlib.contextmanager
def system_errors(path: Path) -> Iterator[Any]:
    """Turn the refusals that safetensors and tokenizers word themselves into the system's."""
    with file_errors(path):
        try:
            yield
        except Exception as error:  # tokenizers raises no kind of its own
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def write_loader(folder: str | os.PathLike[str]) -> None:
    """Add the module and the configuration's `auto_map` to a folder saved by `save_pretrained`."""
    path = Path(folder)
    write_text(path / f"{MODULE}.py", CODE)
    document = {**read_json(path / CONFIG), "auto_map": AUTO_MAP}
    write_text(path / CONFIG, json.dumps(document, indent=2, sort_keys=True) + "\n")  # some families have infinities
