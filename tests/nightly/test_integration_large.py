"""The real shape of BERT-Large over four devices, each too small for it."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from site_processes import PATIENCE_S, SITE, Site, foretold, poll, running_site

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.service.requests import read_input

ROOM_BYTES = 6 << 30  # the model, a tile cache on each device, and what the system needs
BUDGET_MIB = 500
AGENTS = ("w", "x", "y", "z")
TOLERANCE = 2e-4
LOADING_S = 150.0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("large")
    free = shutil.disk_usage(directory).free
    if free < ROOM_BYTES:
        pytest.skip(f"needs {ROOM_BYTES >> 30} GiB in {directory}, where {free >> 30} GiB are free")
    try:
        model = make_model("bert-large", directory / "model", seed=2)
        budgets = dict.fromkeys(AGENTS, f"{BUDGET_MIB}MiB")
        # All of them, so that no plan for the first three to come is loaded before the one for four.
        pins = ("--devices", ",".join(AGENTS))
        yield from running_site(directory, {"bert-large": model}, budgets, planner=pins)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def peak_rss_bytes(pid: int) -> int:
    match = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) << 10


def ready(hepti: Hepti) -> dict[str, Any]:
    """Wait for a plan that all agents take part in: none with fewer fits."""
    return hepti.wait_ready("bert-large", LOADING_S, lambda record: record["preparing"] is None)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_four_devices_answer_what_none_of_them_can_hold(large: Site, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 30522, 128).tolist()
    with Hepti.connect(large.url, site=SITE) as hepti:
        began = time.perf_counter()
        record = ready(hepti)
        loaded_s = time.perf_counter() - began
        for method in ("single", "row/kv", "row/heads"):
            assert f"{method} does not fit" in record["reason"]
        assert len(record["active"]["devices"]) == len(AGENTS)
        answer = foretold(lambda: hepti.infer("bert-large", ids=ids, want="hidden", report=True, timeout_s=PATIENCE_S))
        caps = {d["device"]: d for d in hepti.devices(wait_s=2.0)}
        rss = {name: peak_rss_bytes(large.running[name].pid) for name in AGENTS}
        with Checkpoint.open(large.models["bert-large"], "bert-large") as checkpoint:
            prepared = read_input(checkpoint, {"ids": ids, "want": "hidden"})
            hidden, _ = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
            model_bytes = sum(4 * int(np.prod(t.shape)) for t in models.tensor_sources(checkpoint.spec))
        error = float(np.abs(answer.hidden - hidden).max())
        with capsys.disabled():
            plan = answer.plan
            peaks = ", ".join(
                f"{name} {rss[name] >> 20} (of {BUDGET_MIB} + {caps[name]['rss_idle_bytes'] >> 20})" for name in AGENTS
            )
            print(
                f"\nbert-large on {len(AGENTS)} agents of one machine, {plan['strategy']}: loaded in {loaded_s:.1f} s, "
                f"128 tokens in {answer.latency_ms:.0f} ms (predicted {plan['predicted_ms']:.0f} ms), "
                f"{answer.raw['bytes_on_wire']} bytes, max |difference| {error:.1e}, peak MiB {peaks}"
            )
        assert error < TOLERANCE
        assert answer.raw["bytes_on_wire"] == answer.raw["predicted_bytes"]
        assert model_bytes > BUDGET_MIB << 20, "or the test shows nothing"
        for name in AGENTS:
            assert rss[name] <= (BUDGET_MIB << 20) + caps[name]["rss_idle_bytes"], name
    second_start(large, ids, answer.hidden)


def second_start(large: Site, ids: list[int], before: np.ndarray) -> None:
    """No tile that is on disk travels again; shares may shift, and what is new then is all that moves."""
    for name in AGENTS:
        large.stop(name)
    on_disk = {name: set(large.tiles(name)) for name in AGENTS}
    for name in AGENTS:
        large.agent(name, f"{BUDGET_MIB}MiB")
    with Hepti.connect(large.url, site=SITE) as hepti:
        ready(hepti)
        answer = foretold(lambda: hepti.infer("bert-large", ids=ids, want="hidden", report=True, timeout_s=PATIENCE_S))
        assert np.abs(answer.hidden - before).max() < TOLERANCE

        def only_new_tiles_moved() -> bool:
            beats = {d["device"]: d["heartbeat"] for d in hepti.devices(wait_s=2.0)}
            for name in AGENTS:
                counters = beats[name]["counters"] if beats.get(name) else {}
                new = set(large.tiles(name)) - on_disk[name]
                if not counters.get("tiles_cached") or counters.get("tiles_received", 0) != len(new):
                    return False  # also while a heartbeat is older than what is on disk
            return True

        poll(only_new_tiles_moved, "no tile that was on disk has travelled again")
