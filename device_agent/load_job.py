"""One load: which tiles its weights are made of, which of them are missing, and what is complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from hepti_mqtt.errors import ModelError
from hepti_mqtt.kernels import Weight, WeightBuffer, allocate, loading_bytes
from hepti_mqtt.program import WeightRef
from hepti_mqtt.runtime.device.commands import Load
from hepti_mqtt.wire.manifest import TILES_AHEAD, Manifest, TilePlace, tile_array


@dataclass(slots=True)
class Job:
    """A load and how far it is.

    places: where each tile goes. order: of the tiles in the weights; in_order: those of them that are taken nearly in
    this order. on_disk, to_ask, asked: where the missing ones come from. set_aside: came by air, and wait on disk.
    total_bytes: of the tiles; until the manifest says them, of the weights. early: the manifest's bytes, come while
    another load was under way.
    """

    load: Load
    early: bytes | None = None
    manifest: Manifest | None = None
    buffers: dict[WeightRef, WeightBuffer] = field(default_factory=dict)
    left: dict[WeightRef, int] = field(default_factory=dict)
    places: dict[bytes, list[tuple[WeightRef, TilePlace]]] = field(default_factory=dict)
    keep: set[bytes] = field(default_factory=set)
    missing: set[bytes] = field(default_factory=set)
    order: dict[bytes, int] = field(default_factory=dict)
    in_order: deque[bytes] = field(default_factory=deque)
    set_aside: set[bytes] = field(default_factory=set)
    on_disk: deque[bytes] = field(default_factory=deque)
    to_ask: deque[bytes] = field(default_factory=deque)
    asked: dict[bytes, None] = field(default_factory=dict)
    weights: dict[WeightRef, Weight] = field(default_factory=dict)
    done_bytes: int = 0
    total_bytes: int = 0
    mismatches: int = 0

    def may_take(self, digest: bytes) -> bool:
        """Return whether a missing tile may be taken now: where order matters, if few older ones are missing."""
        while self.in_order and self.in_order[0] not in self.missing:
            self.in_order.popleft()
        return not self.in_order or self.order[digest] < self.order[self.in_order[0]] + TILES_AHEAD

    def plan(self, manifest: Manifest, held: Mapping[WeightRef, Weight]) -> None:
        """Find out which tiles are missing, `held` being there already; raises ModelError for another's manifest."""
        if manifest.model != self.load.model:
            raise ModelError(
                f"the manifest is that of model {manifest.model}, not {self.load.model}; restart the planner"
            )
        self.manifest = manifest
        for ref in self.load.refs:
            if ref in held:
                self.weights[ref] = held[ref]
                continue
            tiles = manifest.tiles(ref)
            self.buffers[ref], self.left[ref] = allocate(ref), len(tiles)
            if not tiles:
                self.weights[ref] = self.buffers.pop(ref).finish()
            for place in tiles:
                self.places.setdefault(place.hash, []).append((ref, place))
        self.total_bytes = sum(places[0][1].nbytes for places in self.places.values())
        self.missing = set(self.places)
        self.order = {digest: place for place, digest in enumerate(self.places)}
        # Only blocks in int8 are held wide until they are complete; all else takes its tiles as they come.
        self.in_order = deque(self.places if any(loading_bytes(ref) for ref in self.buffers) else ())
        self.keep = {self.load.manifest, *self.places}

    def put(self, ref: WeightRef, place: TilePlace, data: bytes | memoryview) -> None:
        """Put a tile into a weight that it is part of."""
        self.buffers[ref].put(tile_array(place, data), place.row0, place.column0)
        self.left[ref] -= 1
        if not self.left[ref]:
            self.weights[ref] = self.buffers.pop(ref).finish()
