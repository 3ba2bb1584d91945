"""A model from a folder that `save_pretrained` wrote.

The classes are our own, so no code of the folder is run; weights are read from safetensors only; nothing is fetched.
What is missing or does not fit is a `ValueError` that says what to do.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from twoaxis.base.machine import pick_device

if TYPE_CHECKING:
    from twoaxis.model.hf_model import TwoAxisForCausalLM


def quiet() -> None:
    """Keep transformers' own bars and notes off the terminal, which belongs to the command."""
    from twoaxis.data.tokenizer import need_transformers

    need_transformers()
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Context manager that does the same while it is active."""
    from twoaxis.data.tokenizer import need_transformers

    need_transformers()
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    quiet()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load_model(folder: str | Path, device: str | None = None) -> TwoAxisForCausalLM:
    """The model of a folder, in the dtype it was saved in, ready to be used.

    Args:
        folder: written by `save_pretrained`.
        device: where to put it; None is a GPU where there is one.
    """
    check_folder(folder)
    from twoaxis.data.tokenizer import need_transformers

    need_transformers()
    target = pick_device(device)
    from safetensors import SafetensorError

    path = Path(folder)
    if "text_config" in json.loads((path / "config.json").read_text(encoding="utf-8")):
        from twoaxis.model.graft import TwoAxisForCausalLM
    else:
        from twoaxis.model.hf_model import TwoAxisForCausalLM
    try:
        model = TwoAxisForCausalLM.from_pretrained(path, dtype="auto", use_safetensors=True, local_files_only=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights in {path} cannot be read: {str(error).splitlines()[0]}") from error
    return model.to(target).eval()


def check_folder(folder: str | Path) -> None:
    """Refuse a folder that has no twoaxis model, without importing anything heavy."""
    path = Path(folder)
    if not path.exists():
        raise ValueError(f"there is no folder {path}")
    if not path.is_dir():
        raise ValueError(f"{path} is a file; give the folder that has config.json and the weights")
    config = path / "config.json"
    if not config.is_file():
        raise ValueError(f"{path} has no config.json; give a folder that save_pretrained of a twoaxis model wrote")
    try:
        document = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{config} cannot be read: {error}") from error
    kind = document.get("model_type") if isinstance(document, dict) else None
    if kind not in ("twoaxis", "twoaxis_graft"):
        raise ValueError(f"{path} is not a twoaxis model: model_type in its config.json is {kind!r}, not 'twoaxis'")
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{path} has no weights: there is no .safetensors file in it, and no other kind is read")
