"""The texts whose KV caches devices keep, from one planner of a site to the next: written at its end, read once."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from hepti_mqtt import __version__
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.config.state import write_atomically
from hepti_mqtt.ids import PlanVersion, asked_name
from hepti_mqtt.models import largest_shape
from hepti_mqtt.runtime.coordinator.prefixes import HeldText

FILE: Final = "texts.json"
FORMAT: Final = 1


def contents(checkpoints: Mapping[str, Checkpoint]) -> dict[str, str]:
    """Return a hash of the weights of each model and of the further models under its name, which see for it."""
    out = dict[str, str]()
    for name in checkpoints:
        parts = [c.manifest.digest for part, c in sorted(checkpoints.items()) if asked_name(part) == asked_name(name)]
        out[name] = hashlib.sha256(b"".join(parts)).hexdigest()
    return out


def save_texts(directory: Path, texts: Iterable[HeldText], models: Mapping[str, str], log: logging.Logger) -> None:
    """Write the texts, the oldest first; models: `contents`."""
    said = [[t.model, models[t.model], *t.session[0], t.session[1], t.ids.tolist()] for t in texts]
    body = json.dumps([FORMAT, __version__, said]).encode()
    try:
        if said:
            write_atomically(directory / FILE, [hashlib.sha256(body).hexdigest().encode(), b"\n", body])
    except OSError as error:
        log.warning("the texts of KV caches are not saved: %s", error.strerror or error)


def take_texts(directory: Path, checkpoints: Mapping[str, Checkpoint], log: logging.Logger) -> list[HeldText]:
    """Return the texts that the last planner has saved, the oldest first, and delete their file.

    Texts of a model that has changed are left out.
    """
    path = directory / FILE
    try:
        checksum, _, body = path.read_bytes().partition(b"\n")
        path.unlink()
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("the texts of KV caches cannot be read: %s", error.strerror or error)
        return []
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        log.warning("dropped the texts of KV caches: %s is damaged", path)
        return []
    written, version, said = json.loads(body)
    if (written, version) != (FORMAT, __version__):
        log.warning("dropped the texts of KV caches: version %s has written them", version)
        return []
    models, out, changed = contents(checkpoints), list[HeldText](), set[str]()
    for model, content, boot, version_number, number, ids in said:
        if models.get(model) != content:
            changed.add(model)
            continue
        longest = largest_shape(checkpoints[model].spec).session_rows
        session = (PlanVersion(boot, version_number), number)
        out.append(HeldText(session, np.array(ids, np.int32), longest, model))
    for model in sorted(changed):
        log.warning("dropped the texts of KV caches of %s: the model has changed, or is not served", model)
    return out
