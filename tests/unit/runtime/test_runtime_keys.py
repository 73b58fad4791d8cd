"""A planner that has agreed on secrets with its devices: what it takes of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from scripted_site import SECRET, KeyedSite, private_of

from hepti_mqtt.core.plan import Plan
from hepti_mqtt.protocol import keys
from hepti_mqtt.protocol.keys import UNKEYED, Channel, FrameKey

FORGER = b"3" * 32


def test_a_report_that_the_device_has_not_sealed_counts_for_nothing() -> None:
    site = KeyedSite("a")
    stranger = Channel(keys.agree(FORGER, keys.public_key(SECRET)), count(1), at_planner=False)
    for channel in (None, stranger):
        site.say("a", site.ready_message("a"), channel)
    assert site.plan is None
    assert site.session.counters["forged"] == 2
    site.say("a", site.ready_message("a"), site.channels["a"])
    assert site.plan is not None


def test_outputs_without_the_tag_of_the_plan_are_no_answer() -> None:
    site = KeyedSite("a")
    site.say("a", site.ready_message("a"), site.channels["a"])
    site.submit("r1")
    (run_id,) = site.work
    assert site.work[run_id].has_tag(site.frame_key("a"))
    for key in (UNKEYED, FrameKey(FORGER)):
        site.give_answer(run_id, key, 7.0)
    assert not site.answers
    site.give_answer(run_id, site.frame_key("a"), 1.0)
    assert site.answers["r1"].request.outputs[0].max() == 1.0


def test_caps_with_another_key_are_not_believed_once_the_device_has_shown_its_own() -> None:
    site = KeyedSite("a")
    site.describe("a", FORGER)
    site.describe("a", private_of("a"))
    site.say("a", site.ready_message("a"), site.channels["a"])
    assert site.plan is not None, "what was forged before is put right"
    for private in (FORGER, private_of("a")):
        site.describe("a", private)
    assert "a" in site.session.fleet.usable()
    site.submit("r1")
    site.give_answer(next(iter(site.work)), site.frame_key("a"), 1.0)
    assert "r1" in site.answers


def test_a_plan_with_a_device_that_has_no_key_has_none() -> None:
    site = KeyedSite("a")
    site.join("b")
    fleet = site.session.fleet
    plan = Plan.from_dict(site.prepares()["a"].plan)
    assert fleet.frame_key(plan).key
    assert fleet.frame_key(replace(plan, devices=("a", "b"))) == UNKEYED
