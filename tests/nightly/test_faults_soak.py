"""A short soak, and the rules by which a long one is judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak_run import Soak, run
from soak_site import MIB, UNDER_WAY, Flat, Held, unequal

from hepti_mqtt.transport.sockets import mesh_possible

# In a short run a plan that moves may be the first one for which a device loads MiniLM, or loads it again: 62 MiB.
GENEROUS = Flat(96 * MIB, 0.3, 6, 3)


@pytest.mark.skipif(not mesh_possible(), reason="the mesh needs Linux")
def test_a_site_with_mixed_load_and_a_peer_that_stops_holds_no_more_in_the_end(tmp_path: Path) -> None:
    report = run(Soak(24.0, seed=2, stopped_s=8.0, every_s=0.5, flat=GENEROUS), tmp_path)
    # On a busy machine a device may look lost for a moment at any time: an error in words, which a long run counts.
    assert not [line for line in report.wrong if "though nothing happened" not in line], str(report)
    assert report.frames > 100, "the load goes over the mesh"


def held(*growth: tuple[float, int, int], most: float = float("inf")) -> Held:
    """Return a process that had so many MiB, descriptors and threads in each quarter."""
    memory = Held(0, most * MIB)
    for quarter, (mib, descriptors, threads) in enumerate(growth):
        memory.samples += [(10.0 * quarter + n, int(mib * MIB), descriptors, threads) for n in range(10)]
    return memory


FLAT = (9, 9, 3)


@pytest.mark.parametrize(
    ("process", "wrong"),
    [
        (held((50, 5, 2), (100, 9, 3), (104, 9, 3), (105, 11, 4)), False),
        (held((100, 9, 3), (100, 9, 3), (104, 9, 3), (107, 9, 3)), True),
        (held(FLAT, FLAT, (9, 12, 3), (9, 12, 3)), True),
        (held(FLAT, FLAT, FLAT, (9, 9, 5)), True),
        (held(FLAT, (21, 9, 3), FLAT, FLAT, most=20), True),
    ],
    ids=["flat", "memory", "descriptors", "threads", "more than its budget"],
)
def test_a_process_is_flat_or_it_is_said_what_is_not(process: Held, wrong: bool) -> None:
    assert len(list(process.wrong("p", Flat()))) == wrong


def test_ends_that_count_differently_are_found_unless_a_connection_took_it() -> None:
    edges = {
        "a": {"b": {"frames_out": 90, "frames_in": 50}},
        "b": {"a": {"frames_out": 50 + UNDER_WAY, "frames_in": 80}},
    }
    assert unequal(edges, {}) == {("a", "b"): 10}
    assert unequal(edges, {("a", "b"): 10}) == {}
    assert unequal(edges, {("a", "b"): 20}) == {("a", "b"): -10}
