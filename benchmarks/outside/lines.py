"""A program beside a lab's driver: JSON lines on stdin, one answer for each on stdout.

The first line is {"do": a name of what answers, ...} with what that needs; each other one {"do": "ask", ...}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from hepti_mqtt.client import Answer

Ask = Callable[..., dict[str, Any]]
TIMEOUT_S: Final = 600.0


def plan_of(answer: Answer) -> str:
    """Return method and number of devices of an answer's plan."""
    return f"{answer.plan['strategy']} on {len(answer.plan['devices'])}"


def serve(makers: Mapping[str, Callable[..., Ask]]) -> None:
    """Answer every line of stdin until it ends; makers: of what answers, by name."""
    ask: Ask | None = None
    for line in sys.stdin:
        order = json.loads(line)
        answer = dict[str, Any]()
        if (do := order.pop("do")) == "ask":
            assert ask is not None, "what answers comes first"
            answer = ask(**order)
        else:
            ask = makers[do](**order)
        print(json.dumps(answer), flush=True)
