"""The tokens of an answer that comes in parts: each once and in order, and from the first where a text begins again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hepti_mqtt.client.connection import AnswerStream


def part(index: int, token: int, attempt: int = 0) -> dict[str, Any]:
    return {"index": index, "token": token, "text": str(token)} | ({"attempt": attempt} if attempt else {})


@pytest.mark.parametrize(
    ("parts", "ids", "shown"),
    [
        ([part(0, 5), part(1, 6)], [5, 6], [(0, 5), (1, 6)]),
        ([part(0, 5), part(0, 5), part(1, 6)], [5, 6], [(0, 5), (1, 6)]),  # one came twice
        ([part(0, 5), part(2, 7)], [5, 6, 7], [(0, 5), (1, 6), (2, 7)]),  # one was lost
        ([part(0, 5), part(0, 8, 1), part(1, 6), part(1, 9, 1)], [8, 9], [(0, 5), (0, 8), (1, 9)]),  # tried again
        ([part(0, 5), part(0, 8, 1)], [5], [(0, 5), (0, 8), (0, 5)]),  # and the first text was the better one
        ([], [5, 6], [(0, 5), (1, 6)]),
    ],
)
def test_each_token_is_shown_once(parts: list[dict[str, Any]], ids: list[int], shown: list[tuple[int, int]]) -> None:
    stream = AnswerStream(lambda _: None)
    found = [one for each in parts for one in stream.take(each)]
    stream.set_result(SimpleNamespace(result={"ids": ids}))  # type: ignore[arg-type]
    assert [(one["index"], one["token"]) for one in found + stream.rest()] == shown
