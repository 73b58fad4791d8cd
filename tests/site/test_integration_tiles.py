"""Weights from device to device, at a site of real processes with a real broker."""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from broker_kinds import broker_of, outer_address
from site_processes import PATIENCE_S, SITE, Site, Voice, poll, wait_online

from hepti_mqtt.checkpoint import Checkpoint, make, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport.sockets import mesh_possible

pytestmark = pytest.mark.skipif(not mesh_possible(), reason="the mesh needs Linux")

NAMES = ["a", "b", "c"]
LIAR = (sys.executable, str(Path(__file__).parents[1] / "helpers" / "lying_agent.py"))
# Every device holds all weights.
ALL_WEIGHTS = {"strategy": "row", "options": {"variant": "heads"}, "devices": NAMES, "want": "hidden"}


class PlannerBytes(Voice):
    """Counts the bytes of tiles that the planner sends."""

    def __init__(self, url):
        self.nbytes = 0
        super().__init__(url, Topics(SITE).weights("a")[:-1] + "+")

    def hear(self, topic, payload):
        self.nbytes += len(payload)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    kind, width = make.KINDS["tiny-bert"], {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8000}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(make.KINDS, "tiles", replace(kind, config={**kind.config, **width}))
        return make_model("tiles", tmp_path_factory.mktemp("model") / "model", seed=3, layers=2)


def model_bytes(model):
    with Checkpoint.open(model, "large") as checkpoint:
        return sum(tile.nbytes for entry in checkpoint.manifest.entries for tile in entry.tiles())


@contextmanager
def site_of(directory, model, program=()):
    with (
        broker_of(None) as broker,
        Site(directory, broker, {"large": model}) as site,
        PlannerBytes(site.url) as planner,
    ):
        site.planner()
        for name in NAMES:
            site.agent(name, "1GiB", program=program)
        with Hepti.connect(site.url, site=SITE, client_id="tester") as hepti:
            wait_online(hepti, NAMES)
            yield site, hepti, planner


def counted(hepti):
    """Return the counters of all devices, once each has sent a heartbeat."""

    def tile_counts():
        beats = {d["device"]: d["heartbeat"] for d in hepti.devices(wait_s=1.5) if d.get("heartbeat")}
        return {n: Counter(b["counters"]) for n, b in beats.items()} if beats.keys() == set(NAMES) else None

    return poll(tile_counts, "heartbeats of all")


def cached_bytes(site, name):
    return sum(file.stat().st_size for file in site.tiles(name).values())


def ask(hepti):
    answer = hepti.infer("large", ids=list(range(5, 23)), **ALL_WEIGHTS, timeout_s=PATIENCE_S)
    assert np.isfinite(answer.hidden).all()


def test_each_tile_leaves_the_planner_about_once_for_the_site(tmp_path, model):
    with site_of(tmp_path, model) as (site, hepti, planner):
        ask(hepti)
        whole = model_bytes(model)
        assert planner.nbytes <= 1.2 * whole, "without peers three times"
        repeated = sum(cached_bytes(site, name) for name in NAMES) - whole
        assert sum(each["tile_bytes_from_peers"] for each in counted(hepti).values()) > 0.6 * repeated


def test_a_peer_that_is_killed_in_the_middle_costs_no_tile_that_came(tmp_path, model):
    with site_of(tmp_path, model) as (site, hepti, planner):
        whole = model_bytes(model)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(ask, hepti)
            poll(lambda: planner.nbytes > 0.3 * whole or first.done(), "tiles on their way", every=0.02)
            site.kill("b")
            site.agent("b", "1GiB")
            first.exception(PATIENCE_S)
        ask(hepti)
        received = counted(hepti)
        for name in NAMES:
            assert received[name]["tile_bytes_received"] <= 1.05 * cached_bytes(site, name), "no tile comes twice"


def test_peers_that_lie_cost_a_tile_each(tmp_path, model):
    with site_of(tmp_path, model, LIAR) as (_, hepti, _planner):
        ask(hepti)
        counters = counted(hepti).values()
        assert sum(each["tiles_mismatched"] for each in counters) > 0
        assert all(each["tile_bytes_from_peers"] == 0 for each in counters)


def test_a_device_whose_cache_cannot_be_written_serves_from_memory_and_an_open_broker_is_named_once(tmp_path):
    tiny = make_model("tiny-bert", tmp_path / "model", seed=3)
    (tmp_path / "device-a").write_text("no directory")
    with broker_of(None, address=outer_address()) as broker, Site(tmp_path, broker, {"tiny": tiny}) as site:
        site.planner()
        site.agent("a")
        with Hepti.connect(site.url, site=SITE, client_id="tester") as hepti:
            wait_online(hepti, ["a"])
            answer = hepti.infer("tiny", ids=[5, 6, 7], want="hidden", timeout_s=PATIENCE_S)
            assert np.isfinite(answer.hidden).all()
            (device,) = hepti.devices(wait_s=0.2)
            assert device["reason"]
        site.start("doctor", "doctor", "--broker", site.url).wait(PATIENCE_S)
        assert device["reason"] in site.log("doctor")
        assert [site.log(name).count("OPEN BROKER") for name in ("planner", "a")] == [1, 1]
