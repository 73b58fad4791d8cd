"""The state file for the next planner of a site: plans, and texts of kept KV caches."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from hepti_mqtt import __version__
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.config.state import PRIVATE, write_atomically
from hepti_mqtt.core.ids import PlanVersion, whole_model
from hepti_mqtt.models import largest_shape
from hepti_mqtt.planner import EarlierPlan
from hepti_mqtt.runtime.coordinator.prefixes import HeldText
from hepti_mqtt.service.record import minimal_record, read_recalled

FILE: Final = "last-state"
FORMAT: Final = 1


class LastState(NamedTuple):
    """Plans by model, and texts of KV caches on devices, oldest first."""

    plans: Mapping[str, EarlierPlan] = {}
    texts: tuple[HeldText, ...] = ()


def save_state(
    directory: Path,
    plans: Mapping[str, EarlierPlan],
    texts: Iterable[HeldText],
    checkpoints: Mapping[str, Checkpoint],
    log: logging.Logger,
) -> None:
    """Write plans and texts to the planner's directory, readable only by this user because texts are private."""
    contents = _contents(checkpoints)
    records = {name: minimal_record(checkpoints[name].spec, plan) for name, plan in plans.items()}
    held = [[t.model, contents[t.model], list(t.session[0]), t.session[1], t.ids.tolist()] for t in texts]
    body: bytes = msgpack.packb([FORMAT, __version__, records, held])
    try:
        write_atomically(directory / FILE, [hashlib.sha256(body).digest(), body], PRIVATE)
    except OSError as error:
        log.warning("plans and texts of KV caches are not saved: %s", error.strerror or error)


def read_state(directory: Path, checkpoints: Mapping[str, Checkpoint], log: logging.Logger) -> LastState:
    """Return the state of the last planner; drop texts of changed models.

    The file stays until this planner has its own plan, so that a failed start does not lose the plan.
    """
    path = directory / FILE
    try:
        data = path.read_bytes()
        checksum, body = data[: hashlib.sha256().digest_size], data[hashlib.sha256().digest_size :]
        if hashlib.sha256(body).digest() != checksum:
            raise ValueError("it is damaged")
        written, version, records, texts = msgpack.unpackb(body)
        if (written, version) != (FORMAT, __version__):
            raise ValueError(f"written by version {version}")
    except FileNotFoundError:
        return LastState()
    except (OSError, ValueError, msgpack.UnpackException) as error:
        log.warning("the state of the last planner is not used, %s: %s", path, error)
        return LastState()
    recalled = {
        n: read_recalled(record, n, checkpoints[n].spec)[1] for n, record in records.items() if n in checkpoints
    }
    plans = {name: plan for name, plan in recalled.items() if plan is not None}
    return LastState(plans, tuple(_usable_texts(texts, checkpoints, log)))


def _usable_texts(texts: list[Any], checkpoints: Mapping[str, Checkpoint], log: logging.Logger) -> Iterable[HeldText]:
    contents, changed = _contents(checkpoints), set[str]()
    for model, content, origin, number, ids in texts:
        if contents.get(model) == content:
            longest = largest_shape(checkpoints[model].spec).session_rows
            yield HeldText((PlanVersion(*origin), number), np.array(ids, np.int32), longest, model)
        else:
            changed.add(model)
    for model in sorted(changed):
        log.warning("dropped the texts of KV caches of %s: the model has changed, or is not served", model)


def _contents(checkpoints: Mapping[str, Checkpoint]) -> dict[str, bytes]:
    """Return a hash of the weights of each model and of the other models of its public name (e.g. its tower)."""
    digests = {name: checkpoint.manifest.digest for name, checkpoint in sorted(checkpoints.items())}
    return {
        name: hashlib.sha256(b"".join(d for n, d in digests.items() if whole_model(n) == whole_model(name))).digest()
        for name in digests
    }
