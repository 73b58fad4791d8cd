"""The loader's tables take what the account of a device's memory counts for them."""

from __future__ import annotations

import gc
import tracemalloc
from collections import deque

import pytest
from sites import plan

from device_agent.loader import LoadJob
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.spec import Spec
from hepti_mqtt.cost.loads import TileMap
from hepti_mqtt.cost.memory import loading_overhead_bytes, matrices, tile_map_bytes
from hepti_mqtt.models import full_ref, quantised, tensor_sources
from hepti_mqtt.protocol.manifest import Manifest, TensorEntry, grid
from hepti_mqtt.runtime.worker.interface import Load
from hepti_mqtt.runtime.worker.tile_sources import TileSources
from hepti_mqtt.strategies.plan_programs import resident_counts, resident_weights


def manifest_of(spec: Spec) -> bytes:
    entries = []
    for number, source in enumerate(tensor_sources(spec)):
        dtype = full_ref(spec, source.name).weight_dtype
        rows, columns = grid(source.shape, source.transposed, dtype)
        hashes = tuple((number << 32 | n).to_bytes(32, "big") for n in range(rows * columns))
        entries.append(TensorEntry(source.name, source.shape, dtype, source.transposed, hashes))
    return Manifest("m", tuple(entries)).encode()


@pytest.mark.parametrize(
    ("spec", "method", "devices"),
    [(quantised(spec_of_kind("qwen3-30b-a3b", 1), "q4"), "decoder", 4), (spec_of_kind("bert-base", 4), "megatron", 2)],
    ids=["mixture in blocks", "bert"],
)
def test_tables_of_a_load_take_what_is_counted(spec: Spec, method: str, devices: int) -> None:
    way = plan(spec, (method, {}), (1.0,) * devices)
    data, refs = manifest_of(spec), resident_weights(spec, way, "d0")
    counts, resident = resident_counts(spec, way, "d0"), matrices(refs)
    gc.collect()
    tracemalloc.start()
    try:
        manifest = Manifest.decode(data)
        tiles = TileMap(manifest)
        of_map = tracemalloc.get_traced_memory()[0]
        job = LoadJob(Load("m", PlanVersion(1, 1), b"", resident, frozenset()))
        job.plan_tiles(manifest, tiles, {}, 0)
        order = tuple(job.destinations)
        job.on_disk = deque(order)
        places = [tiles.position[tile] for tile in order]
        job.sources = TileSources(order, places, len(tiles.hashes), "d0", way.devices, 0.0, frozenset(order))
        gc.collect()
        of_job = tracemalloc.get_traced_memory()[0] - of_map
    finally:
        tracemalloc.stop()
    allowed = 0.004 * sum(tiles.sizes)  # a fifth of the account's two per cent
    assert abs(of_map - tile_map_bytes(spec)) < allowed
    assert of_job < loading_overhead_bytes(counts) + allowed
