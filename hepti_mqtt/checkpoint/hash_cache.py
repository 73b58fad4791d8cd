"""Keeps the manifest of a checkpoint in the user's cache, so that a second start does not hash every weight again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import platformdirs

from hepti_mqtt.errors import WireError
from hepti_mqtt.models import TensorSource
from hepti_mqtt.wire.manifest import HASH_BYTES, Manifest

Stamp = tuple[str, int, int]


def cache_path(stamps: Iterable[Stamp], sources: Iterable[TensorSource]) -> Path:
    """Return where the manifest of these files (path, size, modification time) and tensors is kept."""
    key = hashlib.sha256(repr((list(stamps), list(sources))).encode()).hexdigest()
    return Path(platformdirs.user_cache_dir("hepti")) / "manifests" / key


def load(path: Path, model: str) -> Manifest | None:
    """Return the kept manifest under the name `model`, or None where there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, encoded = data[:HASH_BYTES], data[HASH_BYTES:]
    if hashlib.sha256(encoded).digest() != digest:
        return None
    try:
        return Manifest(model, Manifest.decode(encoded).entries)
    except WireError:
        return None


def store(path: Path, manifest: Manifest) -> None:
    """Keep a manifest; a cache that cannot be written only makes the next start slower."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(manifest.digest + manifest.encode())
                file.flush()
                # Readers see the old file or the whole new one, whoever writes at the same time.
                os.replace(file.name, path)
            except OSError:  # a full disk must not get fuller with every start
                os.unlink(file.name)
