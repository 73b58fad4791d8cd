"""A closed site attacked with the logins of a device and of a client: others are answered rightly."""

from __future__ import annotations

import hostile_roles


def test_a_login_that_says_everything_everywhere_costs_nobody_else_an_answer() -> None:
    found = hostile_roles.main(hostile_roles.SHORT, users=("idle", "mallory"))
    assert set(found["requests"]) == {"right"}, found["failures"]
    assert found["ended"] == []
    assert found["tracebacks"] == 0
