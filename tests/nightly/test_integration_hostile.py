"""Mutated messages on every topic while requests go on, what once stopped a site, and attacks from inside."""

from __future__ import annotations

from typing import Any

import hostile_roles
import hostile_site
from hostile_site import OUTLASTS_S

MOST_MB = 700  # more than a process of this site has at rest, by less than any one message once took
MOST_GROWTH_MB = 200  # by which logins of a closed site may raise the planner's memory


def test_a_site_goes_on_under_hostile_messages() -> None:
    found: Any = hostile_site.main(count=20_000, seed=1)
    assert found["ended"] == []
    assert found["answers"]["answered"] >= 64, "of a flood, what fits into one client's queue is answered"
    assert not found["unanswered"]
    assert "wrong" not in found["requests"]
    assert "no end" not in found["requests"]
    assert found["requests"]["right"] > 0
    assert not found["outlasting"], found["failures"]
    assert found["longest_trouble_s"] <= OUTLASTS_S
    for step in found["memory_mb"].values():
        assert max(step.values()) < MOST_MB, step


def test_no_login_of_a_closed_site_disturbs_the_requests_of_another() -> None:
    found: Any = hostile_roles.main(hostile_roles.WHOLE)
    assert set(found["requests"]) == {"right"}, found["failures"]
    assert found["ended"] == []
    assert found["tracebacks"] == 0
    memory = found["memory_mb"]
    assert max(step["planner"] for step in memory.values()) <= memory["before"]["planner"] + MOST_GROWTH_MB, memory
