"""A closed site attacked with the logins of a device and of a client: others are answered rightly."""

from __future__ import annotations

import hostile_site


def test_a_login_that_says_everything_everywhere_costs_nobody_else_an_answer():
    report = hostile_site.attack_by_roles("short", ("idle", "mallory"))
    assert set(report["requests"]) == {"right"}, report["failures"]
    assert report["ended"] == []
    assert report["tracebacks"] == 0
