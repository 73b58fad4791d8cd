"""Site files: devices and links described by hand, for `hepti simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hepti_mqtt.cluster import Cluster, Curve, DeviceProfile, Link, cluster_of
from hepti_mqtt.config import load_yaml
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.ids import check_name

_ROWS: Final = (1, 8, 16, 32, 64, 128, 256, 512)
_DEVICE: Final = {"gflops", "memory_mib", "memory_gb_per_s", "mbit", "round_trip_ms"}
_TOP: Final = {"defaults", "devices", "broker_mbit"}


def load_site(path: Path) -> Cluster:
    """Return the cluster that a site file describes; raises ConfigError that names file, device and key.

    `broker_mbit` is the rate of the broker's own link; without it, that of the fastest device's.
    """
    data = load_yaml(path)
    if not isinstance(data, Mapping) or not isinstance(data.get("devices"), Mapping) or not data["devices"]:
        raise ConfigError(f"{path}: needs a mapping `devices:` with at least one device")
    _known(path, "the file", data, _TOP)
    defaults = data.get("defaults") or {}
    devices, links = {}, {}
    for name, fields in data["devices"].items():
        check_name("device", name)
        merged = {**defaults, **(fields or {})}
        _known(path, name, merged, _DEVICE)
        devices[name] = _profile(path, name, merged)
        rate = _number(path, name, merged, "mbit", 940.0) * 1e6 / 8
        links[name] = Link(_number(path, name, merged, "round_trip_ms", 0.5) / 2e3, rate, rate)
    given = "broker_mbit" in data
    broker = _number(path, "the file", data, "broker_mbit", None) * 1e6 / 8 if given else None
    return cluster_of(devices, links, broker)


def _profile(path: Path, name: str, fields: Mapping[str, Any]) -> DeviceProfile:
    """Return a profile whose matmul takes its FLOPs, but never less than streaming the weights once."""
    flops = _number(path, name, fields, "gflops", None) * 1e9
    stream = _number(path, name, fields, "memory_gb_per_s", 4.0) * 1e9
    k = n = 1024
    points = tuple((rows, max(2.0 * rows * k * n / flops, 4.0 * k * n / stream)) for rows in _ROWS)
    return DeviceProfile(
        name,
        (Curve(k, n, points),),
        attention_flops_per_s=flops / 3,
        rowwise_bytes_per_s=stream / 2,
        memory_bytes=_number(path, name, fields, "memory_mib", 4096.0) * 2**20,
        copy_bytes_per_s=stream / 2,
    )


def _known(path: Path, where: str, fields: Mapping[str, Any], known: set[str]) -> None:
    for key in fields:
        if key not in known:
            raise ConfigError(f"{path}: {where} has an unknown key {key!r}; known are {', '.join(sorted(known))}")


def _number(path: Path, name: str, fields: Mapping[str, Any], key: str, default: float | None) -> float:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{path}: {name} needs `{key}` as a number above zero, got {value!r}")
    return float(value)
