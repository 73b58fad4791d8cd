"""`hepti bench`: experiments."""

from __future__ import annotations

import argparse

from hepti_mqtt.errors import LabError


def arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of `hepti bench`."""
    sub.add_argument("experiment")


def bench(args: argparse.Namespace) -> int:
    """Run `hepti bench`."""
    raise LabError(f"hepti bench {args.experiment} is being built")
