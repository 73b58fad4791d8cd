"""Sizes as people write them."""

from __future__ import annotations

import pytest

from hepti_mqtt.config.settings import parse_size
from hepti_mqtt.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("200MiB", 200 << 20),
        ("2GB", 2 * 10**9),
        ("1.5 gib", 3 << 29),
        ("1.5 GB", 1_500_000_000),
        ("4096", 4096),
        ("1kib", 1024),
        ("0", 0),
    ],
)
def test_sizes(text, value):
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1TiBs", "1e3", "²", "٣", "9" * 19, "9" * 400, "9" * 5000])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)
