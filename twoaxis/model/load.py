"""A model from a folder: a decoder that training saved, or a model of transformers with a stream in it.

The classes are our own, so no code of the folder is run; weights are read from safetensors only; nothing is fetched.
What is missing or does not fit is a `ValueError` that says what to do.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoaxis.base.files import read_json
from twoaxis.base.machine import pick_device

if TYPE_CHECKING:
    from twoaxis.model.running import Model

DECODER = "twoaxis_decoder"
KINDS = (DECODER, "twoaxis", "twoaxis_graft")
"""Values of model_type in the config.json of our folders."""


VERBOSITY = "TRANSFORMERS_VERBOSITY"
"""What transformers reads when it is imported."""


def quiet() -> None:
    """Keep transformers' own bars and notes off the terminal, which belongs to the command; it is not imported here."""
    if "transformers" not in sys.modules:
        os.environ.setdefault(VERBOSITY, "error")
        return
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Context manager that does the same while it is active."""
    if "transformers" not in sys.modules:
        said = os.environ.get(VERBOSITY)
        quiet()
        try:
            yield
        finally:
            if said is None:
                os.environ.pop(VERBOSITY, None)
        return
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    quiet()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load_model(folder: str | Path, device: str | None = None) -> Model:
    """The model of a folder, in the dtype it was saved in, ready to be used.

    Args:
        folder: written by training, `retrofit` or `save_pretrained`.
        device: where to put it; None is a GPU where there is one.
    """
    kind, path = check_folder(folder), Path(folder)
    target = pick_device(device)
    if kind == DECODER:
        from twoaxis.model.save import load_decoder

        return load_decoder(path).to(target).eval()
    return _load_transformers(kind, path).to(target).eval()


def _load_transformers(kind: str, path: Path) -> Any:
    from twoaxis.data.tokenizer import need_transformers

    need_transformers()
    import transformers  # noqa: F401  before `quietly`, which silences what is imported
    from safetensors import SafetensorError

    if kind == "twoaxis":
        from twoaxis.model.hf_model import TwoAxisForCausalLM
    else:
        from twoaxis.model.graft import TwoAxisForCausalLM
    try:
        with quietly():
            return TwoAxisForCausalLM.from_pretrained(path, dtype="auto", use_safetensors=True, local_files_only=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights in {path} cannot be read: {str(error).splitlines()[0]}") from error


def check_folder(folder: str | Path) -> str:
    """The kind of model in a folder, without importing anything heavy; one that has none of ours is refused."""
    path = Path(folder)
    if not path.exists():
        raise ValueError(f"there is no folder {path}")
    if not path.is_dir():
        raise ValueError(f"{path} is a file; give the folder that has config.json and the weights")
    config = path / "config.json"
    if not config.is_file():
        raise ValueError(f"{path} has no config.json; give a folder that holds a twoaxis model")
    document = read_json(config)
    kind = document.get("model_type") if isinstance(document, dict) else None
    if kind not in KINDS:
        raise ValueError(
            f"{path} is not a twoaxis model: model_type in its config.json is {kind!r}; "
            "twoaxis retrofit makes one of a model of transformers"
        )
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{path} has no weights: there is no .safetensors file in it, and no other kind is read")
    return kind
