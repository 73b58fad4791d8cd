"""Replicas: the groups of devices to price, and the plan of each group from a search of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from hepti_mqtt.core.errors import ConfigError, PlanError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import NARROW_WIRE_DTYPES, Plan
from hepti_mqtt.planner.candidates import EXACT, Decision
from hepti_mqtt.planner.price import Question
from hepti_mqtt.shares import Options
from hepti_mqtt.strategies import Method
from hepti_mqtt.strategies.plan_programs import make_plan

FEW: Final = 4  #: with more devices only 2, half as many groups as devices, and single devices are tried


def replica_plans(
    question: Question, method: Method, by_speed: Sequence[str], decide: Callable[[Question], Decision]
) -> Iterator[Plan]:
    """Yield plans with replicas; by_speed: the devices, fastest first; decide: searches the plan of one group.

    Groups without room for a replica are left out, unless devices are pinned. If no group has room, the plan of all
    devices shows the missing memory. Raises ConfigError for pinned groups that no method can divide the model over.
    """
    rows = max(question.shape.size, 1)
    speeds = [question.cluster.devices[d].speed(rows) for d in by_speed]
    plans: dict[tuple[str, ...], Plan | None] = {}

    def inside(group: tuple[str, ...]) -> Plan | None:
        if group not in plans:
            plans[group] = _inside(question, group, decide)
        return plans[group]

    has_several = False
    of_one_group: list[Plan] = []  # worth a plan only if no choice has room for two groups
    for options in _choices(question, method, len(by_speed)):
        assert method.groups is not None
        groups = [tuple(by_speed[i] for i in group) for group in method.groups(options, speeds)]
        parts = [part for group in groups if (part := inside(group)) is not None]
        if not parts or (question.devices is not None and len(parts) < len(groups)):
            if (plan := _of_all(question, method, options, dict(zip(by_speed, speeds, strict=True)))) is not None:
                yield plan
        elif len(parts) > 1:
            has_several = True
            yield _joined(question, method, options, parts)
        elif question.strategy == method.name:
            of_one_group.append(_joined(question, method, options, parts))
    if not has_several:
        yield from of_one_group


def _choices(question: Question, method: Method, devices: int) -> list[Options]:
    if question.options:
        return [question.options]
    tried = (devices, 2, devices // 2) if devices > FEW else range(devices + 1)
    return [o for o in method.variants_for(devices) if int(o.get("groups", devices)) in tried]


def _inside(question: Question, group: tuple[str, ...], decide: Callable[[Question], Decision]) -> Plan | None:
    """Return the fastest feasible plan on all devices of a group, None without one."""
    group_question = replace(question, strategy=None, options={}, devices=group, objective="latency", requests=0)
    try:
        ranking = decide(group_question).ranking
    except PlanError:
        return None
    able = (c.plan for c in ranking if c.price.feasible and len(c.plan.devices) == len(group))
    return next(able, None)


def _of_all(question: Question, method: Method, options: Options, speeds: Mapping[str, float]) -> Plan | None:
    """Return the plan of all devices, even if it does not fit; None if the method cannot divide the model.

    Raises ConfigError instead of returning None if the method and its options are pinned.
    """
    devices = tuple(speeds)
    template = Plan(question.naming.model, question.plan_version, method.name, devices, devices[0])
    template = replace(template, wire=question.wire, weight_dtype=question.weight_dtype)
    try:
        return make_plan(question.spec, template, method.name, options, tuple(speeds.values()))
    except ValueError as error:
        if question.strategy == method.name and question.options:
            raise ConfigError(
                f"{question.naming.model} cannot have such {method.name}: {error}; leave out the groups, and each "
                "device becomes a replica"
            ) from error
        return None


def _joined(question: Question, method: Method, options: Options, parts: Sequence[Plan]) -> Plan:
    """Return one plan with several replicas, the fastest first; its wire is the narrowest of theirs."""
    first = question.plan_version
    replicas = tuple(
        replace(part, version=PlanVersion(first.boot, first.number + number))
        for number, part in enumerate(sorted(parts, key=lambda part: part.predicted_s), 1)
    )
    return replace(
        replicas[0],
        version=first,
        strategy=method.name,
        options=options,
        devices=tuple(device for part in replicas for device in part.devices),
        wire=next((wire for wire in NARROW_WIRE_DTYPES if any(part.wire == wire for part in replicas)), EXACT),
        shares={},
        ranges={},
        relayed_pairs=(),
        replicas=replicas,
    )
