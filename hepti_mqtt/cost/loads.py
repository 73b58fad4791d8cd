"""The price of a load of weights: tiles from the cache, from peers and from the planner, in seconds by device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.protocol.manifest import Manifest, grid

Mask = NDArray[np.bool_]  # [tile]: by position in the manifest's order

# Until a device reports its own rates: bytes of tiles that a whole processor handles in the time of a FLOP of large
# products. A core of 98 GFLOP/s took 1.4 s to read 1 GB, and 3.7 s to receive it.
READ_BYTES_PER_FLOP: Final = 7.3e-3
RECEIVE_BYTES_PER_FLOP: Final = 2.75e-3
# Slower devices count as this fast: they hash and copy without wide registers.
LEAST_FLOPS_PER_S: Final = 12.7e9


class LoadRates(NamedTuple):
    """The rates at which a device handles tiles with its whole processor, in bytes of tiles per second."""

    #: From the cache on its disk: read, verify and pack.
    read_bytes_per_s: float = READ_BYTES_PER_FLOP * LEAST_FLOPS_PER_S
    #: Over the network: receive, verify, store and pack.
    receive_bytes_per_s: float = RECEIVE_BYTES_PER_FLOP * LEAST_FLOPS_PER_S

    @classmethod
    def expected(cls, flops_per_s: float) -> LoadRates:
        """Return the expected rates of a device, from its speed in large products."""
        flops_per_s = max(flops_per_s, LEAST_FLOPS_PER_S)
        return cls(READ_BYTES_PER_FLOP * flops_per_s, RECEIVE_BYTES_PER_FLOP * flops_per_s)


class TileMap:
    """The tiles of one manifest by position: tensors in the manifest's order, each row-major over its grid of tiles.

    A tile at several positions has several bits in a mask, and its bytes count at each.
    """

    def __init__(self, manifest: Manifest) -> None:
        #: Hash of the tile at each position.
        self.hashes: tuple[bytes, ...] = tuple(h for entry in manifest.entries for h in entry.hashes)
        #: Bytes of the tile at each position, int64.
        self.sizes: NDArray[Any] = np.concatenate([np.zeros(0, np.int64), *(e.tile_bytes() for e in manifest.entries)])
        #: First position of each tile.
        self.position: Mapping[bytes, int] = {h: p for p, h in reversed(list(enumerate(self.hashes)))}
        self._manifest = manifest
        starts = accumulate((len(entry.hashes) for entry in manifest.entries), initial=0)
        self._starts = dict(zip(manifest.by_name, starts, strict=False))

    def mask(self, refs: Iterable[WeightRef]) -> Mask:
        """Return the tiles with elements of some weight ranges; raises WireError for a range of another model."""
        mask = np.zeros(len(self.hashes), np.bool_)
        for ref in refs:
            rows, columns = self._manifest.tile_ranges(ref)
            entry, start = self._manifest.by_name[ref.tensor], self._starts[ref.tensor]
            tiles = mask[start : start + len(entry.hashes)].reshape(grid(entry.shape, entry.transposed, entry.dtype))
            tiles[rows.start : rows.stop, columns.start : columns.stop] = True
        return mask

    def nbytes(self, mask: Mask) -> int:
        """Return the bytes of the tiles of a mask."""
        return int(self.sizes[mask].sum())

    def pack(self, mask: Mask) -> bytes:
        """Return a mask as bits, the first tile in the highest bit of the first byte."""
        return np.packbits(mask).tobytes()

    def unpack(self, bits: bytes) -> Mask | None:
        """Return the mask of some bits, None if their number differs from that of the manifest's tiles."""
        if len(bits) != -(-len(self.hashes) // 8):
            return None
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=len(self.hashes)).astype(np.bool_)


class DeviceLoad(NamedTuple):
    """The tiles that one device needs for a load, in bytes; tiles in its memory do not count."""

    cached_bytes: int  #: in its own cache
    fetched_bytes: int  #: over its link, from peers or the planner


@dataclass(frozen=True, slots=True)
class SiteLoad:
    """The tiles that the devices of a plan need for a load."""

    devices: Mapping[str, DeviceLoad]
    #: Each tile once that no device of the plan has cached; the planner's machine sends it, then devices share it.
    hub_bytes: int


def site_load(
    tiles: TileMap, needs: Mapping[str, Iterable[WeightRef]], cached: Mapping[str, Mask], *, shared: bool = True
) -> SiteLoad:
    """Return the load of a plan, given its devices' weight ranges and cached tiles.

    needs: by device, without ranges in memory (`cost.memory.matrices`). cached: a missing device has nothing.
    shared: devices can reach each other; otherwise the planner sends every tile to each device.
    """
    nothing = np.zeros(len(tiles.hashes), np.bool_)
    needed = {device: tiles.mask(refs) for device, refs in needs.items()}
    lacking = {device: mask & ~cached.get(device, nothing) for device, mask in needed.items()}
    devices = {d: DeviceLoad(tiles.nbytes(needed[d] & ~lacking[d]), tiles.nbytes(lacking[d])) for d in needs}
    if not shared:
        return SiteLoad(devices, sum(load.fetched_bytes for load in devices.values()))
    anywhere, missing = nothing.copy(), nothing.copy()
    for device, mask in lacking.items():
        anywhere |= cached.get(device, nothing)
        missing |= mask
    return SiteLoad(devices, tiles.nbytes(missing & ~anywhere))


def load_seconds(
    load: SiteLoad, rates: Mapping[str, LoadRates], down_bytes_per_s: Mapping[str, float], hub_bytes_per_s: float = inf
) -> dict[str, float]:
    """Return the seconds until each device has its weights, if the load has its whole processor and link.

    A device handles tiles one after another while its link brings the next ones. A tile that no device has crosses the
    hub's link once, and all links between devices carry tiles at the same time. down_bytes_per_s: of each device's
    link. hub_bytes_per_s: of the link of the planner's machine.
    """
    hub_s, seconds = load.hub_bytes / hub_bytes_per_s, dict[str, float]()
    for device, part in load.devices.items():
        rate = rates.get(device, LoadRates())
        work_s = part.cached_bytes / rate.read_bytes_per_s + part.fetched_bytes / rate.receive_bytes_per_s
        link_s = part.fetched_bytes / down_bytes_per_s[device]
        seconds[device] = max(work_s, link_s, hub_s if part.fetched_bytes else 0.0)
    return seconds
