import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.network import Subscriptions
from hepti_mqtt.ids import Epoch
from hepti_mqtt.protocol.topics import Topics

TOPICS = Topics("home")
WORK = TOPICS.work("m", "d0")


def of(model):
    return TOPICS.work(model, "d0")


class Broker:
    def __init__(self):
        self.tokens = []
        self.held = []

    def subscribe(self, plane, filters):
        assert filters
        self.tokens.append((plane, tuple(filters)))
        self.held += [(plane, f) for f in filters]
        return len(self.tokens)

    def unsubscribe(self, plane, filters):
        for f in filters:
            self.held.remove((plane, f))


@pytest.fixture
def broker():
    return Broker()


@pytest.fixture
def subscriptions(broker):
    return Subscriptions(broker)


def test_ready_only_after_every_acknowledgement(broker, subscriptions):
    assert not subscriptions.enter("m", Epoch(1, 1), ("a", "b"), WORK)
    assert broker.tokens == [("control", (WORK,)), ("data", ("a", "b"))]
    assert subscriptions.acknowledged("data", 1) == []  # a token of the other plane
    assert subscriptions.acknowledged("control", 1) == []
    assert subscriptions.acknowledged("data", 2) == [("m", Epoch(1, 1))]
    assert subscriptions.acknowledged("data", 2) == []  # after a reconnection


def test_a_shared_filter_is_subscribed_once(broker, subscriptions):
    subscriptions.enter("m", Epoch(1, 1), ("a",), WORK)
    assert not subscriptions.enter("m", Epoch(1, 2), ("a",), WORK)
    assert len(broker.tokens) == 2
    subscriptions.acknowledged("control", 1)
    assert set(subscriptions.acknowledged("data", 2)) == {("m", Epoch(1, 1)), ("m", Epoch(1, 2))}
    assert subscriptions.enter("m", Epoch(1, 3), ("a",), WORK)
    subscriptions.release("m", Epoch(1, 1))
    subscriptions.release("m", Epoch(1, 2))
    assert broker.held == [("control", WORK), ("data", "a")]
    subscriptions.release("m", Epoch(1, 3))
    subscriptions.leave(("a",), (WORK,))
    assert broker.held == []


def test_a_released_epoch_is_not_told_of(subscriptions):
    subscriptions.enter("m", Epoch(1, 1), ("a",), WORK)
    subscriptions.release("m", Epoch(1, 1))
    assert subscriptions.acknowledged("control", 1) == []
    assert subscriptions.acknowledged("data", 2) == []


def test_a_refusal_hits_the_epochs_that_wait_for_it(broker, subscriptions):
    subscriptions.enter("m", Epoch(1, 1), ("a",), WORK)
    subscriptions.acknowledged("control", 1)
    subscriptions.enter("m", Epoch(1, 2), (), WORK)
    assert subscriptions.refused("data", 2) == [("m", Epoch(1, 1))]
    assert broker.held == [("control", WORK)]
    assert not subscriptions.enter("m", Epoch(1, 3), ("a",), WORK)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "release", "ack"]),
            st.sampled_from("mn"),
            st.integers(1, 4),
            st.sets(st.sampled_from("abc")),
        ),
        max_size=40,
    )
)
def test_what_is_held_is_what_the_epochs_need(operations):
    broker = Broker()
    subscriptions = Subscriptions(broker)
    wanted, ready, acked = {}, set(), 0
    for what, model, number, filters in operations:
        key = (model, Epoch(1, number))
        if what == "enter" and key not in wanted:
            wanted[key] = {f"{model}{f}" for f in filters}
            if subscriptions.enter(*key, tuple(sorted(wanted[key])), of(model)):
                ready.add(key)
        elif what == "release" and key in wanted:
            gone = wanted.pop(key)
            subscriptions.release(*key)
            works = () if any(m == model for m, _ in wanted) else (of(model),)
            subscriptions.leave(tuple(gone - {f for own in wanted.values() for f in own}), works)
            ready.discard(key)
        elif what == "ack":
            while acked < len(broker.tokens):
                acked += 1
                done = subscriptions.acknowledged(broker.tokens[acked - 1][0], acked)
                assert not ready & set(done)
                ready |= set(done)
            assert ready == set(wanted)
        needed = {("data", f) for own in wanted.values() for f in own}
        needed |= {("control", of(model)) for model, _ in wanted}
        assert sorted(broker.held) == sorted(needed)
