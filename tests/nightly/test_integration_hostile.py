"""Mutated messages on every topic while requests go on, what once stopped a site, and attacks from inside."""

from __future__ import annotations

import hostile_site
from hostile_site import OUTLASTS_S

MOST_MB = 700  # more than a process of this site has at rest, by less than any one message once took
MOST_GROWTH_MB = 200  # by which logins of a closed site may raise the planner's memory


def test_a_site_goes_on_under_hostile_messages():
    report = hostile_site.attack_by_messages(20_000, seed=1)
    assert report["ended"] == []
    assert report["answers"]["answered"] >= 64, "of a flood, what fits into one client's queue is answered"
    assert not report["unanswered"]
    assert "wrong" not in report["requests"]
    assert "lost" not in report["requests"]
    assert report["requests"]["right"] > 0
    assert not report["outlasting"], report["failures"]
    assert report["longest_trouble_s"] <= OUTLASTS_S
    for step in report["memory_mb"].values():
        assert max(step.values()) < MOST_MB, step


def test_no_login_of_a_closed_site_disturbs_the_requests_of_another():
    report = hostile_site.attack_by_roles("whole")
    assert set(report["requests"]) == {"right"}, report["failures"]
    assert report["ended"] == []
    assert report["tracebacks"] == 0
    memory = report["memory_mb"]
    assert max(step["planner"] for step in memory.values()) <= memory["before"]["planner"] + MOST_GROWTH_MB, memory
