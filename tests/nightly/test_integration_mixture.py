"""A mixture of experts that no agent can hold: four agents answer, restart from their caches, and lose one of them.

LAYERS=11 is a file of 4 GB over agents of 1.3 GiB each, as Qwen3-30B-A3B over boards of 8 GB.
"""

from __future__ import annotations

import os
import shutil
import time

import pytest
from mixture_file import Shape, write_mixture
from programs import memory_bytes
from site_processes import SITE, poll, running_site

from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import HeptiError

LAYERS = int(os.environ.get("LAYERS", "1"))
BUDGET_MIB = 120 + 108 * LAYERS
AGENTS = ("w", "x", "y", "z")
PLANNER_MIB = 500
CODE_MIB = 80  # kernels of matrices in blocks, which an idle agent has not loaded, and a head device's logits
LOADING_S = 300.0 + 120 * LAYERS
REQUEST = {"ids": [5, 9, 4, 7, 6, 8], "max_new_tokens": 12}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mixture")
    room = (1 + LAYERS) << 30
    if (free := shutil.disk_usage(directory).free) < room:
        pytest.skip(f"needs {room >> 30} GiB in {directory}, where {free >> 30} GiB are free")
    try:
        model = write_mixture(directory / "mixture.gguf", Shape(LAYERS))
        yield from running_site(directory, {"mixture": model}, dict.fromkeys(AGENTS, f"{BUDGET_MIB}MiB"))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def say(hepti):
    got = hepti.infer("mixture", **REQUEST, timeout_s=LOADING_S)
    assert len(got.plan["devices"]) == len(AGENTS)
    return got.result["ids"]


def test_four_agents_answer_what_none_can_hold(site, capsys):
    began = time.perf_counter()
    with Hepti.connect(site.url, site=SITE) as hepti:
        record = hepti.wait_ready("mixture", LOADING_S, lambda record: record["preparing"] is None)
        loaded_s = time.perf_counter() - began
        assert "single does not fit" in record["reason"]
        before = say(hepti)
        caps = {d["device"]: d for d in hepti.devices(wait_s=2.0)}
        peaks = {name: memory_bytes(process.pid)[1] >> 20 for name, process in site.running.items()}
        assert peaks["planner"] <= PLANNER_MIB
        for name in AGENTS:
            assert peaks[name] <= 1.02 * BUDGET_MIB + (caps[name]["rss_idle_bytes"] >> 20) + CODE_MIB, peaks

        for name in AGENTS:
            site.stop(name)
        tiles = {name: len(site.tiles(name)) for name in AGENTS}
        began = time.perf_counter()
        for name in AGENTS:
            site.agent(name, f"{BUDGET_MIB}MiB")
        hepti.wait_ready("mixture", LOADING_S, lambda record: record["preparing"] is None)
        assert say(hepti) == before
        restarted_s = time.perf_counter() - began
        assert all(len(site.tiles(name)) <= 1.1 * tiles[name] for name in AGENTS), "caches hold what plans need"

        site.kill("z")
        with pytest.raises(HeptiError):  # the other three cannot hold it
            hepti.infer("mixture", **REQUEST, timeout_s=20)

        poll(lambda: "add a device with" in str(hepti.plan("mixture")["error"]), "the planner's advice", every=1.0)
        site.agent("z", f"{BUDGET_MIB}MiB")
        hepti.wait_ready("mixture", LOADING_S, lambda record: record["preparing"] is None)
        assert say(hepti) == before
    size = site.models["mixture"].stat().st_size
    with capsys.disabled():
        print(
            f"\n{size / 1e9:.2f} GB over {len(AGENTS)} agents of {BUDGET_MIB} MiB: loaded in {loaded_s:.1f} s, "
            f"restarted in {restarted_s:.1f} s, peak MiB {peaks}"
        )
