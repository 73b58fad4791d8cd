"""Thoughts and answer of a text, whole and piece by piece: nothing is lost, nothing is shown twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.service.thinking import Parts, Thoughts, divide


@pytest.mark.parametrize(
    ("text", "inside", "parts"),
    [
        ("<think>\nwell\n</think>\n\nyes", False, ("well", "yes")),
        ("well\n</think>\n\nyes", True, ("well", "yes")),
        ("yes", False, ("", "yes")),
        ("  yes", False, ("", "  yes")),
        ("\n<think></think>yes", False, ("", "yes")),
        ("<think>it goes on", False, ("it goes on", "")),
        ("a </thin b </think>c <think> d", True, ("a </thin b", "c <think> d")),
        ("<thinner", False, ("", "<thinner")),
        ("<thi", False, ("", "<thi")),
        ("", True, ("", "")),
    ],
)
def test_thoughts_and_answer(text, inside, parts) -> None:
    assert divide(text, inside) == parts


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "th", "ink>", " ", "\n", "yes", ""]), max_size=8)


@given(PIECES, st.booleans())
def test_pieces_give_what_the_whole_gives(pieces, inside) -> None:
    thoughts = Thoughts(inside)
    shown = [*map(thoughts.feed, pieces), thoughts.end()]
    joined = Parts(*("".join(part) for part in zip(*shown, strict=True)))
    assert joined == divide("".join(pieces), inside)
    assert joined.thinking == joined.thinking.strip()
