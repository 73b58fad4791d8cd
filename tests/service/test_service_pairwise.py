"""A pairwise sample of strategy × family × devices over a real broker and processes; one agent has hardly memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from site_processes import PATIENCE_S, SITE, Site, foretold, poll, running_site
from sites import METHODS

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.client.described import random_input
from hepti_mqtt.service.requests import prepare
from hepti_mqtt.strategies import STRATEGIES

# The contract suite meets every method and family in one process; test_service_processes every method in several.
pytestmark = [pytest.mark.processes, pytest.mark.broker, pytest.mark.wide]

KINDS = ("tiny-bert", "tiny-bert-classifier", "tiny-roberta-mlm", "tiny-vit-classifier")
TWO, THREE = ["a", "b"], ["a", "b", "tiny"]
# Every method meets every family; the number of devices and the route alternate so that each meets all.
CASES = [
    (method, kind, (TWO, THREE)[(i + j) % 2])
    for (i, method), (j, kind) in product(enumerate(METHODS), enumerate(KINDS))
    if STRATEGIES[method[0]].most_devices is None
] + [(("single", {}), kind, [device]) for kind, device in zip(KINDS, ("a", "b", "tiny", "a"), strict=True)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("pairwise")
    # The planner's own plans of the other models may be there too, and do not make room for what a request pins.
    served = {kind: make_model(kind, directory / kind, seed=i) for i, kind in enumerate(KINDS)}
    yield from running_site(directory, served, {"a": "300MiB", "b": "200MiB", "tiny": "17MiB"})


@pytest.fixture(scope="module")
def hepti(site: Site) -> Iterator[Hepti]:
    with Hepti.connect(site.url, site=SITE, client_id="pairwise") as h:
        poll(
            lambda: {d["device"] for d in h.devices(wait_s=0.2) if d["status"] == "online"} == set(THREE), "all online"
        )
        for kind in KINDS:
            h.wait_ready(kind, PATIENCE_S)
        yield h


@pytest.mark.parametrize(
    ("method", "kind", "devices"), CASES, ids=lambda v: "-".join(map(str, v if isinstance(v, list | tuple) else [v]))
)
def test_right_answer_same_bits_exact_bytes(site, hepti, method, kind, devices):
    strategy, options = method
    route = "mesh" if CASES.index((method, kind, devices)) % 2 else "broker"
    pins = {"strategy": strategy, "options": options, "devices": devices, "route": route}
    with Checkpoint.open(site.models[kind], kind) as checkpoint:
        body = random_input(checkpoint.spec, 11 if checkpoint.spec.text else 2, seed=5)
        prepared = prepare(checkpoint, {**body, "want": "hidden"})
        hidden, _ = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
    first, second = (
        foretold(lambda: hepti.infer(kind, **body, **pins, want="hidden", report=True, timeout_s=PATIENCE_S))
        for _ in range(2)
    )
    np.testing.assert_allclose(first.hidden, hidden, atol=5e-5)
    assert first.hidden.tobytes() == second.hidden.tobytes()
    assert first.plan["epoch"] == second.plan["epoch"]
    if STRATEGIES[strategy].groups is None:
        assert set(first.plan["devices"]) == set(devices)
        assert first.plan["route"] == ("broker" if len(devices) == 1 else route)
    else:  # each answer is of one replica, or of several if it was cut into runs
        assert set(first.plan["devices"]) <= set(devices)
    assert first.raw["bytes_on_wire"] == first.raw["predicted_bytes"]
