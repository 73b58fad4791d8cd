"""How many functions of the planner a request passes, and a token of a chat: a walk may get shorter, not longer."""

from __future__ import annotations

from pathlib import Path

from walk import request_walk, token_walk

REQUEST = (310, 55)  # functions and files, from the MQTT message to the answer
TOKEN = (240, 44)  # from the devices' frames to the token's message


def test_a_request_passes_no_more_functions_than_before(tmp_path: Path) -> None:
    walk = request_walk(tmp_path)
    assert walk.size <= REQUEST, walk.functions
    assert len(walk.functions) <= REQUEST[1], list(walk.functions)


def test_a_token_passes_no_more_functions_than_before(tmp_path: Path) -> None:
    walk = token_walk(tmp_path)
    assert walk.size <= TOKEN, walk.functions
    assert len(walk.functions) <= TOKEN[1], list(walk.functions)
    changes = {"CoordinatorSession._advance", "Rollout.advance", "Rollout.release_idle"}
    assert not changes & {name for names in walk.functions.values() for name in names}, "no plan changes by a token"
