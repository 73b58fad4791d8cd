"""A plan for requests that wait and have none: one device, or the last plan on the devices that are left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.config import settings
from hepti_mqtt.config.sites import load_site
from hepti_mqtt.cost.simulator import Naming
from hepti_mqtt.errors import PlanError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.models import shape_for
from hepti_mqtt.planner import Question, decide, decide_soon

SPEC = replace(spec_of_kind("bert-base"), layers=4)
FOUR = load_site(settings.find_bundled_config("sites", Path("four-pi4")))
ALL = tuple(FOUR.devices)


def question(*names: str, mbit: float | None = None, memory_bytes: float | None = None, **pins) -> Question:
    devices = {n: FOUR.devices[n] for n in names}
    if memory_bytes is not None:
        devices = {n: replace(profile, memory_bytes=memory_bytes) for n, profile in devices.items()}
    links = FOUR.links
    if mbit is not None:
        links = {
            n: replace(link, up_bytes_per_s=mbit * 125e3, down_bytes_per_s=mbit * 125e3) for n, link in links.items()
        }
    cluster = replace(FOUR, devices=devices, links=links)
    return Question(Naming("home", "m"), SPEC, cluster, shape_for(SPEC, 128), Epoch(1, 1), **pins)


def planned(strategy: str, **options: str):
    return decide(question(*ALL, strategy=strategy, options=options, devices=ALL)).chosen.plan


def test_the_devices_that_are_left_go_on_as_before_where_that_is_faster_than_one():
    last = planned("row", variant="kv")
    found = decide_soon(question(*ALL[:3]), last)
    assert found.chosen.plan.method == last.method
    assert set(found.chosen.plan.devices) == set(ALL[:3])
    assert {c.name for c in found.ranking} == {last.method, "single"}
    assert found.chosen.price.seconds < decide_soon(question(*ALL[:3])).chosen.price.seconds
    assert found.chosen.plan.predicted_tokens == 128


def test_one_device_answers_while_those_that_are_left_would_load_weights():
    assert decide_soon(question(*ALL[:3]), planned("row", variant="heads")).chosen.name == "single"


def test_one_device_answers_where_it_is_faster_or_no_other_is_left():
    last = planned("row", variant="kv")
    assert decide_soon(question(*ALL[:3], mbit=5), last).chosen.name == "single"
    assert decide_soon(question(*ALL[:1]), last).chosen.name == "single"
    assert decide_soon(question(*ALL[:3])).chosen.name == "single", "nothing has been planned yet"


def test_what_cannot_be_divided_among_those_that_are_left_is_no_hindrance():
    assert decide_soon(question(*ALL[:3]), planned("two_d", x="2")).chosen.name == "single"


def test_devices_of_which_none_has_the_memory_alone_go_on_together():
    last = planned("megatron", reduce="direct")
    single = decide_soon(question(*ALL[:3])).chosen.price.needs
    asked = question(*ALL[:3], memory_bytes=max(single.values()) * 0.8)
    with pytest.raises(PlanError):
        decide_soon(asked)
    assert decide_soon(asked, last).chosen.plan.method == last.method
    with pytest.raises(PlanError):
        decide_soon(question(*ALL[:3], memory_bytes=1e6), last)


def test_a_wire_that_nobody_has_measured_is_not_taken_in_a_hurry():
    last = replace(planned("row", variant="kv"), wire="f16")
    assert decide_soon(question(*ALL[:3], wire="f16"), last).chosen.plan.wire == "f16"
    assert decide_soon(question(*ALL[:3], accuracy=1e-2), last).chosen.plan.wire == "f32"
