"""Agents of one machine take turns: each lock is held by its own open file, so one process can play several agents."""

from __future__ import annotations

import pytest

from hepti_mqtt.kernels.machine import turns


class Waited(Exception):
    """It is somebody else's turn."""


def wait():
    raise Waited


def test_one_measures_at_a_time(tmp_path):
    with turns.measuring(tmp_path), pytest.raises(Waited), turns.measuring(tmp_path, wait):
        pass
    with turns.measuring(tmp_path, wait):
        pass


def test_nobody_measures_while_somebody_compiles(tmp_path):
    with turns.compiling(tmp_path), turns.compiling(tmp_path), pytest.raises(Waited), turns.measuring(tmp_path, wait):
        pass


def test_it_is_seen_whether_somebody_starts(tmp_path):
    assert turns.nobody_starts(tmp_path)
    with turns.starting(tmp_path), turns.starting(tmp_path):
        assert not turns.nobody_starts(tmp_path)
    assert turns.nobody_starts(tmp_path)


def test_without_a_place_to_write_to_nobody_takes_turns(tmp_path):
    (tmp_path / "file").touch()
    for place in (None, tmp_path / "file" / "below"):
        with turns.starting(place), turns.measuring(place, wait), turns.measuring(place, wait):
            pass
    assert turns.nobody_starts(tmp_path / "file" / "below")
