"""A bag at a site of real processes: a device is killed while tiles are leased, and the others compute its tiles."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import numpy as np
import pytest
from site_processes import PATIENCE_S, SITE, Site, Voice, poll, running_site

from hepti_mqtt import models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.client.described import random_input
from hepti_mqtt.core.errors import WireError
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.answers import decode_output
from hepti_mqtt.service.requests import read_input

NAMES = ["a", "b", "c"]
KIND, TASKS = "tiny-convnet", 8
PINS = {"strategy": "fused_tiles", "options": {"cut": "1", "owners": "leased"}, "devices": NAMES}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("bags")
    model = make_model(KIND, directory / KIND, seed=3)
    yield from running_site(directory, {KIND: model}, dict.fromkeys(NAMES, "300MiB"))


class Watcher:
    """Hears which device says that it has computed which task, of which run."""

    def __init__(self, site: Site) -> None:
        self.computed: dict[str, set[int]] = {name: set() for name in NAMES}
        self.runs: set[int] = set()
        self._by = {Topics(SITE).reports(name): name for name in NAMES}
        self.voice = Voice(site.url, *self._by)

    def until(self, holds: Callable[[Mapping[str, set[int]]], bool]) -> dict[str, set[int]]:
        """Return what each device has computed as soon as that holds; it was one run."""
        while not holds(self.computed):
            topic, payload = self.voice.next()
            with suppress(WireError):
                message = messages.decode_sealed_report(payload)[0]
                if isinstance(message, messages.TaskDone):
                    self.computed[self._by[topic]].add(message.task)
                    self.runs.add(message.run_id)
        return self.computed


def test_the_tiles_of_a_killed_agent_are_computed_by_the_others_within_the_run(site: Site) -> None:
    """The head device stands still meanwhile, so that no answer can be ready before the agent is dead."""
    with Checkpoint.open(site.models[KIND], KIND) as checkpoint:
        body = random_input(checkpoint.spec, 1, seed=5)
        prepared = read_input(checkpoint, body)
        output = models.reference(checkpoint.spec, checkpoint.tensors(), prepared.inputs, prepared.shape)[1]
        want = decode_output(checkpoint, prepared, output)
    with Hepti.connect(site.url, site=SITE) as hepti:

        def online() -> set[str]:
            return {d["device"] for d in hepti.devices(wait_s=0.2) if d["status"] == "online"}

        poll(lambda: online() == set(NAMES), "all online")
        before = hepti.infer(KIND, **body, **PINS, timeout_s=PATIENCE_S)
        [pinned] = hepti.plan(KIND)["pinned"]
        head = pinned["root"]
        other, victim = (name for name in NAMES if name != head)
        watcher = Watcher(site)
        try:
            site.running[head].send_signal(signal.SIGSTOP)
            pending = hepti.submit(KIND, **body, **PINS)
            watcher.until(lambda computed: bool(computed[victim]))
            site.kill(victim)
            computed = watcher.until(lambda computed: computed[other] == set(range(TASKS)))
            site.running[head].send_signal(signal.SIGCONT)
            after = pending.result(PATIENCE_S)
        finally:
            site.running[head].send_signal(signal.SIGCONT)
            watcher.voice.close()
    assert len(watcher.runs) == 1
    assert computed[victim]
    for got in (before, after):
        assert [label["label"] for label in got.labels] == [label["label"] for label in want["labels"]]
        scores = [[label["score"] for label in labels] for labels in (got.labels, want["labels"])]
        np.testing.assert_allclose(*scores, atol=1e-5)
