"""`python -m benchmarks.driver`: asks a site and times it, from inside the lab's network; speaks JSON lines.

stdin: {"do": "load", "key", "model", "body", "reference": path of a .npy}, {"do": "bring", "key", "strategy",
"options", "devices" (or null), "wire", "weights", "route" (or null), "objective"}, {"do": "measure"} with the same
keys and "warmup", "repetitions", "describe", "requests" (so many always under way; 0: one by one), {"do": "settle"}
with those of "bring" and "most_s", or {"do": "once"} with those of "bring".
stdout: one line for each, {"ok": true, ...} or {"ok": false, "unix_s", "code", "message"}. The broker and the site are
those of HEPTI_BROKER and HEPTI_SITE.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.outside import relative_error
from hepti_mqtt.client import Answer, Hepti
from hepti_mqtt.core.errors import HeptiError, RemoteError
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.cost.simulator import RequestTimes, steady_state
from hepti_mqtt.models import spec_from_dict
from hepti_mqtt.planner import peak_bytes

TIMEOUT_S: Final = 300.0
SETTLED_S: Final = 5.0  # a plan that nobody pinned and that stays for so long is that of a whole search
STANDS_S: Final = 35.0  # a served plan that stays for so long is the planner's last word: 20 s until it tries another
LOOK_S: Final = 0.5
PATIENCE_S: Final = 120.0  # of all this: a lab's hub may search for half a minute, and large models are long to load
# |error| / |reference| (Euclidean norms of all final hidden states) up to which an answer counts as right: by wire, and
# by how the layers' matrices are kept.
BOUNDS: Final = {"f32": 1e-4, "f16": 1e-2, "i8": 0.2}
WEIGHTS: Final = {"f32": 1e-4, "f16": 1e-2, "w8a32": 0.1, "w8a8": 0.2}
_PINNED: Final = ("strategy", "options", "devices", "wire", "weights", "route", "objective")


@dataclass
class Driver:
    """Inputs by key, and the connection that asks."""

    hepti: Hepti
    inputs: dict[str, tuple[str, dict[str, Any], NDArray[np.float32]]] = field(default_factory=dict)
    needs: dict[tuple[Any, ...], dict[str, int]] = field(default_factory=dict)

    def load(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Remember a request's input and the hidden states that it must give."""
        self.inputs[order["key"]] = (order["model"], order["body"], np.load(order["reference"]))
        return {}

    def bring(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Wait until the plan is active and the planner's choice has settled."""
        model, body, _ = self.inputs[order["key"]]
        ask = partial(self.hepti.infer, model, **body, **_pins(order), want="plan", timeout_s=TIMEOUT_S)
        found, since = ask().plan["id"], time.monotonic()
        # Where the choice is the planner's, its first plan is of a hurried search: that of the whole one follows.
        is_free = _pins(order).get("strategy", "auto") == "auto"
        until = since + PATIENCE_S
        while time.monotonic() < until:
            time.sleep(LOOK_S)
            changes = is_free and under_way(self.hepti.plan(model))
            if (now := ask().plan["id"]) != found or changes or self._computes():
                found, since = now, time.monotonic()
            elif not is_free or time.monotonic() - since >= SETTLED_S:
                break
        return {}

    def settle(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Ask until the plan stays what it is, or for so long: what runs teach, and what is tried, comes first."""
        model, body, _ = self.inputs[order["key"]]
        ask = partial(self.hepti.infer, model, **body, **_pins(order), timeout_s=TIMEOUT_S)
        begun = since = time.monotonic()
        plans, changes = [ask().plan["id"]], False
        while changes or time.monotonic() - since < STANDS_S:
            # What is under way at the end is waited for: its load would be in the times that are measured next.
            if time.monotonic() - begun >= order["most_s"] + (PATIENCE_S if changes else 0.0):
                break
            epoch, changes = ask().plan["id"], under_way(self.hepti.plan(model))
            if epoch != plans[-1]:
                plans.append(epoch)
                since = time.monotonic()
            elif changes:
                since = time.monotonic()
        return {"settled": plans, "settled_s": time.monotonic() - begun}

    def _computes(self) -> bool:
        """Return whether a plan of any model is searched for or loaded: that takes the hub from who is measured."""
        models = {model for model, _, _ in self.inputs.values()}
        return any(under_way(self.hepti.plan(model), wanted=False) for model in models)

    def measure(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Check an answer, warm up, and time; raises RemoteError for a wrong answer."""
        model, body, _ = self.inputs[order["key"]]
        pins = _pins(order)
        first, error = self._checked(order)
        for _ in range(order["warmup"]):  # the checked answer's Program is another
            self.hepti.infer(model, **body, **pins, timeout_s=TIMEOUT_S)
        begun = time.time()
        load: dict[str, Any] = {}
        if order["requests"]:
            answers, load = self._loaded(order)
        else:
            ask = partial(self.hepti.infer, model, **body, **pins, report=True, timeout_s=TIMEOUT_S)
            answers = [ask() for _ in range(order["repetitions"])]
        last = self.hepti.foretold(answers[-1], **body, **pins, timeout_s=TIMEOUT_S).raw
        return {
            "unix_s": begun,
            "first_ms": first.latency_ms,
            "error": error,
            "latency_ms": [a.latency_ms for a in answers],
            "epochs": sorted({a.plan["id"] for a in answers}),
            "plan": last["plan"],
            "bytes": last["bytes_on_wire"],
            **{key: last[key] for key in ("compute_ms", "wait_ms", "predicted_ms", "expected_ms")},
            **{key: last[key] for key in ("predicted_bytes", "tokens")},
            **load,
            "needs_bytes": self._needs(model, last["plan"]["version"]),
            **(self._described(model, last["plan"]["version"]) if order["describe"] else {}),
        }

    def _loaded(self, order: Mapping[str, Any]) -> tuple[list[Answer], dict[str, Any]]:
        """Return the answers to requests of which so many were always under way, and what came out per second.

        Where there are enough of them the first and the last do not count, as in `steady_state`. batches: with how many
        others each of them ran.
        """
        model, body, _ = self.inputs[order["key"]]
        answers: list[Answer] = []
        times: list[RequestTimes] = []
        done: queue.SimpleQueue[tuple[float, float, Future[Answer]]] = queue.SimpleQueue()

        def ask() -> None:
            asked_s = time.perf_counter()
            future = self.hepti.submit(model, **body, **_pins(order), report=True)
            future.add_done_callback(lambda f: done.put((asked_s, time.perf_counter(), f)))

        count = order["requests"] * order["repetitions"]
        for _ in range(order["requests"]):
            ask()
        for number in range(count):
            asked_s, answered_s, future = done.get(timeout=TIMEOUT_S)
            if number + order["requests"] < count:
                ask()
            answers.append(future.result())
            times.append(RequestTimes(asked_s, asked_s, answered_s))
        per_s = steady_state(times, order["requests"]).requests_per_s
        return answers, {"requests_per_s": [per_s], "batches": [answer.raw["batched_with"] + 1 for answer in answers]}

    def once(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Ask once, check the answer, and say how long it took from publish to answer, whatever plan came between."""
        begun = time.time()
        answer, error = self._checked(order)
        return {"unix_s": begun, "latency_ms": [answer.latency_ms], "error": error, "plan": answer.plan}

    def _checked(self, order: Mapping[str, Any]) -> tuple[Answer, float]:
        """Return an answer and its relative error; raises RemoteError where that is over the bound of the wire."""
        model, body, expected = self.inputs[order["key"]]
        answer = self.hepti.infer(model, **body, **_pins(order), want="hidden", timeout_s=TIMEOUT_S)
        error = relative_error(answer.hidden, expected)
        bound = max(BOUNDS[order["wire"]], WEIGHTS[order["weights"]])
        if not error <= bound:
            raise RemoteError(f"the answer is off by {error:.1e} of its norm, more than {bound:g}: it is not timed")
        return answer, error

    def _needs(self, model: str, epoch: list[int]) -> dict[str, int]:
        """Return the most bytes that each device holds under the plan of an epoch; none if it has gone meanwhile."""
        shown = self.hepti.plan(model)
        found = [plan for plan in (*shown["pinned"], shown["active"]) if plan and list(plan["version"]) == list(epoch)]
        if not found:
            return {}
        plan, spec = Plan.from_dict(found[0]), spec_from_dict(shown["spec"])
        key = (model, *epoch)
        if key not in self.needs:
            self.needs[key] = {d: peak_bytes(spec, plan, d, shown["in_flight"]) for d in plan.devices}
        return self.needs[key]

    def _described(self, model: str, epoch: list[int]) -> dict[str, Any]:
        """Return what a plan is simulated from for the report: the plan of an epoch, or the latest."""
        shown = self.hepti.plan(model)
        plans = [plan for plan in (*shown["pinned"], shown["active"]) if plan is not None]
        active = next((plan for plan in plans if list(plan["version"]) == epoch), shown["active"])
        told = {"spec": shown["spec"], "in_flight": shown["in_flight"]}
        return {"active": active, **told, "devices": self.hepti.devices(wait_s=1.5)}


def under_way(record: Mapping[str, Any], wanted: bool = True) -> bool:
    """Return whether a model's plans are about to be others, by their record: a search, or a plan on its way.

    wanted: also a search that has not begun. Searches are in the story alone. One has no epoch until it begins: what it
    was called before is the rest of its name. A plan that does not fit beside others comes again under another epoch,
    and in the story the first one stays as it was.
    """
    states: dict[str, str] = {}
    for step in record["story"]:
        if step["from"] == "wanted":
            states.pop(step["plan"].rpartition(" ")[0], None)
        states[step["plan"]] = step["to"]
    searches = {"wanted", "searching"} if wanted else {"searching"}
    loading = record["preparing"] is not None or bool(record["pinned_preparing"])
    return loading or bool(searches & set(states.values()))


def _pins(order: Mapping[str, Any]) -> dict[str, Any]:
    return {key: order[key] for key in _PINNED if order[key] is not None}


def main() -> int:
    """Answer every line of stdin until it ends."""
    with Hepti.connect() as hepti:
        driver = Driver(hepti)
        actions = {"load": driver.load, "bring": driver.bring, "settle": driver.settle}
        actions |= {"measure": driver.measure, "once": driver.once}
        for line in sys.stdin:
            order, begun = json.loads(line), time.time()
            try:
                answer = {"ok": True, **actions[order["do"]](order)}
            except HeptiError as error:
                answer = {"ok": False, "unix_s": begun, "code": error.code, "message": str(error)}
            print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
