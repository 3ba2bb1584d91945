"""A model from a folder: a decoder that training saved, or a model of transformers with a stream in it.

The classes are our own, so no code of the folder is run; weights are read from safetensors only; nothing is fetched.
What is missing or does not fit is a `ValueError` that says what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twoaxis.base.files import read_json, user_path
from twoaxis.base.machine import pick_device, quietly
from twoaxis.base.plugins import check_origins
from twoaxis.depth.registry import STREAMS
from twoaxis.sequence.registry import MIXERS

if TYPE_CHECKING:
    from twoaxis.model.decoder import Model

KINDS = ("twoaxis", "twoaxis_decoder")
"""Values of model_type in the config.json of our folders."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
"""Files of weights that are never loaded."""


def load_model(folder: str | Path, device: str | None = None) -> Model:
    """The model of a folder, in the dtype it was saved in, ready to be used on `device`; None is a GPU where there is
    one. Training, `retrofit` and `save_pretrained` write such folders."""
    path, target = check_folder(folder), pick_device(device)
    from twoaxis.model.save import is_decoder, load_decoder

    if is_decoder(read_json(path / "config.json")):
        return load_decoder(path).to(target).eval()
    return _load_graft(path).to(target).eval()


def _load_graft(path: Path) -> Any:
    from twoaxis.data.tokenizer import need_transformers

    need_transformers()
    import transformers  # noqa: F401  before `quietly`, which silences what is imported
    from safetensors import SafetensorError

    from twoaxis.model.graft import TwoAxisConfig, TwoAxisForCausalLM

    asked: dict[str, Any] = {"dtype": "auto", "use_safetensors": True, "local_files_only": True}
    try:
        with quietly():
            config = TwoAxisConfig.from_pretrained(path, local_files_only=True)
            return TwoAxisForCausalLM.from_pretrained(path, config=config, **asked)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights in {path} cannot be read: {str(error).splitlines()[0]}") from error
    except Exception as error:  # whatever a family does with a field that it did not expect
        line = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} holds no model such as its config.json says: {line}") from error


def model_folder(folder: str | Path) -> Path:
    """The folder of a model, which a run has in `model`."""
    path = user_path(folder)
    inside = not (path / "config.json").is_file() and (path / "model" / "config.json").is_file()
    return path / "model" if inside else path


def check_folder(folder: str | Path) -> Path:
    """The folder of a model, or of a run, which has it in `model`; what is no model of ours is refused.

    Nothing heavy is imported.
    """
    path = Path(folder)
    if not path.exists():
        raise ValueError(f"there is no folder {path}; give that of a saved model, or the --out of twoaxis train")
    if not path.is_dir():
        raise ValueError(f"{path} is a file; give the folder that has config.json and the weights")
    path = model_folder(path)
    config = path / "config.json"
    if not config.is_file():
        raise ValueError(no_model(path))
    document = read_json(config)
    kind = document.get("model_type") if isinstance(document, dict) else None
    if kind not in KINDS:
        raise ValueError(
            f"{path} is not a twoaxis model: model_type in its config.json is {kind!r}; make one of it with: "
            f"twoaxis retrofit {path} --stream denseformer --out {path.name}-denseformer"
        )
    check_origins(path, (*STREAMS.names(), *MIXERS.names()))
    weight_files(path)
    return path


def no_model(path: Path) -> str:
    """Why a folder without config.json holds no model, by the other files that it has."""
    if (path / "compare.json").is_file():
        models = sorted(path.glob("runs/**/model/config.json"))
        first = f", such as {models[0].parent}" if models else "; none is finished yet"
        return f"{path} is a comparison; name the model of one of its runs{first}"
    if (path / "run.json").is_file():
        return f"{path} is a run without a model: it is not finished, or was made with --no-save-model"
    return f"{path} has no config.json; give the folder of a saved model, or the --out of twoaxis train"


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, all of them there."""
    index, whole = path / "model.safetensors.index.json", path / "model.safetensors"
    if whole.is_file():
        return [whole]
    if index.is_file():
        document = read_json(index)
        found = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
            raise ValueError(f"{index} has no weight_map, which says by key in which file each tensor is")
        names = sorted(set(found.values()))
        if missing := [name for name in names if Path(name).name != name or not (path / name).is_file()]:
            listed = ", ".join(map(repr, missing[:3]))
            raise ValueError(f"{path} lacks {len(missing)} of {len(names)} files of weights: {listed}")
        return [path / name for name in names]
    if pickles := [file.name for pattern in PICKLES for file in path.glob(pattern)]:
        raise ValueError(
            f"{path} has its weights in a pickle ({pickles[0]}), which is never loaded here; save them as safetensors"
        )
    raise ValueError(f"{path} has no weights: neither model.safetensors nor model.safetensors.index.json is there")
