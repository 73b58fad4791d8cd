"""Filters, what covers what, and who may read it."""

from __future__ import annotations

import itertools

import pytest

from hepti_mqtt.transport.codec import covers, is_filter, is_topic, matches
from hepti_mqtt.transport.endpoint import Acl


@pytest.mark.parametrize("pattern", ["a", "/", "a/b", "+", "#", "a/+", "+/b", "a/#", "+/#", "a//b", "/#"])
def test_filters(pattern):
    assert is_filter(pattern)


@pytest.mark.parametrize("pattern", ["", "a+", "+a/b", "a#", "#/a", "a/#/b", "a/b#", "##", "++"])
def test_no_filters(pattern):
    assert not is_filter(pattern)


def test_topics():
    assert [is_topic(name) for name in ("a/b", "", "a/+", "#", "a\0")] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("pattern", "topic", "expected"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/c", False),
        ("a/+", "a/b", True),
        ("a/+", "a", False),
        ("a/+", "a/b/c", False),
        ("a/#", "a", True),
        ("a/#", "a/b/c", True),
        ("a/#", "b/a", False),
        ("#", "a/b", True),
        ("#", "$SYS/a", False),
        ("+/a", "$SYS/a", False),
        ("$SYS/#", "$SYS/a", True),
        ("+", "", True),
    ],
)
def test_matching(pattern, topic, expected):
    assert matches(pattern, topic) is expected


def test_what_covers_is_never_more_than_what_matches():
    """Over all small filters: where one covers another, it takes in every topic that the other takes in."""
    levels = ["a", "b", "+", "#", "$s"]
    patterns = [p for n in (1, 2, 3) for p in map("/".join, itertools.product(levels, repeat=n)) if is_filter(p)]
    topics = ["/".join(t) for n in (1, 2, 3, 4) for t in itertools.product(["a", "b", "$s"], repeat=n)]
    taken = {p: frozenset(t for t in topics if matches(p, t)) for p in patterns}
    covered = 0
    for allowed, asked in itertools.product(patterns, repeat=2):
        if covers(allowed, asked):
            covered += 1
            assert taken[asked] <= taken[allowed], (allowed, asked)
        if allowed == asked:
            assert covers(allowed, asked)
    assert covered > 500


def test_all_grants_of_a_user_count_together():
    grants = Acl()
    grants.admit("b", 1, "one", ["x/m/+"], 10)
    grants.admit("b", 2, "two", ["x/n/+"], 20)
    assert grants.knows("b", b"one")
    assert grants.knows("b", b"two")
    assert not grants.knows("b", b"three")
    assert not grants.knows("c", b"one")
    assert grants.allows("b", "x/m/+")
    assert grants.allows("b", "x/n/5")
    assert not grants.allows("b", "x/#")
    assert not grants.allows("c", "x/m/+")
    assert grants.limit_bytes("b") == 20


def test_a_token_ends_with_its_grant():
    grants = Acl()
    grants.admit("b", 1, "one", ["x/m/+"], 10)
    grants.admit("b", 2, "two", ["x/n/+"], 20)
    grants.expel("b", 2)
    assert not grants.knows("b", b"two")
    assert not grants.allows("b", "x/n/+")
    assert grants.holds("b")
    grants.admit("b", 1, "other", ["x/m/+"], 10)
    assert not grants.knows("b", b"one")
    grants.expel("b", 1)
    grants.expel("b", 1)
    assert not grants.holds("b")
    assert not grants.knows("b", b"other")
    assert grants.limit_bytes("b") == 0


def test_nobody_without_a_name_comes_in_unless_admitted():
    grants = Acl()
    assert not grants.knows("", b"")
    grants.admit("", "anybody", "", ["x/#"], 10)
    assert grants.knows("", b"")
    assert not grants.knows("", b"x")
