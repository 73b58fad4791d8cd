"""`hepti lab`: hosts to measure on."""

from __future__ import annotations

import argparse

from hepti_mqtt.errors import LabError


def arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of `hepti lab`."""
    sub.add_argument("action", choices=("up", "down", "run", "status"))


def lab(args: argparse.Namespace) -> int:
    """Run `hepti lab`."""
    raise LabError(f"hepti lab {args.action} is being built")
