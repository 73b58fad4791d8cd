"""What a login retains where nobody reads it is cleared; what Hepti retains stays."""

import logging

from broker_kinds import needs_mosquitto
from site_processes import retain

from hepti_mqtt.protocol.messages import Status, encode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.retained import RetainedSweep, retained_topics, unread_topics


@needs_mosquitto
def test_a_sweep_clears_what_nobody_reads_and_nothing_else(url):
    topics = Topics("swept")
    junk = [topics.activation("m", layer, "a", "all") for layer in range(50)]
    junk += [topics.request("m", "alice"), topics.everything().replace("#", "x/y")]
    kept = [topics.status("a"), topics.caps("a"), topics.plan("m"), topics.use("a"), topics.home("device", "a")]
    retain(url, [*junk, *kept], encode_status(Status("online", 1)))
    sweep = RetainedSweep(url, topics, logging.getLogger("sweep"))
    assert sweep.sweep() == len(junk)
    assert retained_topics(url, topics, [topics.everything()]) == sorted(kept)
    assert sweep.sweep() == 0


def test_a_look_ends_when_it_has_received_enough(url):
    topics = Topics("large")
    retain(url, [topics.activation("m", layer, "a", "all") for layer in range(10)], bytes(1000))
    assert len(retained_topics(url, topics, [topics.everything()], most_bytes=2500)) == 3


def test_other_sites_are_left_alone():
    topics = Topics("home")
    assert unread_topics(topics, [topics.status("a"), topics.event("x")]) == [topics.event("x")]
