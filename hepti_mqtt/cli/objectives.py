"""The candidates of a search as a table: each under latency, throughput and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hepti_mqtt.cli import output
from hepti_mqtt.client.described import cluster_described
from hepti_mqtt.plan import Objective, Plan
from hepti_mqtt.planner import Candidate, Decision, Question, decide
from hepti_mqtt.simulate import ROUNDS, Naming
from hepti_mqtt.spec import RequestShape, Spec


def print_candidates(title: str, ranking: Sequence[Candidate]) -> None:
    """Print the best candidate of every strategy and variant, best first; `-`: no requests were played for it."""
    played = any(c.price.load for c in ranking)
    output.print_table(
        title,
        (
            "strategy",
            "devices",
            "route",
            "predicted ms",
            *(["requests/s"] if played else []),
            "of memory",
            "MiB",
            "fits",
        ),
        [
            (
                c.name,
                ", ".join(c.plan.devices),
                c.plan.route if c.plan.wire == "f32" else f"{c.plan.route}, {c.plan.wire}",
                f"{c.price.seconds * 1e3:.1f}",
                *([f"{c.price.load.requests_per_s:.3g}" if c.price.load else "-"] if played else []),
                f"{c.price.share:.0%}",
                " ".join(f"{n / output.MIB:.0f}" for n in c.price.needs.values()),
                "yes" if c.price.feasible else "no",
            )
            for c in ranking
        ],
    )


def search_again(
    naming: Naming,
    model: tuple[Spec, Plan, RequestShape],
    found: Sequence[Mapping[str, Any]],
    in_flight: int,
    objective: Objective,
) -> Decision:
    """Return what a search finds here for the devices that are online, by simulation, several requests played too.

    model: the spec, the active plan, of which wire and storage are kept, and a request of it. Raises as `decide` does.
    """
    spec, plan, shape = model
    cluster = cluster_described(found, [d["device"] for d in found if d["status"] == "online" and "curves" in d])
    return decide(
        Question(
            naming,
            spec,
            cluster,
            shape,
            plan.epoch,
            in_flight,
            wire=plan.wire,
            storage=plan.storage,
            requests=ROUNDS * in_flight,
            objective=objective,
        )
    )
