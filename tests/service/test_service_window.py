"""Requests that the broker waits for: whether more may have come at once than it keeps."""

from __future__ import annotations

from hepti_mqtt.service.channel import Window
from hepti_mqtt.transport import Receipt


def through(window: Window, *packets: int, connection: int = 1) -> None:
    for packet in packets:
        window.opened(Receipt(connection, packet))


def acknowledged(window: Window, *packets: int, connection: int = 1) -> None:
    for packet in packets:
        window.closed(Receipt(connection, packet))


def test_a_full_window_is_told_of_once_when_all_is_acknowledged():
    told: list[str] = []
    window = Window(lambda: told.append("spilled"))
    window.limit = 3
    through(window, 1, 2)
    acknowledged(window, 1, 2)
    assert not told, "all that came was handed over"
    through(window, 3, 4, 5)
    acknowledged(window, 3, 4)
    assert not told, "what is sent again now would meet the same window"
    acknowledged(window, 5)
    through(window, 6)
    acknowledged(window, 6)
    assert told == ["spilled"]


def test_a_broker_that_keeps_enough_is_not_doubted():
    told: list[str] = []
    window = Window(lambda: told.append("spilled"))
    through(window, *range(1000))
    acknowledged(window, *range(1000))
    assert not told


def test_another_connection_brings_everything_again():
    told: list[str] = []
    window = Window(lambda: told.append("spilled"))
    window.limit = 2
    through(window, 1)
    through(window, 1, connection=2)
    acknowledged(window, 1, connection=1)
    through(window, 2, connection=2)
    acknowledged(window, 1, 2, connection=2)
    assert told == ["spilled"], "two were there at once"
