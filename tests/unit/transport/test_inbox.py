import queue
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.transport.base import SENDER_BYTES, SENDER_EVENTS, Inbox


@given(st.lists(st.tuples(st.sampled_from(["offer", "post", "get"]), st.integers(0, 60)), max_size=80))
def test_offered_events_are_bounded_and_stay_in_order(operations):
    inbox = Inbox(limit=10, limit_bytes=100)
    expected = []
    for number, (what, nbytes) in enumerate(operations):
        waiting = sum(n for _, n in expected)
        if what == "post":
            inbox.post(number)
            expected.append((number, 0))
        elif what == "offer":
            fits = (waiting == 0 or waiting + nbytes <= 100) and len(expected) < 10
            assert inbox.offer(number, nbytes) is fits
            if fits:
                expected.append((number, nbytes))
        elif expected:
            assert inbox.get() == expected.pop(0)[0]
        assert inbox.empty() is not bool(expected)


def test_each_sender_has_its_own_bound():
    inbox = Inbox(limit=10, limit_bytes=100)
    assert sum(inbox.accept("loud", number, 1) for number in range(2 * SENDER_EVENTS)) == SENDER_EVENTS
    assert [inbox.accept("large", number, SENDER_BYTES) for number in range(2)] == [True, False]
    assert inbox.accept("quiet", "small", 1)
    assert inbox.offer("a request", 100)
    events = [inbox.get() for _ in range(SENDER_EVENTS + 3)]
    assert events == [*range(SENDER_EVENTS), 0, "small", "a request"]
    assert inbox.accept("loud", 1, SENDER_BYTES), "its account is empty"


def test_many_threads_lose_nothing_and_account_for_everything():
    inbox = Inbox(limit=100_000, limit_bytes=1 << 40)
    threads = [
        threading.Thread(target=lambda t=t: [inbox.offer((t, i), 3) for i in range(2000)], daemon=True)
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    events = [inbox.get() for _ in range(8000)]
    for thread in threads:
        thread.join()
    for t in range(4):
        assert [i for owner, i in events if owner == t] == list(range(2000))
    assert inbox.offer("x", 1 << 40), "the account is empty"
    with pytest.raises(queue.Empty):
        Inbox().get(timeout_s=0.0)


def test_wake_follows_every_accepted_event():
    inbox, woken = Inbox(limit=1), []
    inbox.wake = lambda: woken.append(inbox.empty())
    inbox.post("posted")
    assert not inbox.offer("refused", 1)
    assert inbox.get() == "posted"
    assert inbox.offer("offered", 1)
    assert woken == [False, False], "after the event, and only for accepted events"
