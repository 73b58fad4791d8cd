"""A table of words is divided where a device lacks room for all of it, and only there if that takes time."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import questions
from questions import cluster, device, meshed

from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.core.errors import PlanError
from hepti_mqtt.core.storage import QUANTISED
from hepti_mqtt.models import quantised, with_storages
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.models.tensors import EMBEDDING_TABLE, LOGITS_MATRIX
from hepti_mqtt.planner import Question, decide
from hepti_mqtt.planner.price import needed_bytes, plan_alone
from hepti_mqtt.strategies.method import EMBEDDINGS

TINY = spec_of_kind("tiny-mistral")
VOCABULARY = 64_000
SPEC = replace(
    TINY,
    hidden=256, heads=12, mlp=768, max_tokens=256, block=replace(TINY.block, kv_heads=6, head_dim=32, windows=()),
    text=replace(TINY.text, positions=256, vocab=VOCABULARY), head=replace(TINY.head, outputs=VOCABULARY),
)  # fmt: skip
NAMES = ("a", "b", "c")


def question(spec, room: float) -> Question:
    site = cluster(*(device(name, 10.0, room) for name in NAMES), mbit=800, latency_s=1e-4)
    return questions.question(spec, meshed(site), TokenBatch((1,), cache=256))


@pytest.mark.parametrize(
    "spec", [SPEC, with_storages(SPEC, dict.fromkeys((EMBEDDING_TABLE, LOGITS_MATRIX), "q8_0"))], ids=["f32", "q8_0"]
)
def test_three_devices_with_room_for_a_third_each_hold_a_model_and_with_less_they_are_refused(spec) -> None:
    roomy = question(spec, 1e12)
    assert EMBEDDINGS.kind not in decide(roomy).chosen.plan.ranges, "one exchange more for each token"
    whole = needed_bytes(roomy, plan_alone("f32"), "")
    tight = question(spec, 0.4 * whole)  # a third, and what each device has beside its weights
    chosen = decide(tight).chosen
    assert set(chosen.plan.devices) == set(NAMES)
    assert EMBEDDINGS.kind in chosen.plan.ranges
    assert all(needed_bytes(tight, chosen.plan, n) == chosen.price.needs[n] <= 0.4 * whole for n in NAMES)
    with pytest.raises(PlanError) as refused:
        decide(question(spec, 0.25 * whole))
    assert f"has {0.25 * whole / 2**20:.1f} MiB" in str(refused.value)


@pytest.mark.parametrize(("part", "narrower"), [(0.3, "q8"), (0.22, "q4"), (0.1, "")])
def test_what_a_refusal_advises_helps(part: float, narrower: str) -> None:
    room = part * needed_bytes(question(SPEC, 1e12), plan_alone("f32"), "")
    with pytest.raises(PlanError) as refused:
        decide(question(SPEC, room))
    assert re.findall(r"--weights (\w+)", str(refused.value)) == [narrower] * bool(narrower)
    if narrower:
        query = question(quantised(SPEC, narrower) if narrower in QUANTISED else SPEC, room)
        assert decide(query if narrower in QUANTISED else replace(query, weight_dtype=narrower))
    (more,) = re.findall(r"add a device with (\d+) MiB", str(refused.value))
    query = question(SPEC, room)
    added = replace(query.cluster.devices["a"], name="d", memory_bytes=1.1 * int(more) * 2**20)
    links = {**query.cluster.links, "d": query.cluster.links["a"]}
    site = replace(query.cluster, devices={**query.cluster.devices, "d": added}, links=links)
    assert decide(replace(query, cluster=meshed(site)))


def test_the_least_memory_of_a_device_divides_the_table() -> None:
    query = replace(question(SPEC, 1e9), objective="memory")
    assert EMBEDDINGS.kind in decide(query).chosen.plan.ranges
