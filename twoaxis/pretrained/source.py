"""Where a pretrained model comes from: a folder, a GGUF file, a name on the hub, or a model at hand.

Weights are read from safetensors or GGUF only, never from a pickle; no code of a checkpoint is run. A name is looked up
on the hub only if no file or folder has it. What is missing or broken is a `ValueError` that says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoaxis.base.files import file_sha256
from twoaxis.base.registry import did_you_mean
from twoaxis.data.tokenizer import has_tokenizer
from twoaxis.model.load import weight_files

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase
    from transformers.modeling_utils import PreTrainedModel

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


@dataclass
class Source:
    """A pretrained model that can be loaded."""

    name: str
    """As the user gave it."""
    kind: str
    """folder, gguf, hub or model."""
    config: PreTrainedConfig
    """Its configuration."""
    folder: Path | None = None
    """Where its files are; None for a model at hand."""
    gguf: str | None = None
    """The GGUF file in the folder."""
    model: PreTrainedModel | None = None
    """The model at hand."""
    files: list[Path] = field(default_factory=list)
    """Its weights."""

    def load(self, dtype: torch.dtype | None) -> PreTrainedModel:
        """The model itself, in evaluation mode; `dtype` None is as stored."""
        if self.model is not None:
            return self.model
        return _load(self, dtype)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Its tokenizer, if it has one."""
        if self.folder is None:
            return None
        if self.gguf is None and not has_tokenizer(self.folder):
            return None
        from transformers import AutoTokenizer

        extra = {} if self.gguf is None else {"gguf_file": self.gguf}
        try:
            return AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False, use_fast=True, **extra
            )
        except Exception as error:  # tokenizers raises bare Exceptions on files it cannot parse
            raise ValueError(f"the tokenizer of {self.name} cannot be read: {_line(error)}") from error

    def digest(self) -> dict[str, str]:
        """SHA-256 of every file of weights, by name; of the tensors for a model at hand."""
        if self.model is not None:
            return {"state_dict": _digest_state(self.model)}
        return {path.name: file_sha256(path) for path in self.files}


def open_source(given: str | Path | PreTrainedModel) -> Source:
    """Find a source and read its configuration, but not yet its weights.

    Args:
        given: a folder, a GGUF file, a name on the hub, or a transformers model.
    """
    if not isinstance(given, str | Path):
        return _at_hand(given)
    path = Path(given).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"{path} is a file but no .gguf; give a folder with config.json and safetensors")
        return _gguf(str(given), path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = sorted(path.glob("*.gguf"))
            if len(found) == 1:
                return _gguf(str(given), found[0])
            if found:
                raise ValueError(f"{path} has {len(found)} GGUF files; name one of them: {found[0].name}, ...")
        return _folder(str(given), path, "folder")
    if HUB_NAME.fullmatch(str(given)):
        return _folder(str(given), _download(str(given)), "hub")
    raise ValueError(f"there is no folder or file {given}, and it is no name on the hub (OWNER/NAME) either")


def check_family(model_type: Any) -> None:
    """Refuse what transformers has no causal language model for; whether its layers carry a stream is seen later."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    if model_type in ("twoaxis", "twoaxis_decoder"):
        raise ValueError("this is a twoaxis model already; retrofit takes the checkpoint it came from")
    if model_type not in known:
        hint = did_you_mean(str(model_type), sorted(known))
        raise ValueError(f"model_type {model_type!r} is no causal language model of transformers{hint}")


def _at_hand(model: Any) -> Source:
    from transformers.modeling_utils import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"retrofit takes a path, a name on the hub or a transformers model, got {type(model).__name__}"
        )
    check_family(model.config.model_type)
    if not type(model).__name__.endswith("ForCausalLM"):
        raise ValueError(f"retrofit takes a causal language model, got {type(model).__name__}")
    return Source(name=model.name_or_path or type(model).__name__, kind="model", config=model.config, model=model)


def _gguf(name: str, path: Path) -> Source:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except ImportError as error:
        raise ValueError("GGUF files need the package gguf: pip install gguf") from error
    except Exception as error:  # the reader of GGUF raises whatever the broken bytes lead to
        raise ValueError(f"{path} cannot be read as GGUF: {_line(error)}") from error
    check_family(config.model_type)
    return Source(name=name, kind="gguf", config=config, folder=path.parent, gguf=path.name, files=[path])


def _folder(name: str, path: Path, kind: str) -> Source:
    from transformers import AutoConfig

    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} has no config.json; give a folder that save_pretrained wrote")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {_line(error)}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{file} is not a configuration: it holds a {type(document).__name__}")
    check_family(document.get("model_type"))
    if document.get("auto_map"):
        raise ValueError(f"{path} wants code of its own to be run (auto_map in config.json), which is never done here")
    if (path / "adapter_config.json").exists():
        raise ValueError(f"{path} has an adapter (adapter_config.json); merge it into the weights first")
    files = weight_files(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # strict configurations raise their own kinds
        raise ValueError(f"{file} is not a configuration that transformers takes: {_line(error)}") from error
    return Source(name=name, kind=kind, config=config, folder=path, files=files)


def _download(name: str) -> Path:
    """The files of a repository on the hub, from the network or from its cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # every kind of trouble a network has
        raise ValueError(
            f"there is no folder or file {name}, and the hub could not be asked for it ({type(error).__name__}: "
            f"{_line(error)}); without a network give a folder or a GGUF file"
        ) from error


def _load(source: Source, dtype: torch.dtype | None) -> PreTrainedModel:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    assert source.folder is not None
    more: dict[str, Any] = {"use_safetensors": True}
    if source.gguf is not None:
        from transformers import GgufConfig

        more = {"gguf_file": source.gguf, "quantization_config": GgufConfig(dequantize=True)}
        dtype = dtype or torch.float32  # of a file that has several
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.folder,
            dtype="auto" if dtype is None else dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **more,
        )
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise ValueError(f"the weights of {source.name} cannot be read: {_line(error)}") from error
    model, info = loaded
    for what in ("missing", "mismatched", "unexpected"):
        keys = sorted(str(key) for key in info[f"{what}_keys"] if "rotary_emb.inv_freq" not in str(key))
        if keys:
            raise ValueError(
                f"the weights of {source.name} do not fit its configuration; {what}: {', '.join(keys[:5])}"
            )
    return model.eval()


def _digest_state(model: PreTrainedModel) -> str:
    import torch

    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
