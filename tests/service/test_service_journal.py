"""The journal: deliveries that wait, answers that were given in an earlier life, requests that ended several."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

import numpy as np
import pytest

from hepti_mqtt.models.shapes import PackedTokens
from hepti_mqtt.runtime.coordinator.requests import Chunk, Job, RequestKey
from hepti_mqtt.service import channel as module
from hepti_mqtt.service.channel import KEPT, LIVES, Journal
from hepti_mqtt.service.decoder import Asked
from hepti_mqtt.transport import Delivery, Receipt

KEY = RequestKey("m", "me", "q1")


@pytest.fixture
def live(tmp_path):
    """Return a new life of the planner: its journal, and the receipts that it has acknowledged."""
    lives = []

    def begin():
        acknowledged = []
        lives.append(Journal(tmp_path / "requests", acknowledged.append))
        return lives[-1], acknowledged

    yield begin
    for one in lives:
        one.close()


def asked(packet=1, repeated=False, payload=b"{}"):
    return Asked("m", "me", payload, Delivery("t", payload, Receipt(1, packet), repeated))


def job(key=KEY, digest=b"d"):
    return Job(key, (Chunk(PackedTokens((1,)), np.zeros(1, np.int32)),), None, None, digest=digest)


def test_a_request_that_came_twice_is_acknowledged_twice_when_its_answer_is(live):
    journal, acknowledged = live()
    for packet in (1, 2):
        journal.wait(asked(packet), job())
    journal.wait(asked(3), job(digest=b"other"))
    taken = journal.over(job())
    assert not acknowledged
    taken()
    assert acknowledged == [Receipt(1, 1), Receipt(1, 2)], "another request under the same id has an end of its own"
    journal.turned_away(asked(4))()
    assert acknowledged[2:] == [Receipt(1, 4)]


def test_an_answer_of_an_earlier_life_is_known(live):
    first, _ = live()
    assert not first.answer(KEY)
    second, _ = live()
    assert second.answered(KEY)
    assert second.answer(KEY)
    assert not second.answered(RequestKey("m", "you", "q1"))


def test_a_request_without_a_name_has_the_same_one_when_it_comes_again(live):
    first, _ = live()
    name = first.name(asked())
    second, _ = live()
    assert second.name(asked(repeated=True)) == name
    assert second.name(asked(packet=2, repeated=True)) != name
    assert second.name(Asked("m", "me", b"{}")) != name
    second.answer(RequestKey("m", "me", name))
    assert second.name(asked()) != name, "the broker has begun to count its packets anew"


def test_a_request_that_ends_life_after_life_is_met_so_often_and_no_more(live):
    for life in range(LIVES + 1):
        journal, _ = live()
        assert journal.lives(asked(repeated=True)) == journal.lives(asked(repeated=True)) == min(life + 1, LIVES + 1)
        assert journal.lives(asked(payload=b"[]")) == 0
    journal.turned_away(asked(repeated=True))()
    journal, _ = live()
    assert journal.lives(asked(repeated=True)) == 1


class _Yielding(OrderedDict):
    """Lets other threads run between a look and what follows from it."""

    def __contains__(self, key):
        found = super().__contains__(key)
        os.sched_yield()
        return found


def test_several_desk_threads_use_it_at_once(live, tmp_path):
    """Each delivery is acknowledged once, and of the answers to one request one is the first."""
    journal, acknowledged = live()
    journal._answered = _Yielding()
    keys = [RequestKey("m", "me", f"q{n}") for n in range(100)]
    together, firsts, settle = threading.Barrier(4), [], []

    def desk(thread):
        for n, key in enumerate(keys):
            together.wait()
            journal.wait(asked(4 * n + thread), job(key))
            settle.append(journal.over(job(key)))
            if not journal.answer(key):
                firsts.append(key)

    threads = [threading.Thread(target=desk, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for taken in settle:
        taken()
    assert sorted(receipt.packet for receipt in acknowledged) == list(range(4 * len(keys)))
    assert sorted(key.request for key in firsts) == sorted(key.request for key in keys)
    assert (tmp_path / "requests").stat().st_size == 17 * len(keys)


def test_what_is_kept_is_bounded(live, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", KEPT * 17 + 100)
    journal, _ = live()
    for n in range(KEPT + 50):
        journal.answer(RequestKey("m", "me", f"q{n}"))
    assert not journal.answered(RequestKey("m", "me", "q49"))
    assert journal.answered(RequestKey("m", "me", "q50"))
    assert (tmp_path / "requests").stat().st_size <= KEPT * 17 + 117


def test_a_file_that_was_cut_short_or_cannot_be_written_stops_nothing(live, tmp_path, caplog):
    first, _ = live()
    first.answer(KEY)
    with (tmp_path / "requests").open("ab") as file:
        file.write(b"A123")
    second, _ = live()
    assert second.answer(KEY)
    assert not second.answer(RequestKey("m", "me", "q2"))
    assert live()[0].answered(RequestKey("m", "me", "q2"))
    nowhere = Journal(tmp_path / "missing" / "requests", print)
    assert not nowhere.answer(KEY)
    assert nowhere.answer(KEY)
    assert "make room" in caplog.text
