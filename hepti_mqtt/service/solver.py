"""The search as a command carried out: a question in, `Solved` out, whatever goes wrong."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from importlib import import_module

from hepti_mqtt.errors import HeptiError, PlanError
from hepti_mqtt.planner import decide, decide_soon, price
from hepti_mqtt.runtime.planner.commands import Solve
from hepti_mqtt.runtime.planner.events import Solved

_log = logging.getLogger(__name__)


def begin_loading() -> None:
    """Import what searches need while the planner asks its broker; Numba takes longer than all the rest of it."""
    threading.Thread(target=import_module, args=("hepti_mqtt.kernels",), name="planner-loads", daemon=True).start()


def solve(command: Solve) -> Solved:
    """Return the decision with the running plan's price under the same measurements, or the error that prevents one."""
    question, running = command.question, command.running
    if command.hurried:
        with suppress(Exception):  # whatever stands in the way: the whole search says it
            return Solved(command.model, command.ticket, decide_soon(question), None, hurried=True)
    try:
        decision = decide(question)
        running_s = None
        if running is not None and set(running.devices) <= set(question.cluster.devices):
            running_s = price(question, running, full=True).cost[0]
    except HeptiError as error:
        return Solved(command.model, command.ticket, None, None, error)
    except Exception as error:  # a mistake in a strategy must not leave requests without an end
        _log.exception("the search for a plan of %s failed", command.model)
        return Solved(command.model, command.ticket, None, None, PlanError(f"the search failed: {error!r}"))
    return Solved(command.model, command.ticket, decision, running_s)
