"""A text goes on under a better plan between two tokens: sessions of planner and devices on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sites import always, plan, tensors
from swarm import MODEL, Swarm, plan_of

from hepti_mqtt import models
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.runtime.coordinator import interface
from hepti_mqtt.runtime.coordinator.requests import Pins

SPEC = replace(spec_of_kind("tiny-gpt2"), layers=2)
TENSORS = tensors(SPEC)
BOTH, ALONE = plan(SPEC, ("decoder", {}), (1.0, 1.0)), plan(SPEC, ("single", {}), (1.0,))
FLOPS_PER_S, SLOW = 1e5, 1e3  # a token takes a quarter of a second, as the planner expects it
PROMPT = np.arange(3, 7, dtype=np.int32)


class Site(Swarm):
    """Two devices; the second one may become slower, and reports it."""

    def __init__(self) -> None:
        hosts = dict.fromkeys(BOTH.devices, (FLOPS_PER_S, 1 << 30))
        super().__init__(SPEC, TENSORS, hosts, decider=always(BOTH), pins=Pins(strategy=BOTH.strategy))
        self.slowdown = dict.fromkeys(hosts, 1.0)
        self.run(20, until=lambda: plan_of(self) is not None)
        for host in self.hosts.values():
            host.slowness = SLOW

    def _tick(self) -> None:
        for name, host in self.hosts.items():
            if host.alive and hasattr(self, "slowdown"):
                said = messages.Heartbeat(host.boot, 1, 0.0, 1 << 30, None, 2e-4, 1e8, self.slowdown[name], 0, {})
                self.tell_planner(interface.DeviceHeartbeat(name, said))
        self.tell_planner(interface.Tick())
        self.after(0.25, self._tick)

    def begin_text(self, most: int, tokens: int) -> None:
        """Let a text have some tokens."""
        self.generate("x", SPEC, PROMPT, most)
        self.run(600, until=lambda: len(self.tokens.get("x", ())) >= tokens)

    def change(self) -> None:
        """Let one device alone serve from now on."""
        self.decider = always(ALONE)
        self.pin(Pins(strategy=ALONE.strategy))

    def fall(self) -> None:
        """Let the second device fall to a quarter of its speed."""
        self.slowdown["d1"] = 4.0
        self.hosts["d1"].slowness *= 4

    def finish(self) -> list[str]:
        """Let the text end, with the right tokens; return the plans of its runs, in their order."""
        self.run(900, until=lambda: bool(self.answers or self.errors))
        assert not self.errors
        [(tokens, _)] = self.answers["x"]
        ids = PROMPT.tolist()
        for token in tokens.tolist():
            shape, inputs = models.single_sequence(SPEC, np.array(ids, np.int32))
            assert token == models.reference(SPEC, TENSORS, inputs, shape)[1].argmax()
            ids.append(token)
        self.run(5)
        assert len(self.planner.groups.default(MODEL).plans.records()) == 1, "the plan before is released"
        return list(dict.fromkeys(str(frame.plan_version) for frame in self.work))

    @property
    def story(self) -> list[str]:
        """Return under which plans the planner says that the text goes on."""
        return [t.after for t in self.planner.stories()[0].last() if t.event == "run"]


@pytest.mark.parametrize(("most", "falls", "moves"), [(60, True, True), (60, False, False), (14, True, False)])
def test_a_text_moves_where_what_remains_gains_more_than_its_rows_cost(most: int, falls: bool, moves: bool) -> None:
    site = Site()
    first = str(plan_of(site).version)
    site.begin_text(most, 5)
    if falls:
        site.fall()
        site.run(4)
    site.change()
    used = site.finish()
    last = str(plan_of(site).version)
    assert used == ([first, last] if moves else [first])
    assert [frames.decode_work(frame)[1][0] for frame in site.work].count(0) == 1 + moves, "rows in the KV cache"
    assert site.story[-1] == (last if moves else first)


def test_a_text_that_stays_moves_when_its_device_is_lost() -> None:
    site = Site()
    site.begin_text(40, 5)
    site.change()
    site.run(600, until=lambda: bool(site.story))
    site.kill("d1")
    assert len(site.finish()) == 2
