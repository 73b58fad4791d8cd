"""docs/methods: a page for every method, and pictures that show what runs."""

from __future__ import annotations

import re

import pytest
from draw_methods import HERE, pictures
from leasing import LEASED, found

from hepti_mqtt.strategies import STRATEGIES

FOUND = pictures()


@pytest.mark.parametrize("name", FOUND)
def test_a_picture_is_what_the_command_draws(name):
    assert (HERE / name).read_text("utf-8") == FOUND[name], "draw them again: make pictures"
    assert len(FOUND[name]) < 50_000


def test_no_picture_is_left_of_what_is_gone():
    assert {p.name for p in HERE.glob("*.svg")} == set(FOUND)


@pytest.mark.parametrize("method", STRATEGIES)
def test_every_method_has_a_page_with_its_pictures(method):
    page = (HERE / f"{method}.md").read_text("utf-8")
    assert page.startswith(f"# `{method}`")
    assert f"]({method}.md)" in (HERE / "README.md").read_text("utf-8")
    assert set(re.findall(r"\]\(([^)]+\.svg)\)", page)) == {n for n in FOUND if re.match(rf"{method}[-.]", n)}


def test_leasing_gains_where_a_device_becomes_slower():
    """The figures of the page, loosely: fixed owners are waited for, leases are taken over."""
    fixed, leased = (found("vgg16", "mixed-four", {"cut": "3", **o}, {"pi1": 2.0}) for o in ({}, LEASED))
    assert leased.steady.seconds < 1.1 * fixed.steady.seconds
    assert fixed.slower.seconds > 1.2 * fixed.steady.seconds
    assert leased.slower.seconds < 0.85 * fixed.slower.seconds
