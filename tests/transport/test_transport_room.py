"""How many messages a real Mosquitto keeps for one client."""

from __future__ import annotations

from pathlib import Path

import pytest
from limited_broker import mosquitto_with

from hepti_mqtt.embedded_broker.settings import SETTINGS
from hepti_mqtt.errors import NetworkError
from hepti_mqtt.transport import BrokerUrl, PahoTransport, Room, queue_room

pytestmark = pytest.mark.broker

WANTED = 100


@pytest.mark.parametrize(
    ("lines", "room"),
    [
        (["max_queued_messages 10"], Room(20, 10)),
        (["max_queued_messages 1", "max_inflight_messages 120"], Room(120, 1)),
        ([f"{s.name} {s.value}" for s in SETTINGS if s.name.startswith("max_")], None),
        ([], None),
        (["max_inflight_messages 0"], None),
    ],
    ids=["10", "1 of a large window", "ours", "Mosquitto's own", "no limit"],
)
def test_the_room_is_found_exactly(tmp_path: Path, lines: list[str], room: Room | None) -> None:
    with mosquitto_with(tmp_path, *lines) as broker:
        assert queue_room(BrokerUrl.parse(broker.url), client_id="room", topic="t/1", wanted=WANTED) == room


def test_an_attempt_to_connect_that_is_late_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def late(_transport: PahoTransport, _timeout_s: float) -> None:
        raise NetworkError("no broker answers")

    monkeypatch.setattr(PahoTransport, "connect", late)
    monkeypatch.setattr(PahoTransport, "close", lambda _transport, **_: closed.append(True))
    with pytest.raises(NetworkError, match="no broker answers"):
        queue_room(BrokerUrl("127.0.0.1", 1883), client_id="room", topic="t/1", wanted=WANTED)
    assert closed
