"""Three agents as processes, each too small for the embedding table, answer as one device would."""

from __future__ import annotations

from dataclasses import replace

import pytest
from site_processes import PATIENCE_S, SITE, running_site

from device_agent.machine import LOADING_BYTES
from hepti_mqtt.checkpoint import Checkpoint, make, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.planner.price import peak_bytes
from hepti_mqtt.strategies.plan_programs import make_plan

AGENTS = ("a", "b", "c")
WORDS = 60_000  # of 32 columns: the table is most of the model
PROMPT = [5, 59_999, 30_000, 3, 41_000]
MOST = 5
pytestmark = pytest.mark.nightly


def needs(spec, divides_embeddings):
    template = Plan("m", PlanVersion(1, 1), "decoder", AGENTS, "a")
    plan = make_plan(spec, template, "decoder", {}, (1.0, 1.0, 1.0), divides_embeddings=divides_embeddings)
    return [peak_bytes(spec, plan, name, in_flight=2) for name in AGENTS]


@pytest.fixture
def site(tmp_path, monkeypatch):
    kind = make.KINDS["tiny-mistral"]
    monkeypatch.setitem(make.KINDS, "wide", replace(kind, config={**kind.config, "vocab_size": WORDS}))
    model = make_model("wide", tmp_path / "model", seed=3)
    with Checkpoint.open(model, "m") as checkpoint:
        most, whole = max(needs(checkpoint.spec, True)), max(needs(checkpoint.spec, False))
    assert 1.2 * most < whole, "or the test shows nothing"
    room = LOADING_BYTES + int(1.1 * most)
    yield from running_site(tmp_path, {"m": model}, dict.fromkeys(AGENTS, str(room)))


def test_a_text_is_that_of_the_whole_table(site):
    with Hepti.connect(site.url, site=SITE) as hepti:
        record = hepti.wait_ready("m", PATIENCE_S, lambda record: record["active"] is not None)
        assert sorted(record["active"]["devices"]) == [*AGENTS]
        assert "embeddings" in record["active"]["ranges"]
        answer = hepti.infer("m", ids=PROMPT, max_new_tokens=MOST, report=True, timeout_s=PATIENCE_S)
    assert answer.result["ids"] == site.continued("m", PROMPT, MOST)
