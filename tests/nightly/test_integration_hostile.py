"""Mutated messages on every topic while requests go on, and the messages that once stopped a site."""

from __future__ import annotations

import hostile_site

MOST_MB = 700  # more than a process of this site has at rest, by less than any one message once took


def test_a_site_goes_on_under_hostile_messages() -> None:
    found = hostile_site.main(count=400, seed=1)
    assert found["ended"] == []
    assert found["answers"]["answered"] >= 64, "of a flood, what fits into one client's queue is answered"
    assert not found["unanswered"]
    assert "wrong" not in found["requests"]
    assert "no end" not in found["requests"]
    assert found["requests"]["right"] > 0
    for step in found["memory_mb"].values():
        assert max(step.values()) < MOST_MB, step
