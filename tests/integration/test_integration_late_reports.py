"""Tokens of a decoder with a real broker, while what one of its devices reports is held up on its way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from held_connection import Relay, relayed
from site_processes import PATIENCE_S, SITE, Site, poll, running_site

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.plan import Plan
from hepti_mqtt.runtime.coordinator.requests import UNREPORTED
from hepti_mqtt.transport.mesh import mesh_possible

pytestmark = [
    pytest.mark.processes,
    pytest.mark.broker,
    pytest.mark.skipif(not mesh_possible(), reason="the exchanges go past the broker, and the mesh needs Linux"),
]

PROMPT = np.random.default_rng(3).integers(5, 200, 9).tolist()
NAMES = ("a", "b")
ASKED = {"ids": PROMPT, "strategy": "decoder", "devices": list(NAMES), "route": "mesh", "timeout_s": PATIENCE_S}


@pytest.fixture
def site(tmp_path) -> Iterator[tuple[Site, dict[str, Relay]]]:
    model = make_model("tiny-gpt2", tmp_path / "model", seed=3)
    for found in running_site(tmp_path, {"gpt": model}, {}):
        with contextlib.ExitStack() as stack:
            relays = {name: stack.enter_context(relayed(found.url)) for name in NAMES}
            for name, relay in relays.items():
                found.agent(name, "200MiB", "--broker", relay.url)
            yield found, relays


def expected(site: Site, most: int) -> list[int]:
    """Return the tokens that whole passes of the reference choose."""
    ids = list(PROMPT)
    with Checkpoint.open(site.models["gpt"], "gpt") as checkpoint:
        for _ in range(most):
            shape, inputs = models.packed(checkpoint.spec, np.array(ids, np.int32))
            ids.append(int(models.reference(checkpoint.spec, checkpoint.tensors(), inputs, shape)[1].argmax()))
    return ids[len(PROMPT) :]


def test_tokens_and_the_answer_come_while_a_device_s_reports_do_not(site) -> None:
    found, relays = site
    with Hepti.connect(found.url, site=SITE, client_id="tester") as hepti:
        poll(lambda: {d["device"] for d in hepti.devices(wait_s=0.2) if d["status"] == "online"} == set(NAMES), "both")
        whole = hepti.infer("gpt", **ASKED, max_new_tokens=UNREPORTED, report=True)
        plan = Plan.from_dict(hepti.plan("gpt")["pinned"][0])
        assert (set(plan.devices), plan.route, plan.relayed) == (set(NAMES), "mesh", ())
        assert set(whole.raw["compute_ms"]) == set(NAMES)
        (other,) = set(NAMES) - {plan.head}  # who sends no logits, and reports alone over the broker
        relays[other].hold()
        answer = hepti.infer("gpt", **ASKED, max_new_tokens=UNREPORTED)
        relays[other].release()
        again = hepti.infer("gpt", **ASKED, max_new_tokens=UNREPORTED, report=True)
    tokens = expected(found, UNREPORTED)
    assert [a.result["ids"] for a in (whole, answer, again)] == [tokens] * 3
    assert (answer.raw["compute_ms"], answer.raw["bytes_on_wire"]) == (None, None)
    assert again.raw["bytes_on_wire"] == whole.raw["bytes_on_wire"]
    assert {a.plan["id"] for a in (whole, answer, again)} == {whole.plan["id"]}, "nobody was lost"
