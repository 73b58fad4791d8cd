"""Finds a model's directory for a path, and explains files and directories that are no readable model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hepti_mqtt.core.errors import ModelError

_POINTER: Final = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES: Final = 1024  # more than any pointer has
_COPY: Final = "copy it again"
# First bytes of other formats than safetensors, JSON and ONNX: the format, and what to do.
_MAGIC: Final[Sequence[tuple[bytes, str]]] = (
    (b"<", "it is a web page: download the file itself (its address has /resolve/, not /blob/)"),
    (b"PK\x03\x04", "it is a file of PyTorch: give it its name pytorch_model.bin"),
    (b"GGUF", "it is a GGUF file: give it a name that ends with .gguf"),
    (b"\x89HDF", "it is an HDF5 file of TensorFlow: download model.safetensors instead"),
)
_FETCH: Final = "run `git lfs install && git lfs pull` where it was cloned, or `hf download REPOSITORY --local-dir DIR`"

# Other programs' formats, by a file in such a directory.
_FOREIGN: Final[Sequence[tuple[str, str]]] = (
    ("adapter_model.safetensors", "an adapter (PEFT, LoRA); merge it into its base model, and give that"),
    ("openvino_model.xml", "an OpenVINO model, which OpenVINO reads; give the original model"),
    ("*.tflite", "a TensorFlow Lite model, which LiteRT reads; give the original model"),
    ("*.mlpackage", "a Core ML model; give the original model"),
    ("rust_model.ot", "a model of rust-bert; give the original model"),
    ("tf_model.h5", "a TensorFlow model; {convert}"),
    ("flax_model.msgpack", "a Flax model; {convert}"),
    ("*.pth", "a PyTorch model without safetensors; {convert}"),
    ("onnx/*.onnx", "has ONNX files in a folder; of a CNN give the file itself, as in --model NAME={path}"),
    ("*.onnx", "has ONNX files; of a CNN give the file itself, as in --model NAME={path}"),
    ("*.safetensors", "has weights in {path}; if they are the whole model, rename that file to model.safetensors"),
)
_WEIGHTS: Final = "model.safetensors"
_CONVERT: Final = (
    "many repositories have safetensors in another revision (`hf download REPOSITORY --revision refs/pr/1`); otherwise "
    "save it on a machine that has PyTorch and transformers: AutoModel.from_pretrained(DIR).save_pretrained(NEW_DIR)"
)


def model_directory(path: Path) -> Path:
    """Return a path with `~` expanded; a folder of Hugging Face's cache becomes its snapshot.

    Raises ModelError for a cache folder without a snapshot, or with several and no main one.
    """
    path = path.expanduser()
    snapshots = path if path.name == "snapshots" else path / "snapshots"
    if (path / "config.json").exists() or not snapshots.is_dir():
        return path
    copies = sorted(entry for entry in snapshots.iterdir() if entry.is_dir())
    main = snapshots.parent / "refs" / "main"
    current = snapshots / main.read_text(errors="replace").strip() if main.is_file() else None
    if current in copies:
        return current
    if len(copies) != 1:
        listed = ", ".join(str(entry) for entry in copies[:4]) or "none is there: download the model again"
        raise ModelError(f"{path} is a folder of Hugging Face's cache; give one of its snapshots ({listed})")
    return copies[0]


def repository_name(path: Path) -> str:
    """Return the name of a model's directory; of a snapshot in Hugging Face's cache that of its repository."""
    if path.parent.name == "snapshots":
        return path.parent.parent.name.rpartition("--")[2]
    return path.name


def has_safetensors(directory: Path) -> bool:
    """Return whether a directory has safetensors, one file or shards."""
    return any((directory / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))


def is_pointer(path: Path) -> bool:
    """Return whether a file is a Git LFS pointer."""
    try:
        if path.stat().st_size > _POINTER_BYTES:
            return False
        with path.open("rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def refuse_pointers(paths: Sequence[Path]) -> None:
    """Raise ModelError with the names of files that are Git LFS pointers."""
    pointers = [path for path in paths if is_pointer(path)]
    if pointers:
        what = "is a Git LFS pointer, not the file itself" if len(pointers) == 1 else "are Git LFS pointers, not files"
        raise ModelError(f"{', '.join(map(str, pointers))} {what}; {_FETCH}")


def explain_file(path: Path, needed_bytes: int | None = None) -> str:
    """Return why a file cannot be read, by its first bytes and size, and what to do; needed_bytes: by its header."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        return f"{error.strerror or error}; check the path and its permissions"
    for magic, what in _MAGIC:
        if start.startswith(magic) and not (magic == b"GGUF" and path.suffix == ".gguf"):
            return what
    if not size:
        return f"it is empty; {_COPY}"
    if needed_bytes is not None and size < needed_bytes:
        return f"it has {size:,} of {needed_bytes:,} bytes, so its copy or download was cut off; {_COPY}"
    return f"it may be an incomplete copy; {_COPY}"


def explain_directory(directory: Path) -> str:
    """Return what a directory without model.safetensors is, and what to do."""
    for pattern, what in _FOREIGN:
        first = next(iter(sorted(directory.glob(pattern))), None)
        if first is not None:
            article = "" if what.startswith("has ") else "it is "
            return article + re.sub("^has", "it has", what).format(convert=_CONVERT, path=first)
    if inner := sorted(path.parent for path in directory.glob("*/config.json") if (path.parent / _WEIGHTS).exists()):
        if (directory / "modules.json").is_file():
            return f"its weights are in {inner[0].name}, as old sentence-transformers wrote them; save the model again"
        return f"it holds other directories of models; give one of them ({', '.join(map(str, inner[:4]))})"
    return "config.json and weights are missing; copy or download the whole model directory"
