"""What a plan may ask for: every number of it is looked at before anything is built whose size follows from it.

A Prepare comes from whoever may publish to the device's topic. Programs are worked out from it beside other plans, and
their memory is known only then; so what their number of ops or regions grows with is bounded here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, Final, get_args

from hepti_mqtt.errors import BadNameError, PlanError
from hepti_mqtt.ids import check_name
from hepti_mqtt.models import largest_shape
from hepti_mqtt.plan import Plan, Storage, WireDtype
from hepti_mqtt.spec import PlainShape, RequestShape, Spec
from hepti_mqtt.strategies import STRATEGIES

MAX_DEVICES: Final = 64
MAX_IN_FLIGHT: Final = 64
MAX_SIZE: Final = 1 << 24  # rows or columns of any matrix
MAX_WEIGHT: Final = 1e18  # the search may double a speed in FLOP/s a few times, where little is computed
MAX_REASON: Final = 4096
MAX_LABELS: Final = 65_536
# Of a spec's numbers those that say how many ops or regions there are; the others are sides of matrices.
_COUNTS: Final[Mapping[str, int]] = {
    "layers": 1024,
    "groups": 1024,
    "parts": 64,
    "heads": 4096,
    "max_tokens": 65_536,
    "positions": 1 << 20,
    "size": 4096,
}


def check_prepare(
    device: str, plan: Plan, spec: Spec, shapes: Iterable[PlainShape], in_flight: int
) -> list[RequestShape]:
    """Return the shapes; raises PlanError, which names the field, for what no planner asks for."""
    _check_plan(device, plan)
    _check_spec("spec", spec.to_dict())
    if not 0 <= in_flight <= MAX_IN_FLIGHT:
        raise _wrong("in_flight", in_flight, f"is not within 0 to {MAX_IN_FLIGHT}")
    return [shape_of(spec, plain) for plain in shapes]


def shape_of(spec: Spec, plain: PlainShape) -> RequestShape:
    """Return a request's shape; raises PlanError for none of the family's, or larger than the plan was made for."""
    largest = largest_shape(spec)
    if plain.size > largest.size:
        raise _wrong("shape", plain.size, f"tokens or rows are more than the {largest.size} that a run has at the most")
    if plain.session_rows > largest.session_rows:
        raise _wrong("shape", plain.session_rows, f"rows of a cache are more than {largest.session_rows}")
    try:
        return spec.reads.shape_of(plain)
    except ValueError as error:
        raise _wrong("shape", plain.size, f"is none of {spec.architecture}: {error}") from error


def _check_plan(device: str, plan: Plan) -> None:
    devices = plan.devices
    if not 0 < len(devices) <= MAX_DEVICES or len(set(devices)) < len(devices):
        raise _wrong("devices", len(devices), f"are not 1 to {MAX_DEVICES} different ones")
    try:
        for name in devices:
            check_name("device", name)
    except BadNameError as error:
        raise PlanError(f"the plan cannot be right: {error}") from error
    if device not in devices or plan.head not in devices:
        raise _wrong("devices", list(devices), f"are without {device if device not in devices else plan.head}")
    if plan.strategy not in STRATEGIES or not STRATEGIES[plan.strategy].knows(plan.options):
        raise _wrong(
            "strategy", plan.strategy, f"with options {plan.options} is not known here; update agent or planner"
        )
    if STRATEGIES[plan.strategy].groups is not None or plan.replicas:
        raise _wrong("strategy", plan.strategy, "is of several plans side by side; a device is told its own alone")
    if plan.wire not in get_args(WireDtype) or plan.storage not in get_args(Storage):
        raise _wrong("wire and storage", (plan.wire, plan.storage), "are not known here; update agent or planner")
    for kind, weights in plan.weights.items():
        if len(weights) != len(devices) or not all(0 <= w <= MAX_WEIGHT for w in weights):
            raise _wrong(f"weights {kind}", weights, f"are not one number from 0 to {MAX_WEIGHT:g} for each device")
    for kind, ranges in plan.ranges.items():
        if len(ranges) != len(devices) or not all(0 <= start <= stop <= MAX_SIZE for start, stop in ranges):
            raise _wrong(f"ranges {kind}", ranges, f"are not one range within 0 to {MAX_SIZE} for each device")
    numbers = (plan.predicted_s, plan.predicted_bytes, plan.predicted_tokens, plan.wire_error or 0.0)
    if not all(isinstance(number, int | float) and isfinite(number) for number in numbers):
        raise _wrong("prediction", numbers, "is not of numbers")
    if not isinstance(plan.reason, str) or len(plan.reason) > MAX_REASON:
        raise _wrong("reason", plan.reason, f"is not a text of at most {MAX_REASON} characters")


def _check_spec(name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, part in value.items():
            most = _COUNTS.get(key, MAX_SIZE)
            if isinstance(part, int) and not 0 <= part <= most:
                raise _wrong(f"{name}.{key}", part, f"is not within 0 to {most}")
            _check_spec(f"{name}.{key}", part)
    elif isinstance(value, str):
        if len(value) > MAX_REASON:
            raise _wrong(name, value, "is too long a text")
    elif isinstance(value, Sequence):
        if len(value) > MAX_LABELS:
            raise _wrong(name, len(value), f"entries are more than {MAX_LABELS}")
        for part in value:
            _check_spec(name, part)
    elif isinstance(value, float) and not isfinite(value):
        raise _wrong(name, value, "is not finite")


def _wrong(name: str, value: object, why: str) -> PlanError:
    return PlanError(f"the plan cannot be right: {name} {str(value)[:80]} {why}")
