"""Errors of experiments and of the hosts that they run on."""

from __future__ import annotations

from hepti_mqtt.core.errors import HeptiError


class LabError(HeptiError):
    """A host of a lab does not answer, a tool is missing, or the machine cannot give what the lab asks for."""

    code = "lab"


class BenchError(HeptiError):
    """A measurement cannot be made, or its results would not be what they say."""

    code = "bench"
