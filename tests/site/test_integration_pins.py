"""What one request pins, at a site of real processes: its own answer follows, nobody else's, with room or without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from site_processes import PATIENCE_S, SITE, Site, poll, running_site

from device_agent.machine import LOADING_BYTES
from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.cost.memory import max_live_bytes, programs_bytes, weights_bytes
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import make_plan, resident_weights

IDS = [5, 6, 7, 8, 9]
TOLERANCE = 5e-5
ROOMY = 600 << 20


def needed_bytes(path: Path) -> int:
    """Return what a device needs that holds all of a model."""
    with Checkpoint.open(path, "tiny") as checkpoint:
        spec = checkpoint.spec
    plan = make_plan(spec, Plan("tiny", PlanVersion(1, 1), "single", ("a",), "a"), "single", {}, (1.0,))
    live = max_live_bytes(spec, plan, "a", in_flight=2)
    return weights_bytes(resident_weights(spec, plan, "a")) + live + programs_bytes(spec, plan, "a")


@pytest.fixture(scope="module", params=["room for both", "room for one"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("pins")
    model = make_model("tiny-bert", directory / "model", seed=5)
    budget = ROOMY if request.param == "room for both" else LOADING_BYTES + int(1.05 * needed_bytes(model))
    yield from running_site(directory, {"tiny": model}, {"a": str(budget)})


@pytest.fixture(scope="module")
def hepti(site: Site) -> Iterator[Hepti]:
    with Hepti.connect(site.url, site=SITE, client_id="tester") as client:
        client.wait_ready("tiny", PATIENCE_S)
        yield client


def test_pins_change_nobody_elses_answer(site: Site, hepti: Hepti, request: pytest.FixtureRequest) -> None:
    with Checkpoint.open(site.models["tiny"], "tiny") as checkpoint:
        shape, inputs = models.single_sequence(checkpoint.spec, np.array(IDS, np.int32))
        want = models.reference(checkpoint.spec, checkpoint.tensors(), inputs, shape)[1][0]
    first = hepti.infer("tiny", ids=IDS, timeout_s=PATIENCE_S)
    for _ in range(2):
        narrow = hepti.infer("tiny", ids=IDS, weights="f16", timeout_s=PATIENCE_S)
        assert narrow.plan["weights"] == "f16"
        assert np.abs(narrow.embedding - want).max() > TOLERANCE
        plain = hepti.infer("tiny", ids=IDS, timeout_s=PATIENCE_S)
        assert plain.plan["weights"] == "f32"
        np.testing.assert_allclose(plain.embedding, want, atol=TOLERANCE)
        np.testing.assert_array_equal(plain.embedding, first.embedding)
    room = "room for both" in request.node.name
    assert (plain.plan["id"] == first.plan["id"]) is room
    assert any(step["to"] == "swapping" for step in hepti.plan("tiny")["story"]) is not room


def test_the_planners_own_plan_comes_back_without_being_asked_for(hepti: Hepti) -> None:
    hepti.infer("tiny", ids=IDS, weights="f16", timeout_s=PATIENCE_S)
    poll(lambda: hepti.plan("tiny")["active"], "a plan without pins")
    assert hepti.plan("tiny")["active"]["storage"] == "f32"
