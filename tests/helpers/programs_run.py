"""Runs the Programs of all devices in one process, from tensors to the answer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from together import bound, run_together

from hepti_mqtt.program import Program


def run_programs(
    programs: Mapping[str, Program], tensors: Mapping[str, np.ndarray], inputs: np.ndarray, seed: int = 0
) -> np.ndarray:
    """Return what the devices send to the planner, put together; asserts that everybody finishes."""
    return run_together(bound(programs, tensors), inputs, seed)
