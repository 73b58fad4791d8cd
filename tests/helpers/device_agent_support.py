"""A model cut into tiles, a planner's side of the loader, and connections that are only lists."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque

import numpy as np

from device_agent.loader import WeightLoader
from device_agent.tile_cache import TileCache
from hepti_mqtt.core.ids import PLANNER, PlanVersion
from hepti_mqtt.core.program import WeightRef
from hepti_mqtt.cost.memory import matrices
from hepti_mqtt.kernels import PackedMatrix
from hepti_mqtt.protocol.manifest import Manifest, TensorEntry, grid, tile_hash
from hepti_mqtt.runtime.worker.interface import Load
from hepti_mqtt.transport.base import Counts

MODEL = "m"
LOG = logging.getLogger("test")


class Model:
    """Random tensors with their manifest and tiles; `up` is stored transposed, as checkpoints store matrices."""

    def __init__(self, seed=0, rows=300, columns=600):
        rng = np.random.default_rng(seed)
        self.tensors = {
            "up": rng.standard_normal((rows, columns)).astype(np.float32),
            "table": rng.standard_normal((rows, 70)).astype(np.float16),
            "bias": rng.standard_normal(columns).astype(np.float32),
        }
        self.tiles = {}
        entries = [self._entry(name, tensor, name == "up") for name, tensor in self.tensors.items()]
        self.manifest = Manifest(MODEL, tuple(entries))
        self.blobs = {**self.tiles, self.manifest.digest: self.manifest.encode()}
        self.refs = (
            WeightRef("up", (10, rows), (0, columns // 2)),
            WeightRef("table", (0, rows), (0, 70), "plain"),
            WeightRef("bias", (0, 1), (0, columns), "plain"),
        )

    def _entry(self, name, tensor, transposed):
        dtype = "f16" if tensor.dtype == np.float16 else "f32"
        rows, columns = grid(tensor.shape, transposed)
        draft = TensorEntry(name, tensor.shape, dtype, transposed, (b"",) * (rows * columns))
        stored = tensor.reshape(1, -1) if tensor.ndim == 1 else tensor
        hashes = []
        for place in draft.tiles():
            r, c = place.stored_shape[::-1] if transposed else place.stored_shape
            tile = stored[place.row0 : place.row0 + r, place.column0 : place.column0 + c]
            data = np.ascontiguousarray(tile.T if transposed else tile).tobytes()
            hashes.append(tile_hash(data))
            self.tiles[hashes[-1]] = data
        return TensorEntry(name, tensor.shape, dtype, transposed, tuple(hashes))

    def load(self, number=1, refs=None, keep=(), held=()):
        """Return a Load that keeps its own places and `keep`; held: matrices that are in memory."""
        places = matrices(self.refs if refs is None else refs, held)
        own = self.places(places.values())
        return Load(MODEL, PlanVersion(1, number), self.manifest.digest, places, own | self.places(keep))

    def places(self, refs=None):
        return frozenset((self.manifest.digest, ref) for ref in (self.refs if refs is None else refs))

    def expected(self, ref):
        tensor = self.tensors[ref.tensor].astype(np.float32)
        if tensor.ndim == 1:
            return tensor[slice(*ref.columns)]
        return tensor[slice(*ref.rows), slice(*ref.columns)]

    def needed(self, refs=None):
        return {t.hash for ref in (self.refs if refs is None else refs) for t in self.manifest.tiles(ref)}


def plain(weight):
    return weight.plain() if isinstance(weight, PackedMatrix) else weight


def check_weights(model, weights, refs=None):
    refs = model.refs if refs is None else refs
    assert set(weights) == set(refs)
    for ref in refs:
        np.testing.assert_array_equal(plain(weights[ref]), model.expected(ref))


class Device:
    """A loader with what it emits and asks for; `now` is whatever the test says. how: as for `WeightLoader`."""

    def __init__(self, directory, limit_bytes=1 << 30, **how):
        self.counters = Counter()
        self.cache = TileCache(directory, limit_bytes, self.counters)
        self.events = []
        self.asks = deque()
        self.now = 100.0
        self.loader = WeightLoader(
            self.cache, self.events.append, lambda _, hashes, share: self.asks.extend(hashes), self.counters, **how
        )

    def settle(self):
        while self.loader.step(self.now):
            continue

    def save(self):
        """Keep packed copies of what was loaded."""
        while self.loader.has_unsaved:
            self.loader.save()

    def serve(self, model, most=None):
        """Send requested tiles, at most `most`, until none is requested."""
        self.settle()
        while self.asks and (most is None or most > 0):
            self.loader.on_tile(model.blobs[self.asks.popleft()], PLANNER, self.now)
            self.settle()
            most = None if most is None else most - 1

    def of(self, kind):
        return [e for e in self.events if isinstance(e, kind)]


def sha(data):
    return hashlib.sha256(data).digest()


class ListTransport:
    """A transport that remembers; acknowledgements and messages come when the test says so."""

    connected = True

    def __init__(self, on_message, on_state):
        self.hear, self.tell = on_message, on_state
        self.published = []
        self.subscribed = {}
        self.left = []
        self.last = None
        self.closed = False

    def connect(self, timeout_s=5.0):
        pass

    def publish(self, topic, payload, qos=0, retain=False):
        self.published.append((topic, bytes(payload), qos, retain))

    def send(self, topic, *parts):
        self.publish(topic, b"".join(parts))

    def subscribe(self, filters):
        token = len(self.subscribed) + 1
        self.subscribed[token] = tuple(filters)
        return token

    def unsubscribe(self, filters):
        self.left += filters

    def counts(self):
        return Counts(published=len(self.published))

    def close(self, last=None, timeout_s=2.0):
        self.last, self.closed = last, True
