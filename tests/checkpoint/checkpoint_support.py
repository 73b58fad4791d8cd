"""Directories of models, written anew in other ways."""

from __future__ import annotations

import json

from safetensors.numpy import load_file, save_file


def rewrite(path, change):
    """Change the stored tensors of a directory."""
    tensors = load_file(path / "model.safetensors")
    save_file(change(tensors), path / "model.safetensors")


def shard(path, parts=3):
    """Divide a directory's weights into files with an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    for i in range(parts):
        name = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        part = {k: tensors[k] for k in sorted(tensors)[i::parts]}
        save_file(part, path / name)
        weight_map.update(dict.fromkeys(part, name))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
