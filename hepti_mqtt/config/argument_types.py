"""Types of arguments for argparse: each returns a value, or raises ArgumentTypeError with what is wrong."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from hepti_mqtt.config.sizes import parse_size
from hepti_mqtt.errors import ConfigError


def size(text: str) -> str:
    """Return the text of a size such as "400MiB", "2GB" or a plain number, which `parse_size` takes."""
    try:
        parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def named_directory(text: str) -> tuple[str, Path]:
    """Return (name, directory) from NAME=DIR."""
    name, sep, path = text.partition("=")
    if not sep or not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIRECTORY")
    return name, Path(path)


def names(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list."""
    return tuple(part for part in text.split(",") if part)


def natural_range(text: str) -> range:
    """Return the numbers of N, or of A:B without B."""
    begin, sep, end = text.partition(":")
    first, stop = _whole(begin), _whole(end)
    if first is None or (sep and stop is None):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor a range A:B")
    numbers = range(first, first + 1 if stop is None else stop)
    if not numbers:
        raise argparse.ArgumentTypeError(f"the range {text!r} is empty")
    return numbers


def positive(text: str) -> int:
    """Return a whole number above zero."""
    if not (number := _whole(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return number


def natural(text: str) -> int:
    """Return a whole number from zero."""
    if (number := _whole(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from zero")
    return number


def port(text: str) -> int:
    """Return the number of a TCP port."""
    number = _whole(text)
    if number is None or not 0 < number < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return number


def seconds(text: str) -> float:
    """Return a time above zero."""
    return _above_zero(text, "seconds")


def delay_ms(text: str) -> float:
    """Return a time from zero to a minute, in milliseconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 60_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds from 0 to 60000")
    return value


def accuracy(text: str) -> float:
    """Return a part of an answer, above zero and at most all of it."""
    value = _above_zero(text, "parts of the answer, such as 1e-3,")
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is more than all of the answer; give a part of it, such as 1e-3")
    return value


def mbit(text: str) -> float:
    """Return a rate above zero."""
    return _above_zero(text, "Mbit/s")


def _whole(text: str) -> int | None:
    """Return the number that digits say, None for all else and for more digits than any number here has."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def _above_zero(text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {unit} above zero")
    return value
