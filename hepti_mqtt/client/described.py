"""The cluster that devices describe, for simulations outside of the planner."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.core.errors import ConfigError, RequestError
from hepti_mqtt.core.profiles import Cluster
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.cost.reported import (
    PLANNED,
    ReportedDevice,
    implausible_caps,
    reported_cluster,
    sanitize_heartbeat,
)
from hepti_mqtt.models.mel import RATE
from hepti_mqtt.models.shapes import ImageInput, TextInput
from hepti_mqtt.models.speech import ROWS_PER_S, SpeechInput
from hepti_mqtt.protocol import messages
from hepti_mqtt.service.requests import read_input
from hepti_mqtt.service.sound import wav_file


def unusable_reason(device: Mapping[str, Any]) -> str | None:
    """Return why no plan uses an online device, by the planner's rules; None for a usable device."""
    if unread := device.get("caps_unread"):
        return f"its capabilities cannot be read ({unread[:200]}); install the planner's version there"
    if device["status"] == "online" and device.get("caps_boot", device["boot"]) != device["boot"]:
        return "its capabilities are those of an earlier start; restart the agent there"
    if "curves" not in device:
        none = "it has published no capabilities, or this login may not read them; restart the agent there"
        return none if device["status"] == "online" else None
    wrong = implausible_caps(device)
    return wrong and f"its capabilities cannot be right ({wrong[:200]}); restart the agent there, or update it"


def _heartbeat(numbers: Mapping[str, Any]) -> messages.Heartbeat:
    """Return a heartbeat with the numbers that the planner reads."""
    planned: dict[str, Any] = {key: numbers.get(key) for key in PLANNED if key != "slowdown"}
    peers = {name: messages.LinkReport(**report) for name, report in (numbers.get("peers") or {}).items()}
    blank = messages.Heartbeat(0, 0, 0.0, 0, None, None, None, numbers.get("slowdown") or 1.0, 0)
    return replace(blank, peers=peers, **planned)


def sanitize_device(device: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return a device without the implausible numbers of its heartbeat, and the reason for leaving them out."""
    heartbeat = device.get("heartbeat")
    if heartbeat is None:
        return dict(device), None
    kept, wrong = sanitize_heartbeat(_heartbeat(heartbeat))
    links = {name: report._asdict() for name, report in kept.peers.items()}
    numbers = {key: getattr(kept, key) for key in PLANNED}
    return {**device, "heartbeat": {**heartbeat, **numbers, "peers": links}}, wrong


def usable(devices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the devices of `Hepti.devices` that the planner would use, without implausible numbers."""
    return [sanitize_device(device)[0] for device in devices if unusable_reason(device) is None]


def cluster_of_devices(devices: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Cluster:
    """Return the cluster of the devices `names` of a site.

    devices: the `usable` ones. Raises ConfigError if one of `names` is missing or has published no capabilities.
    """
    by_name = {d["device"]: d for d in devices if "curves" in d}
    missing = [n for n in names if n not in by_name]
    if missing:
        raise ConfigError(
            f"devices of the plan are not there any more, or refused: {', '.join(missing)}; see `hepti devices`, and "
            "try again"
        )
    reported = []
    for device in map(by_name.__getitem__, names):
        heartbeat = _heartbeat(numbers) if (numbers := device.get("heartbeat")) else None
        endpoint = messages.endpoint(device.get("endpoint"))
        name, curves, memory_bytes = device["device"], device["curves"], device["memory_budget_bytes"]
        reported.append(ReportedDevice.by_heartbeat(name, curves, memory_bytes, heartbeat, endpoint))
    return reported_cluster(reported)


# ----------------------------------------------------------------------------------------------------------------------
# Checks of answers: seeded inputs and the single-device NumPy reference.


PATCHES: Final = 9  # of colour along a side of a photograph
NOISE: Final = 4.0  # of its sensor, of 256 steps
QUALITY: Final = 90


def random_input(spec: Spec, count: int, seed: int, photographs: bool = False) -> dict[str, Any]:
    """Return `count` seeded random token ids or pictures, or noise of `count` rows for a speech model.

    photographs: JPEG files of a camera's usual size; else PNG files of noise, which all decoders read alike.
    """
    rng = np.random.default_rng(seed)
    reads = spec.input_spec
    if isinstance(reads, TextInput):
        if count > reads.longest:
            raise RequestError(f"{count} tokens are more than the {reads.longest} that the model reads")
        # The middle of a vocabulary: separators, masks and padding stand at its ends.
        ids = rng.integers(reads.vocab // 4, 3 * reads.vocab // 4, count).tolist()
        return {"ids": ids if reads.end in (None, reads.vocab) else [*ids[:-1], reads.end]}
    if isinstance(reads, SpeechInput):
        samples = max(round(min(count, reads.longest) / ROWS_PER_S * RATE), 1)
        noise = wav_file(rng.integers(-3000, 3000, samples, np.int16).tobytes())
        return {"audio": base64.b64encode(noise).decode()}
    assert isinstance(reads, ImageInput)
    file = _photograph if photographs else _noise
    pictures = [base64.b64encode(file(rng, reads.size)).decode() for _ in range(count)]
    return {"images": pictures} if count > 1 else {"image": pictures[0]}


def _noise(rng: np.random.Generator, size: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (size, size, 3)).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def _photograph(rng: np.random.Generator, size: int) -> bytes:
    """Return blurred patches of colour with as much noise as gives the file a usual size."""
    from PIL import Image

    patches = Image.fromarray(rng.integers(0, 256, (PATCHES, PATCHES, 3)).astype(np.uint8))
    smooth = np.asarray(patches.resize((size, size), Image.Resampling.BICUBIC), np.float32)
    pixels = np.clip(smooth + rng.normal(0, NOISE, smooth.shape), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY, subsampling=0)
    return buffer.getvalue()


def reference(checkpoint: Checkpoint, body: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return the reference's final hidden states [m, h] for a request."""
    prepared = read_input(checkpoint, {**body, "want": "hidden"})
    hidden, _ = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
    return np.asarray(hidden, np.float32)
