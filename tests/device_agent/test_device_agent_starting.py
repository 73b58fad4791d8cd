"""What a device says while it starts."""

from __future__ import annotations

import logging

from device_agent.background import LOG_S, Starting
from hepti_mqtt.errors import NetworkError
from hepti_mqtt.protocol.messages import Status


class Told:
    def __init__(self):
        self.said, self.now = [], 0.0

    def starting(self):
        return Starting(self.said.append, 7, logging.getLogger("test.starting"), lambda: self.now)


def test_what_is_done_is_said_when_it_changes_and_again_by_and_by(monkeypatch):
    monkeypatch.setattr("device_agent.background.SAY_S", 0.001)
    told = Told()
    with told.starting() as starting:
        starting.tell("compiling kernels", 3, 23)
        known = len(told.said)
        while len(told.said) < known + 3:
            pass
        starting.tell("measuring")
    assert told.said[0] == Status("starting", 7)
    assert Status("starting", 7, "compiling kernels", 3, 23) in told.said[known:]
    assert told.said[-1] == Status("starting", 7, "measuring")


def test_the_log_has_a_line_for_each_stage_and_some_of_its_steps(caplog):
    told = Told()
    with caplog.at_level(logging.INFO, "test.starting"), told.starting() as starting:
        for step in range(4):
            starting.tell("compiling kernels", step, 23)
            told.now += LOG_S / 2
        starting.tell("measuring")
    assert caplog.messages == ["compiling kernels: 0 of 23", "compiling kernels: 2 of 23", "measuring"]


def test_a_broker_that_is_gone_stops_nothing():
    def publish(status):
        raise NetworkError("gone")

    with Starting(publish, 7, logging.getLogger("test.starting")) as starting:
        starting.tell("measuring")
