"""The cluster as its devices describe it, to simulate a plan away from the planner."""

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
from hepti_mqtt.cost.profiles import (
    Cluster,
    DeviceProfile,
    Link,
    PeerLink,
    frame_cost,
    make_cluster,
    profile_from_caps,
    symmetric_peer_links,
    with_frame_costs,
)
from hepti_mqtt.errors import ConfigError, RequestError
from hepti_mqtt.models.shapes import ImageInput, TextInput
from hepti_mqtt.protocol.messages import Heartbeat, LinkReport, endpoint
from hepti_mqtt.runtime.coordinator.fleet import PLAUSIBLE, implausible_caps, sanitize_heartbeat
from hepti_mqtt.service.requests import read_input
from hepti_mqtt.spec import Spec

LEAST_SLOWDOWN: Final = 0.05  # lowest slowdown of a device in a forecast


def unusable_reason(device: Mapping[str, Any]) -> str | None:
    """Return why the planner uses a device for no plan, None if it may."""
    if unread := device.get("caps_unread"):
        return f"its capabilities cannot be read ({unread[:200]}); install the planner's version there"
    if device["status"] == "online" and device.get("caps_boot", device["boot"]) != device["boot"]:
        return "its capabilities are those of an earlier start; restart the agent there"
    if "curves" not in device:
        none = "It has not published its capabilities, or your login may not read them. Restart its agent."
        return none if device["status"] == "online" else None
    wrong = implausible_caps(device["device"], device["curves"], device["memory_budget_bytes"])
    return wrong and f"its capabilities cannot be right ({wrong[:200]}); restart the agent there, or update it"


def sanitize_device(device: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return a device without the implausible values of its heartbeat, and what was wrong."""
    heartbeat = device.get("heartbeat")
    if heartbeat is None:
        return dict(device), None
    peers = {name: LinkReport(**report) for name, report in heartbeat.get("peers", {}).items()}
    kept, wrong = sanitize_heartbeat(Heartbeat(**{**heartbeat, "peers": peers}))
    links = {name: report._asdict() for name, report in kept.peers.items()}
    return {
        **device,
        "heartbeat": {**heartbeat, **{key: getattr(kept, key) for key in PLAUSIBLE}, "peers": links},
    }, wrong


def usable(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the devices found by `Hepti.devices` that the planner would use, sanitized."""
    return [sanitize_device(device)[0] for device in found if unusable_reason(device) is None]


def cluster_of_devices(found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Cluster:
    """Return the cluster of the devices `names`.

    found: the `usable` devices of a site. Raises ConfigError if one of `names` is missing or has no speed curves.
    """
    by_name = {d["device"]: d for d in found if "curves" in d}
    missing = [n for n in names if n not in by_name]
    if missing:
        raise ConfigError(
            f"devices of the plan are not there any more, or refused: {', '.join(missing)}; see `hepti devices`, and "
            "try again"
        )
    profiles: dict[str, DeviceProfile] = {}
    links, peers = {}, {}
    for name in names:
        device = by_name[name]
        hb = device.get("heartbeat") or {}
        profiles[name] = profile_from_caps(
            name,
            device["curves"],
            device["memory_budget_bytes"],
            max(hb.get("slowdown") or 1.0, LEAST_SLOWDOWN),
            frame_cost(hb.get("peer_frame_s"), hb.get("peer_byte_s")),
        )
        rate = hb.get("bandwidth_bytes_per_s") or Link().up_bytes_per_s
        links[name] = Link((hb.get("round_trip_s") or 2 * Link().latency_s) / 2, rate, rate)
        peers[name] = {
            target: PeerLink(report["round_trip_s"] / 2, report["bytes_per_s"])
            for target, report in (hb.get("peers") or {}).items()
        }
    endpoints = {name: place for name in names if (place := endpoint(by_name[name].get("endpoint")))}
    profiles = with_frame_costs(profiles, [name for name, place in endpoints.items() if not place.loopback])
    return replace(
        make_cluster(profiles, links), endpoints=frozenset(endpoints), peer_links=symmetric_peer_links(peers)
    )


# ----------------------------------------------------------------------------------------------------------------------
# To check answers: seeded inputs and the single-device NumPy reference.


PATCHES: Final = 9  # colour patches along a side of a photograph
NOISE: Final = 4.0  # sensor noise, of 256 steps
QUALITY: Final = 90


def random_input(spec: Spec, count: int, seed: int, photographs: bool = False) -> dict[str, Any]:
    """Return `count` seeded random token ids, or pictures for an image model.

    photographs: JPEG files as cameras make them, instead of PNG files of noise, which every decoder reads alike.
    """
    rng = np.random.default_rng(seed)
    reads = spec.input_spec
    if isinstance(reads, TextInput):
        if count > reads.longest:
            raise RequestError(f"{count} tokens are more than the {reads.longest} that the model reads")
        return {"ids": rng.integers(0, reads.vocab, count).tolist()}
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
    """Return blurred colour patches with the noise that gives the file a usual size."""
    from PIL import Image

    patches = Image.fromarray(rng.integers(0, 256, (PATCHES, PATCHES, 3)).astype(np.uint8))
    seen = np.asarray(patches.resize((size, size), Image.Resampling.BICUBIC), np.float32)
    pixels = np.clip(seen + rng.normal(0, NOISE, seen.shape), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY, subsampling=0)
    return buffer.getvalue()


def reference(checkpoint: Checkpoint, body: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return the reference's final hidden states [m, h]."""
    prepared = read_input(checkpoint, {**body, "want": "hidden"})
    hidden, _ = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
    return np.asarray(hidden, np.float32)
