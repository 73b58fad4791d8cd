"""Frames that come before their request: in order, within bounds of bytes and time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.ids import Epoch
from hepti_mqtt.protocol.frames import GRAIN, Frame
from hepti_mqtt.runtime.worker import runs
from hepti_mqtt.runtime.worker.runs import EARLY_S, EarlyFrames


def frame(admission: int, nbytes: int = 4, part: int = 0) -> Frame:
    return Frame("tensor", "m", Epoch(1, 1), admission, 0, 1, "d1", part, "u8", (nbytes,), 0, (), bytes(nbytes))


def test_frames_of_a_request_come_out_in_their_order_and_once() -> None:
    kept = EarlyFrames()
    for part, admission in enumerate((7, 8, 7)):
        assert kept.keep(frame(admission, part=part), 0.0) == 0
    assert [f.part for f in kept.take(7, 0.0)[0]] == [0, 2]
    assert kept.take(7, 0.0) == ([], 0)
    assert [f.part for f in kept.take(8, 0.0)[0]] == [1]
    assert kept.nbytes == 0


def test_what_has_waited_too_long_goes() -> None:
    kept = EarlyFrames()
    kept.keep(frame(1), 0.0)
    kept.keep(frame(2), EARLY_S)
    assert kept.keep(frame(3), EARLY_S + 1) == 1
    assert [len(kept.take(n, EARLY_S + 1)[0]) for n in (1, 2, 3)] == [0, 1, 1]


def test_what_has_waited_too_long_is_not_delivered_even_if_nothing_came_after_it() -> None:
    kept = EarlyFrames()
    kept.keep(frame(1, part=0), 0.0)
    kept.keep(frame(1, part=1), 5.0)
    frames, stale = kept.take(1, EARLY_S + 1)
    assert ([f.part for f in frames], stale) == ([1], 1)
    kept.check()


def test_empty_frames_are_bounded_by_the_buffers_that_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "EARLY_BYTES", 10 * GRAIN)
    kept = EarlyFrames()
    dropped = sum(kept.keep(frame(admission, 0), 0.0) for admission in range(100))
    assert dropped == 90
    assert kept.nbytes == 10 * GRAIN


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2 * GRAIN), st.booleans()), max_size=60))
def test_bytes_are_bounded_and_every_frame_is_kept_or_counted(steps: list[tuple[int, int, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "EARLY_BYTES", 5 * GRAIN)
        kept, inside = EarlyFrames(), 0
        for admission, nbytes, take in steps:
            inside += 1 - kept.keep(frame(admission, nbytes), 0.0)
            kept.check()
            if take:
                inside -= kept.drop(admission)
        assert inside == sum(kept.drop(admission) for admission in range(1, 6))
        kept.clear()
        kept.check()
