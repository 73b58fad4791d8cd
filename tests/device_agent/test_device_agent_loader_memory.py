"""What weights hold while they are loaded."""

import numpy as np
import pytest
from device_agent_support import Device, Model

from hepti_mqtt.cost.memory import loading_total
from hepti_mqtt.errors import PlanError
from hepti_mqtt.kernels import loading_bytes
from hepti_mqtt.program import WeightRef
from hepti_mqtt.runtime.worker.interface import Loaded, LoadFailed

MODEL = Model()
WIDE = Model(seed=4, rows=4000, columns=3000)


@pytest.fixture
def device(tmp_path):
    return Device(tmp_path / "tiles")


@pytest.mark.parametrize("storage", ["w8a8", "w8a32"])
@pytest.mark.parametrize("known", ["every second tile", "what others ask for"])
def test_int8_weights_hold_no_more_in_f32_than_is_reckoned_with(device, storage, known):
    # Ranges that no block and no panel begins with: every tile leaves blocks of which a part is missing.
    ref = WeightRef("up", (10, 3990), (5, 2985), "packed", storage)
    bound = loading_total([ref])
    assert bound < 0.4 * loading_bytes(ref)
    digests = [tile.hash for tile in WIDE.manifest.tiles(ref)]
    if known == "every second tile":
        for digest in digests[::2]:
            device.cache.put(digest, WIDE.blobs[digest], set(digests))
    device.loader.load(WIDE.load(refs=(ref,)), device.now)
    device.loader.tile(WIDE.blobs[device.asks.popleft()], True, device.now)
    held = []

    def look():
        buffers = device.loader._jobs[0].buffers.values() if device.loader._jobs else ()
        held.append(sum(block.nbytes for buffer in buffers for block in buffer._staged.values()))

    if known == "what others ask for":
        for digest in digests[::2]:
            device.loader.tile(WIDE.blobs[digest], False, device.now)
            look()
    while device.loader.step(device.now):
        look()
    while device.asks:
        device.loader.tile(WIDE.blobs[device.asks.popleft()], True, device.now)
        look()
        while device.loader.step(device.now):
            look()
    assert 0 < max(held) <= bound
    (loaded,) = device.of(Loaded)
    plain = loaded.weights[ref].plain()
    assert np.abs(plain - WIDE.expected(ref)).max() <= 0.51 / 127 * np.abs(plain).max()


def test_a_lack_of_memory_ends_the_load_with_a_reason(device, monkeypatch):
    def none_left(ref):
        raise MemoryError

    monkeypatch.setattr("device_agent.loader.allocate", none_left)
    device.loader.load(MODEL.load(), device.now)
    device.serve(MODEL)
    (failed,) = device.of(LoadFailed)
    assert isinstance(failed.error, PlanError)
    assert "--memory" in str(failed.error)
