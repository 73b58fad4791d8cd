"""The newest start keeps a name, for any order of statuses."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.core.ids import Start
from hepti_mqtt.protocol.messages import QUESTION, Status
from hepti_mqtt.protocol.plausible import MAX_TERM
from hepti_mqtt.protocol.starts import INSIST_S, NameHolder, next_term

TERMS = st.integers(1, 5) | st.just(MAX_TERM)


def said(start, state="online"):
    return Status(state, start.boot, term=start.term)


@given(st.lists(TERMS, min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_of_several_starts_with_one_name_only_the_newest_stays(terms, pick):
    boots = pick.sample(range(1, 100), len(terms))
    holders = {boot: NameHolder(Start(term, boot)) for term, boot in zip(terms, boots, strict=True)}
    newest = max(holder.start for holder in holders.values())
    said_last = deque(said(holder.start) for holder in holders.values())
    for _ in range(1000):
        if not said_last:
            break
        status = said_last.popleft()
        for boot, holder in list(holders.items()):
            verdict = holder.handle(status, 0.0)
            if verdict == "taken":
                del holders[boot]
            elif verdict == "contradict":
                said_last.append(said(holder.start))
    assert not said_last, "the exchange of statuses has ended"
    assert [holder.start for holder in holders.values()] == [newest]


def test_single_statuses_of_a_newer_start_do_not_take_the_name():
    holder = NameHolder(Start(3, 10))
    assert holder.handle(said(Start(4, 1)), 0.0) == "contradict"
    assert holder.handle(said(Start(4, 2)), 1.0) == "contradict", "of another start"
    assert holder.handle(said(Start(4, 2)), 2.0 + INSIST_S) == "contradict", "its second status is late"
    assert holder.handle(said(Start(4, 2), "offline"), 3.0 + INSIST_S) == "contradict", "it has ended"
    assert holder.handle(said(Start(4, 2), "starting"), 4.0 + INSIST_S) == "taken"


def test_a_newer_start_takes_the_name_immediately_after_a_lost_connection():
    holder = NameHolder(Start(3, 10))
    holder.handle_loss(0.0)
    assert holder.handle(said(Start(2, 99)), 1.0) == "contradict", "ours is the newer"
    assert holder.handle(said(Start(4, 1), "offline"), 1.0) == "taken"


def test_other_statuses_are_contradicted():
    holder = NameHolder(Start(3, 10))
    assert [holder.handle(said(holder.start, state), 0.0) for state in ("starting", "online")] == ["ours", "ours"]
    for late in (said(holder.start, "offline"), said(Start(2, 99)), said(Start(2, 99), "offline"), QUESTION):
        assert holder.handle(late, 0.0) == "contradict"


def test_terms_grow_to_an_end():
    assert [next_term(None), next_term(Status("offline", 9)), next_term(Status("online", 9, term=4))] == [1, 1, 5]
    assert next_term(Status("online", 9, term=MAX_TERM)) == MAX_TERM
