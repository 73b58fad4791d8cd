"""Exchanges from agent to agent, at a site of real processes with a real broker: the same bits as over the broker."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from site_processes import PATIENCE_S, SITE, Site, poll, running_site
from together import bound, run_together

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.plan import Plan
from hepti_mqtt.strategies import programs
from hepti_mqtt.transport.mesh import mesh_possible

pytestmark = [
    pytest.mark.processes,
    pytest.mark.broker,
    pytest.mark.skipif(not mesh_possible(), reason="the mesh needs Linux"),
]

IDS = list(range(5, 23))
NAMES = ["a", "b", "c"]
ROW = {"strategy": "row", "options": {"variant": "kv"}, "devices": NAMES, "want": "hidden"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("mesh")
    model = make_model("tiny-bert", directory / "model", seed=3)
    yield from running_site(directory, {"tiny": model}, dict.fromkeys(NAMES, "300MiB"))


@pytest.fixture(scope="module")
def hepti(site: Site) -> Iterator[Hepti]:
    with Hepti.connect(site.url, site=SITE, client_id="tester") as found:
        poll(lambda: {d["device"] for d in online(found)} == set(NAMES), "all online")
        yield found


def online(hepti: Hepti) -> list[dict]:
    return [d for d in hepti.devices(wait_s=0.2) if d["status"] == "online"]


def heard(hepti: Hepti, device: str) -> dict[str, dict] | None:
    """Return what went between a device and its peers, as soon as it has told of frames from some of them."""
    told = next((d["heartbeat"] for d in hepti.devices(wait_s=1.5) if d["device"] == device), None)
    edges = {} if told is None else told["edges"]
    return edges if edges and all(edge["frames_in"] for edge in edges.values()) else None


def in_one_process(site: Site, plan: Plan) -> np.ndarray:
    """Return what the devices' Programs answer without any wire between them."""
    with Checkpoint.open(site.models["tiny"], "tiny") as checkpoint:
        shape, inputs = models.packed(checkpoint.spec, np.array(IDS, np.int32), "hidden")
        parts = programs(checkpoint.spec, plan, shape)
        return run_together(bound(parts, checkpoint.tensors()), inputs)


@pytest.mark.parametrize("route", ["mesh", "broker"])
def test_the_bits_do_not_depend_on_the_way(site: Site, hepti: Hepti, route: str) -> None:
    """Shares follow from what devices measured, so each answer is held against its own plan in one process."""
    answer = hepti.infer("tiny", ids=IDS, **ROW, route=route, timeout_s=PATIENCE_S)
    plans = map(Plan.from_dict, hepti.plan("tiny")["pinned"])
    plan = next(p for p in plans if list(p.epoch) == list(answer.plan["epoch"]))
    assert (plan.route, plan.relayed, set(plan.devices)) == (route, (), set(NAMES))
    assert np.array_equal(answer.hidden, in_one_process(site, plan))
    if route == "mesh":
        for name in NAMES:
            peers = poll(lambda name=name: heard(hepti, name), f"{name} has told what its peers sent")
            assert set(peers) == set(NAMES) - {name}
            assert all(edge["frames_out"] and not edge["dropped"] for edge in peers.values())
