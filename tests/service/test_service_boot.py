"""The planner's boot counter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.service.setup import next_boot


def test_follows_the_clock_and_never_goes_back(tmp_path):
    assert next_boot("s", 1000.7, tmp_path) == 1000
    assert next_boot("s", 1000.9, tmp_path) == 1001
    assert next_boot("s", 5.0, tmp_path) == 1002, "the clock was set back"
    assert next_boot("s", 2000.0, tmp_path) == 2000


def test_sites_count_for_themselves(tmp_path):
    next_boot("s", 1000, tmp_path)
    assert next_boot("t", 5, tmp_path) == 5


def test_a_damaged_file_counts_as_none(tmp_path):
    next_boot("s", 1000, tmp_path)
    (tmp_path / "planner" / "s" / "boot").write_text("\x00garbage")
    assert next_boot("s", 1500, tmp_path) == 1500


def test_starts_at_the_same_moment_get_different_numbers(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        boots = list(pool.map(lambda _: next_boot("s", 1000, tmp_path), range(24)))
    assert len(set(boots)) == 24


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "planner").write_text("in the way")
    with pytest.raises(ConfigError, match="planner/s"):
        next_boot("s", 1000, tmp_path)
