"""Where a pretrained model comes from: a folder, a GGUF file, a name on the hub, or a model at hand.

Weights are read from safetensors or GGUF only, never from a pickle; no code of a checkpoint is run. A name is looked up
on the hub only if no file or folder has it. What is missing or broken is a `ValueError` that says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoaxis.base.files import file_sha256, user_path
from twoaxis.base.machine import needs
from twoaxis.data.tokenizer import has_tokenizer
from twoaxis.model.decoder_as_graft import GRAFT
from twoaxis.model.graft_survey import first_line
from twoaxis.model.load import KINDS, model_folder, no_model, weight_files
from twoaxis.model.save import check_keys

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase
    from transformers.modeling_utils import PreTrainedModel

    from twoaxis.model.config import Kinds

PLAIN = ("standard", None)
"""Stream and mixer of a model that is its family's own."""
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True)
class Source:
    """A pretrained model that can be loaded."""

    name: str
    """As the user gave it."""
    kind: str
    """folder, gguf, hub or model."""
    config: PreTrainedConfig
    """Its configuration."""
    files: tuple[Path, ...] = ()
    """Its weights; none for a model at hand."""
    model: PreTrainedModel | None = None
    """The model at hand."""
    ours: bool = False
    """Whether training saved it here, with the plain residual: its family's model behind a prefix of the keys."""

    def load(self, dtype: torch.dtype | None) -> PreTrainedModel:
        """The model itself, in evaluation mode; `dtype` None is as stored."""
        if self.model is not None:
            return self.model
        import torch
        import transformers

        more: dict[str, Any] = {"use_safetensors": True}
        if self.kind == "gguf":
            more = {"gguf_file": self.files[0].name}
            if hasattr(transformers, "GgufConfig"):  # versions without it know plain weights alone
                more["quantization_config"] = transformers.GgufConfig(dequantize=True)
            dtype = dtype or torch.float32  # of a file that has several
        if self.ours:
            more |= {"config": self.config, "key_mapping": {r"^backbone\.": ""}}
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                self.files[0].parent,
                dtype="auto" if dtype is None else dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **more,
            )
        except Exception as error:  # of broken files, and whatever a family does with a field that it did not expect
            raise ValueError(f"the weights of {self.name} cannot be read: {first_line(error)}") from error
        model, info = loaded
        missing, unexpected = (
            [key for key in info[f"{what}_keys"] if "rotary_emb.inv_freq" not in key]
            for what in ("missing", "unexpected")
        )
        other = {key: (there, here) for key, there, here in info["mismatched_keys"]}
        check_keys(f"the weights of {self.name} do not fit its configuration", missing, unexpected, other)
        return model.eval()

    def shape(self) -> tuple[int, Kinds]:
        """Width and sub-layers to choose a start with before weights are read; the layers themselves decide later."""
        text = self.config.get_text_config(decoder=True)
        blocks, width = getattr(text, "num_hidden_layers", None), getattr(text, "hidden_size", None)
        if not isinstance(blocks, int) or not isinstance(width, int):
            raise ValueError(f"the configuration of {self.name} says neither its layers nor its width")
        return width, [("attention", "mlp")] * blocks

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Its tokenizer, if it has one."""
        if not self.files or (self.kind != "gguf" and not has_tokenizer(self.files[0].parent)):
            return None
        from transformers import AutoTokenizer

        more: dict[str, Any] = {"gguf_file": self.files[0].name} if self.kind == "gguf" else {}
        more |= {"local_files_only": True, "trust_remote_code": False, "use_fast": True}
        try:
            return AutoTokenizer.from_pretrained(self.files[0].parent, **more)
        except Exception as error:  # tokenizers raises bare Exceptions on files it cannot parse
            raise ValueError(f"the tokenizer of {self.name} cannot be read: {first_line(error)}") from error

    def digest(self) -> dict[str, str]:
        """SHA-256 of every file of weights, by name; of the tensors for a model at hand."""
        if self.model is None:
            return {path.name: file_sha256(path) for path in self.files}
        import torch

        found = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return {"state_dict": found.hexdigest()}


def open_source(given: str | Path | PreTrainedModel) -> Source:
    """Find a source and read its configuration, but not yet its weights.

    Args:
        given: a folder, a GGUF file, a name on the hub, or a transformers model.
    """
    if not isinstance(given, str | Path):
        return _at_hand(given)
    name, path = str(given), user_path(given)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"{path} is a file but no .gguf; give a folder with config.json and safetensors")
        return _gguf(name, path)
    if path.is_dir():
        path = model_folder(path)
        if not (path / "config.json").is_file():
            found = sorted(path.glob("*.gguf"))
            if len(found) == 1:
                return _gguf(name, found[0])
            if found:
                raise ValueError(f"{path} has {len(found)} GGUF files; name one of them: {found[0].name}, ...")
        return _folder(name, path, "folder")
    if not HUB_NAME.fullmatch(name):
        raise ValueError(f"there is no folder or file {given}, and it is no name on the hub (OWNER/NAME) either")
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # every kind of trouble a network has
        raise ValueError(
            f"there is no folder or file {name}, and the hub could not be asked for it ({type(error).__name__}: "
            f"{first_line(error)}); without a network give a folder or a GGUF file"
        ) from error
    return _folder(name, path, "hub")


def _check_precision(name: str, quantised: Any) -> None:
    """Refuse weights that are quantised: a retrofit writes the numbers that it has read."""
    if quantised is not None:
        how = f" ({quantised['quant_method']})" if isinstance(quantised, dict) and "quant_method" in quantised else ""
        raise ValueError(
            f"the weights of {name} are quantised{how}; give the checkpoint in full precision, or put the stream on "
            "the model in memory with twoaxis.graft"
        )


def _check_family(model_type: Any, kind: str | None = None) -> None:
    """Refuse what transformers has no causal language model for, by its type or the class of a model at hand.

    Whether its layers carry a stream is seen later.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    from twoaxis.model.graft_config import check_family

    if kind in known.values():
        return
    if model_type in KINDS:
        raise ValueError(
            "this is a twoaxis model already; retrofit takes the checkpoint it came from, or one trained with the "
            "plain residual"
        )
    check_family(model_type)
    if kind is not None:
        raise ValueError(f"retrofit takes a causal language model, got {kind}")


def _at_hand(model: Any) -> Source:
    from transformers.modeling_utils import PreTrainedModel

    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"retrofit takes a path, a name on the hub or a transformers model, got {kind}")
    _check_family(model.config.model_type, kind)
    name = model.name_or_path or kind
    _check_precision(name, getattr(model, "hf_quantizer", None))
    return Source(name, "model", model.config, model=model)


def _gguf(name: str, path: Path) -> Source:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except ImportError as error:
        raise ValueError(needs("a GGUF file", "gguf", "gguf")) from error
    except Exception as error:  # the reader of GGUF raises whatever the broken bytes lead to
        raise ValueError(f"{path} cannot be read as GGUF: {first_line(error)}") from error
    _check_family(config.model_type)
    return Source(name, "gguf", config, (path,))


def _folder(name: str, path: Path, kind: str) -> Source:
    from twoaxis.model.graft_config import family_config

    file = path / "config.json"
    if not file.is_file():
        raise ValueError(no_model(path))
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {first_line(error)}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{file} is not a configuration: it holds a {type(document).__name__}")
    if ours := document.get("model_type") == GRAFT and (document.get("stream"), document.get("mixer")) == PLAIN:
        document = document.get("text_config", {})
    try:
        _check_family(document.get("model_type"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if document.get("auto_map"):
        raise ValueError(f"{path} wants code of its own to be run (auto_map in config.json), which is never done here")
    if (path / "adapter_config.json").exists():
        raise ValueError(f"{path} has an adapter (adapter_config.json); merge it into the weights first")
    _check_precision(str(path), document.get("quantization_config"))
    files = tuple(weight_files(path))
    try:
        config = family_config(document)
    except ValueError as error:
        raise ValueError(f"{file} is not a configuration that transformers takes: {error}") from error
    return Source(name, kind, config, files, ours=ours)
