"""Site files: a user's description of devices and links for `hepti simulate` (docs/guide/site-files.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.config import load_yaml, mapping
from hepti_mqtt.config.settings import CONFIG_DIR, bundled_sites, find_bundled_site, nearest
from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.ids import check_name
from hepti_mqtt.core.plan import DevicePair
from hepti_mqtt.core.profiles import Cluster, Curve, DeviceProfile, Link, PeerLink, Power, make_cluster
from hepti_mqtt.core.storage import BLOCK_STORAGES, PRODUCTS, STORAGES

_ROWS: Final = (1, 8, 16, 32, 64, 128, 256, 512)
_WATTS: Final = ("compute_watts", "link_watts")
_FRAMES: Final = ("frame_ms", "frame_ms_per_mb")
_DEVICE: Final = {
    *("gflops", "int8_gflops", "memory_mib", "memory_gb_per_s", "mbit", "round_trip_ms", "mesh", "shared"),
    *(*_FRAMES, *_WATTS, "storages", "board"),
}
#: Links of sites that are named by board and count.
NETWORKS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gigabit": {"mbit": 940.0, "round_trip_ms": 0.5},
    "100mbit": {"mbit": 94.0, "round_trip_ms": 0.6},
    "wifi": {"mbit": 200.0, "round_trip_ms": 4.0, "shared": True},
}
_COUNTS: Final = ("one", "two", "three", "four", "five", "six", "seven", "eight")
_NAMED: Final = re.compile(rf"({'|'.join(_COUNTS)}|[1-9][0-9]?)-(.+?)(?:-({'|'.join(NETWORKS)}))?")
_RATES: Final = {"gflops", "int8_gflops", "memory_gb_per_s"}
#: Bytes of a stored value.
_VALUE_BYTES: Final = {"w8a8": 1.0, "w8a32": 1.0} | {
    name: STORAGES[name].block_bytes / STORAGES[name].block for name in ("f32", "f16", *BLOCK_STORAGES)
}
#: FLOPs of unpacking one value, once for all rows; fitted to an agent's own measurement with AVX-512.
_UNPACK_FLOPS: Final = {"q4_0": 1.0, "q4_1": 1.0, "q4_k": 1.0, "q5_k": 2.0, "q6_k": 8.0}
# Costs of frames and ops on a device of _FITTED_GFLOPS, i.e. 0.31 of a core, measured by agents; the cost of bytes is
# fitted without loopback. For other devices these costs scale with matmul time.
_FITTED_GFLOPS: Final = 24.6
_FITTED_FRAME_MS: Final = 0.035
_FITTED_FRAME_MS_PER_MB: Final = 5.0
_FITTED_OP_MS: Final = 0.0004
# Relative cost of a frame over the broker, which passes through Python and a network thread.
_BROKER_FRAME: Final = 7.0
_TOP: Final = {"defaults", "devices", "broker_mbit", "peers", "deadline_ms"}
_PEER: Final = {"between", "mbit", "round_trip_ms"}


@cache
def boards() -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of the bundled boards by name."""
    fields: Mapping[str, Mapping[str, Any]] = load_yaml(CONFIG_DIR / "boards.yaml")
    return fields


def find_site(given: Path) -> Cluster:
    """Return the cluster of a site file, of a bundled site, or of a name such as four-pi5-8gb-wifi.

    Raises ConfigError for an invalid file or an unknown name.
    """
    match = _NAMED.fullmatch(given.name)
    if given.exists() or match is None or given.name in bundled_sites() or match[2] not in boards():
        return load_site(find_bundled_site(given, boards() if match else ()))
    count = _COUNTS.index(match[1]) + 1 if match[1] in _COUNTS else int(match[1])
    return board_site(match[2], count, match[3] or "gigabit")


def board_site(board: str, count: int, network: str = "gigabit") -> Cluster:
    """Return the cluster of `count` equal boards. Raises ConfigError for an unknown board."""
    devices = {f"{board}-{number + 1}": {"board": board} for number in range(count)}
    return _cluster(Path(f"{count}-{board}"), {"defaults": NETWORKS[network], "devices": devices})


def load_site(path: Path) -> Cluster:
    """Return the cluster of a site file. Raises ConfigError with file, device and key.

    board: one of `boards()`; defaults for the device's fields.
    broker_mbit: rate of the broker's link, by default the fastest device's rate.
    mesh: false for a device without direct connections. shared: true for devices on one medium, such as Wi-Fi.
    int8_gflops: for products with activations in int8, by default `gflops`. storages: rates per storage.
    frame_ms, frame_ms_per_mb: processor time of a frame to or from a peer.
    peers: links of pairs; other links follow from the two devices.
    compute_watts, link_watts: above idle; deadline_ms: of an answer; all for `coedge/energy`.
    """
    return _cluster(path, load_yaml(path))


def _cluster(path: Path, data: Any) -> Cluster:
    """Return the cluster of a site file's content."""
    if not isinstance(data, Mapping) or not isinstance(data.get("devices"), Mapping) or not data["devices"]:
        raise ConfigError(f"{path}: needs a mapping `devices:` with at least one device")
    _reject_unknown_keys(path, "the file", data, _TOP)
    defaults = mapping(f"{path}: `defaults`", data.get("defaults") or {})
    devices, links = {}, {}
    flagged: dict[str, set[str]] = {"mesh": set(), "shared": set()}
    for name, fields in data["devices"].items():
        check_name("device", name)
        own = mapping(f"{path}: device {name}", fields or {})
        merged = {**defaults, **_board(path, name, own.get("board", defaults.get("board"))), **own}
        _reject_unknown_keys(path, name, merged, _DEVICE)
        devices[name] = _profile(path, name, merged)
        rate = _number(path, name, merged, "mbit", 940.0) * 1e6 / 8
        links[name] = Link(_number(path, name, merged, "round_trip_ms", 0.5) / 2e3, rate, rate)
        for key, default in (("mesh", True), ("shared", False)):
            if _boolean(path, name, merged, key, default):
                flagged[key].add(name)
    broker = _number(path, "the file", data, "broker_mbit", None) * 1e6 / 8 if "broker_mbit" in data else None
    return replace(
        make_cluster(devices, links, broker),
        endpoints=frozenset(flagged["mesh"]),
        peer_links=_peers(path, data.get("peers") or [], links),
        shared_medium=frozenset(flagged["shared"]),
        deadline_s=_number(path, "the file", data, "deadline_ms", inf) / 1e3 if "deadline_ms" in data else inf,
    )


def _peers(path: Path, listed: Any, links: Mapping[str, Link]) -> dict[DevicePair, PeerLink]:
    """Return the symmetric links of listed pairs; the two devices' links give defaults."""
    peers = {}
    for entry in listed if isinstance(listed, list) else [listed]:
        where = f"an entry of `peers` ({entry})"
        pair = entry.get("between") if isinstance(entry, Mapping) else None
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] == pair[1] or any(n not in [*links] for n in pair):
            raise ConfigError(f"{path}: {where} needs `between:` with two of the devices")
        _reject_unknown_keys(path, where, entry, _PEER)
        one, other = (links[name] for name in pair)
        slower = min(one.up_bytes_per_s, other.up_bytes_per_s)
        rate = _number(path, where, entry, "mbit", slower * 8e-6) * 1e6 / 8
        latency_s = _number(path, where, entry, "round_trip_ms", 1e3 * 2 * (one.latency_s + other.latency_s)) / 2e3
        peers[pair[0], pair[1]] = peers[pair[1], pair[0]] = PeerLink(latency_s, rate)
    return peers


def _board(path: Path, device: str, name: Any) -> Mapping[str, Any]:
    """Return the fields of a device's board, empty without a board."""
    if name is None:
        return {}
    by_name = boards()
    if name not in by_name:
        raise ConfigError(f"{path}: {device} has an unknown board {name!r}{nearest(str(name), by_name)}")
    return by_name[name]


def _profile(path: Path, name: str, fields: Mapping[str, Any]) -> DeviceProfile:
    flops = _number(path, name, fields, "gflops", None) * 1e9
    stream = _number(path, name, fields, "memory_gb_per_s", 4.0) * 1e9
    slower = _FITTED_GFLOPS * 1e9 / flops
    frame_s = _number(path, name, fields, "frame_ms", slower * _FITTED_FRAME_MS) / 1e3
    copied = 1e9 / _number(path, name, fields, "frame_ms_per_mb", slower * _FITTED_FRAME_MS_PER_MB)
    return DeviceProfile(
        name,
        tuple(_curves(path, name, fields)),
        attention_flops_per_s=flops / 3,
        rowwise_bytes_per_s=stream / 2,
        op_overhead_s=slower * _FITTED_OP_MS / 1e3,
        memory_bytes=_number(path, name, fields, "memory_mib", 4096.0) * 2**20,
        frame_s=_BROKER_FRAME * frame_s,
        copy_bytes_per_s=min(copied, stream / 2),
        mesh_frame_s=frame_s,
        mesh_copy_bytes_per_s=min(copied, stream),
        power=Power(*(_number(path, name, fields, key, None) for key in _WATTS)) if {*_WATTS} & {*fields} else None,
    )


def _curves(path: Path, name: str, fields: Mapping[str, Any]) -> Iterator[Curve]:
    """Yield the curve of each storage, with activations in f32 and in int8.

    A matmul takes the time of its FLOPs, at least the time of reading its weights once. The device's rates are
    defaults for each storage.
    """
    storages = mapping(f"{path}: {name}: `storages`", fields.get("storages") or {})
    _reject_unknown_keys(path, f"{name}: `storages`", storages, {*_VALUE_BYTES})
    k = n = 1024
    for product in PRODUCTS:
        storage = product.weights
        where = f"{name}: {storage}"
        own = mapping(f"{path}: {where}", storages.get(storage) or {})
        _reject_unknown_keys(path, where, own, _RATES)
        rates: dict[str, Any] = {**{key: fields[key] for key in _RATES if key in fields}, **own}
        gflops = _number(path, where, rates, "gflops", None)
        if product.rounded or storage == "w8a8":
            gflops = _number(path, where, rates, "int8_gflops", gflops)
        unpack = _UNPACK_FLOPS.get(storage, 0.0)
        read_s = _VALUE_BYTES[storage] * k * n / (_number(path, where, rates, "memory_gb_per_s", 4.0) * 1e9)
        points = ((rows, max((2.0 * rows + unpack) * k * n / (gflops * 1e9), read_s)) for rows in _ROWS)
        yield Curve(k, n, tuple(points), product)


def _reject_unknown_keys(path: Path, where: str, fields: Mapping[str, Any], valid: set[str]) -> None:
    for key in fields:
        if key not in valid:
            raise ConfigError(f"{path}: {where} has an unknown key {key!r}; valid are {', '.join(sorted(valid))}")


def _boolean(path: Path, name: str, fields: Mapping[str, Any], key: str, default: bool) -> bool:
    value = fields.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: {name} needs `{key}` as true or false, got {value!r}")
    return value


def _number(path: Path, name: str, fields: Mapping[str, Any], key: str, default: float | None) -> float:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:  # also NaN
        raise ConfigError(f"{path}: {name} needs `{key}` as a number above zero, got {value!r}")
    return float(value)
