"""Messages that a broker does not take, and hangs up on: they must not keep back what comes after them for ever."""

from __future__ import annotations

import queue

import pytest
from picky import HANG_UP, LEAVE, TAKE, Picky

from hepti_mqtt.transport import BrokerUrl, Connected, PahoTransport, Refused
from hepti_mqtt.transport.control import HANG_UPS, Message
from hepti_mqtt.transport.control import _HangUps as HangUps

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """Connect again at once."""
    monkeypatch.setattr("hepti_mqtt.transport.base.BACKOFF_S", (0.01, 0.05))


@pytest.fixture
def picky():
    made = []

    def make(*arguments, **options):
        made.append(Picky(*arguments, **options))
        return made[-1]

    yield make
    for broker in made:
        broker.close()


class Sender:
    """A transport, and what it tells: (topic, heard) of what is taken or refused, and states."""

    def __init__(self, broker, protocol):
        self.taken, self.states = queue.SimpleQueue(), queue.SimpleQueue()
        url = BrokerUrl("127.0.0.1", broker.port)
        self.transport = PahoTransport(
            url, "me", on_message=lambda *_: None, on_state=self.states.put, protocol=protocol
        )

    def publish(self, topic, payload=b"x"):
        self.transport.publish(topic, payload, 1, taken=lambda heard: self.taken.put((topic, heard)))

    def next_taken(self):
        return self.taken.get(timeout=PATIENCE_S)

    def told(self, kind):
        """Close, and return the states of one kind."""
        self.transport.close(timeout_s=0.1)
        found = []
        while not self.states.empty():
            found.append(self.states.get())
        return [state for state in found if isinstance(state, kind)]


@pytest.mark.parametrize("protocol", [4, 5], ids=["3.1.1", "5"])
def test_a_message_on_which_the_broker_hangs_up_is_given_up_and_the_rest_is_taken(picky, protocol):
    broker = picky(lambda _n, topic: HANG_UP if topic == "bad" else TAKE)
    sender = Sender(broker, protocol)
    sender.transport.subscribe([("mine", 1)])
    for topic in ("before", "bad", "after", "bad"):  # the last: as one who waits publishes again
        sender.publish(topic)
    sender.transport.connect(PATIENCE_S)
    assert [sender.next_taken()[0] for _ in range(4)] == ["before", "bad", "bad", "after"]
    assert sender.transport.counts().reconnections > HANG_UPS
    refusals = sender.told(Refused)
    assert [(refusal.token, refusal.topics) for refusal in refusals] == [(None, ("bad",))] * 2
    assert "hung up 3 times on end" in refusals[0].reason


def test_after_a_hang_up_the_first_message_goes_alone_until_it_is_acknowledged(picky):
    """Acknowledgements may be lost with the connection: the one before it is not to be blamed."""
    broker = picky(lambda n, _topic: HANG_UP if n < 2 else TAKE)
    sender = Sender(broker, 4)
    for topic in ("a", "b", "c"):
        sender.publish(topic)
    sender.transport.connect(PATIENCE_S)
    assert [sender.next_taken() for _ in range(3)] == [("a", True), ("b", True), ("c", True)]
    assert [broker.came.get() for _ in range(5)] == [(0, "a"), (1, "a"), (2, "a"), (2, "b"), (2, "c")]
    assert sender.told(Refused) == []


def test_a_broker_that_restarts_under_a_message_again_and_again_gets_it_at_last(picky):
    """It is away for a while each time, here for one try."""
    broker = picky(lambda n, _topic: HANG_UP if n < 8 else TAKE, open_to=lambda n: n % 2 == 0)
    sender = Sender(broker, 4)
    sender.publish("long")
    sender.transport.connect(PATIENCE_S)
    assert sender.next_taken() == ("long", True)
    assert broker.came.qsize() == 5
    assert sender.told(Refused) == []


def test_a_broker_that_says_that_it_shuts_down_is_not_blamed_on_a_message(picky):
    broker = picky(lambda n, _topic: LEAVE if n < 6 else TAKE)
    sender = Sender(broker, 5)
    sender.publish("long")
    sender.transport.connect(PATIENCE_S)
    assert sender.next_taken() == ("long", True)
    assert sender.told(Refused) == []


def test_what_waits_is_refused_by_a_broker_that_says_it_takes_nothing_so_large(picky):
    broker = picky(lambda _n, topic: HANG_UP if topic == "large" else TAKE, limit=2000)
    sender = Sender(broker, None)
    sender.publish("large", bytes(5000))
    sender.publish("small")
    sender.transport.connect(PATIENCE_S)
    assert [sender.next_taken() for _ in range(2)] == [("large", False), ("small", True)]
    states = sender.told(Refused | Connected)
    assert states == [
        Refused(None, ("large",), "it takes packets of at most 2000 bytes, not 5012"),
        Connected(5, 2000, local=True),
    ]


def test_only_hang_ups_on_the_same_message_on_end_count():
    hang_ups, message, other = HangUps(), Message("a", b"", 1, False, 5), Message("b", b"", 1, False, 5)
    for first in (message, message, message, other, message, message, None, *[message] * HANG_UPS):
        hang_ups.lost(first)
        assert hang_ups.unwanted() is None
    hang_ups.away()
    for _ in range(HANG_UPS):
        assert hang_ups.unwanted() is None
        hang_ups.lost(message)
    assert hang_ups.unwanted() is message
    assert hang_ups.unwanted() is None
    assert hang_ups.suspect is None
