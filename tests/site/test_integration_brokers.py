"""The main path over every kind of broker, with and without a password."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from site_processes import PATIENCE_S, SITE, Site, foretold, running_site, wait_for_plans

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import RefusedError
from hepti_mqtt.embedded_broker import KINDS
from hepti_mqtt.service.requests import read_input

TOLERANCE = 5e-5
AGENTS = {"a": "100MiB", "b": "100MiB"}
CASES = [(kind, login) for login in ("", "someone:se%3Acret") for kind in KINDS]
# A gateway over amqtt and logins at each broker are tested every day.
pytestmark = pytest.mark.nightly


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=lambda case: f"{case[0]}{'-password' if case[1] else ''}",
)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    kind, login = request.param
    directory = tmp_path_factory.mktemp(f"broker-{kind}")
    model = make_model("tiny-bert", directory / "model", seed=3)
    yield from running_site(directory, {"tiny": model}, AGENTS, kind=kind, login=login)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def hepti(site: Site) -> Iterator[Hepti]:
    with Hepti.connect(site.url, site=SITE) as client:
        wait_for_plans(client, ["tiny"], AGENTS)
        yield client


def test_two_devices_answer_together(site: Site, hepti: Hepti) -> None:
    ids = np.random.default_rng(4).integers(0, 200, 30).tolist()
    with Checkpoint.open(site.models["tiny"], "tiny") as checkpoint:
        prepared = read_input(checkpoint, {"ids": ids, "want": "hidden"})
        hidden, _ = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)
    pins = {"strategy": "row", "options": {"variant": "kv"}, "devices": ["a", "b"]}
    for _ in range(2):
        answer = foretold(
            partial(hepti.infer, "tiny", ids=ids, want="hidden", **pins, report=True, timeout_s=PATIENCE_S)
        )
        np.testing.assert_allclose(answer.hidden, hidden, atol=TOLERANCE)
        assert set(answer.plan["devices"]) == {"a", "b"}
        assert answer.raw["bytes_on_wire"] == answer.raw["predicted_bytes"]


def test_the_password_is_asked_for_and_stays_out_of_logs(site: Site, hepti: Hepti) -> None:
    if "@" not in site.url:
        pytest.skip("this broker lets everyone in")
    with pytest.raises(RefusedError):
        Hepti.connect(site.broker.url, site=SITE)
    for name in ("planner", *AGENTS):
        assert "cret" not in site.log(name)
        assert "cret" not in "".join(site.running[name].args)  # type: ignore[arg-type]
