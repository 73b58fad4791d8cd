"""A bag at a site of real processes: a device is killed while tiles are leased, and the others compute its tiles."""

from __future__ import annotations

import signal
from contextlib import suppress

import numpy as np
from site_processes import PATIENCE_S, SITE, Voice, client_of, site_of

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.client.described import random_input
from hepti_mqtt.core.errors import WireError
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.requests import read_input

NAMES = ["a", "b", "c"]
KIND, TASKS = "tiny-convnet", 8
PINS = {"strategy": "fused_tiles", "options": {"cut": "1", "owners": "leased"}, "devices": NAMES}
site = site_of({KIND: KIND}, dict.fromkeys(NAMES, "300MiB"))
hepti = client_of(online=True)


class Watcher(Voice):
    """Collects the tasks that each device reports as computed, and their runs."""

    def __init__(self, url):
        self.computed, self.runs = {name: set() for name in NAMES}, set()
        self.device_of = {Topics(SITE).reports(name): name for name in NAMES}
        super().__init__(url, *self.device_of)

    def until(self, holds):
        """Read reports until `holds` is true of the computed tasks."""
        while not holds(self.computed):
            topic, payload = self.next()
            with suppress(WireError):
                message = messages.decode_sealed_report(payload)[0]
                if isinstance(message, messages.TaskDone):
                    self.computed[self.device_of[topic]].add(message.task)
                    self.runs.add(message.run_id)


def test_the_tiles_of_a_killed_agent_are_computed_by_the_others_within_the_run(site, hepti):
    """The head device stands still meanwhile, so that no answer can be ready before the agent is dead."""
    with Checkpoint.open(site.models[KIND], KIND) as checkpoint:
        body = random_input(checkpoint.spec, 1, seed=5)
        prepared = read_input(checkpoint, body)
        output = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)[1]
        want = decode_output(checkpoint, prepared, output)
    before = hepti.infer(KIND, **body, **PINS, timeout_s=PATIENCE_S)
    [pinned] = hepti.plan(KIND)["pinned"]
    head = pinned["root"]
    other, victim = (name for name in NAMES if name != head)
    with Watcher(site.url) as watcher:
        site.running[head].send_signal(signal.SIGSTOP)
        try:
            pending = hepti.submit(KIND, **body, **PINS)
            watcher.until(lambda computed: computed[victim])
            site.kill(victim)
            watcher.until(lambda computed: computed[other] == set(range(TASKS)))
        finally:
            site.running[head].send_signal(signal.SIGCONT)
        after = pending.result(PATIENCE_S)
    assert len(watcher.runs) == 1
    for got in (before, after):
        assert [label["label"] for label in got.labels] == [label["label"] for label in want["labels"]]
        scores = [[label["score"] for label in labels] for labels in (got.labels, want["labels"])]
        np.testing.assert_allclose(*scores, atol=1e-5)
