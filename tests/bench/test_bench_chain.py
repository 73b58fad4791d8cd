"""The chain of MatMuls: its Programs, its two processes over a real broker, and what its records say."""

from __future__ import annotations

import shutil
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hepti_mqtt.bench import chain_results
from hepti_mqtt.bench.chain import PRIMARY, SECONDARY, WIDTH, Case, left, programs, reference, weights
from hepti_mqtt.bench.chain_pair import ChainPair, cases, rounds
from hepti_mqtt.bench.chain_plot import plot_rows, plot_shares
from hepti_mqtt.bench.chain_results import Condition
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.errors import ConfigError, LabError
from hepti_mqtt.ids import PLANNER
from hepti_mqtt.kernels import Workers
from hepti_mqtt.lab.local import LocalHost
from hepti_mqtt.program import Recv, Send
from hepti_mqtt.runtime.worker.executor import Executor, bind, pack

MATRICES = weights(0)
some_cases = st.builds(
    Case, st.integers(1, 9), st.integers(0, 100), st.integers(1, 4), st.sampled_from(("work", "echo"))
)


def run_both(case: Case) -> np.ndarray:
    """Run both Programs in one process, frames handed over at once."""
    made = programs(case)
    resident = pack(MATRICES, [w for p in made.values() for w in p.weights()])
    executors = {}
    for device, program in made.items():
        executors[device] = Executor()
        executors[device].admit(1, bind(program, resident, Workers(1)))
    executors[PRIMARY].deliver(1, (0, 0, PLANNER), left(0, case.rows))
    output = None
    while not all(executor.finished(1) for executor in executors.values() if 1 in executor):
        for device, executor in executors.items():
            while (step := executor.next()) is not None:
                out = step.run()
                if out is None:
                    continue
                if out.op.to == (PLANNER,):
                    output = np.array(out.array)
                else:
                    key = (out.op.node, out.op.part, device)
                    assert executors[out.op.to[0]].deliver(1, key, np.array(out.array)) == "filled"
    assert output is not None
    return output


@settings(max_examples=25, deadline=None)
@given(some_cases)
def test_both_devices_give_the_whole_product(case):
    expected = reference(case, left(0, case.rows), MATRICES)
    np.testing.assert_allclose(run_both(case), expected, atol=1e-4)


@given(st.builds(Case, st.integers(1, 3000), st.integers(0, 100), st.integers(1, 9)))
@settings(max_examples=50, deadline=None)
def test_rows_travel_once_there_and_once_back(case):
    made = programs(case)
    pieces = case.pieces()
    assert len(pieces) == min(case.chunks, case.away)
    assert sum(stop - start for start, stop in pieces) == case.away
    slots = made[PRIMARY].slots
    sent = [slots[op.slot] for op in made[PRIMARY].ops if isinstance(op, Send) and op.to == (SECONDARY,)]
    assert tuple((spec.start, spec.start + spec.shape[0]) for spec in sent) == pieces
    back = [slots[op.slot].shape for op in made[PRIMARY].ops if isinstance(op, Recv) and op.source == SECONDARY]
    assert back == [(stop - start, WIDTH) for start, stop in pieces]
    assert (SECONDARY in made) == bool(case.away)


@pytest.mark.parametrize(
    "numbers", [{"rows": 0}, {"rows": 1, "share": 101}, {"rows": 1, "chunks": 0}, {"rows": 1, "kind": "x"}]
)
def test_a_case_that_means_nothing(numbers):
    with pytest.raises(ConfigError, match="cannot be measured"):
        Case(**numbers)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    if shutil.which("mosquitto") is None and not shutil.which("/usr/sbin/mosquitto"):
        pytest.skip("mosquitto is not installed")
    place = tmp_path_factory.mktemp("chain")
    with (
        start_broker() as broker,
        LocalHost(PRIMARY, place / PRIMARY) as primary,
        LocalHost(SECONDARY, place / SECONDARY) as secondary,
    ):
        pair = ChainPair(primary, secondary, broker.url, "chain")
        yield pair
        pair.close()


@pytest.mark.broker
@pytest.mark.processes
def test_two_processes_measure_every_kind(pair):
    wanted = cases((8,), (50, 100), 2)
    records = list(rounds(pair, [(n, c) for n in range(2) for c in wanted], 3, {"rate_mbit": 940, "cpu_percent": 100}))
    assert len(records) == 2 * len(wanted)
    by_case = {(r["share"], r["chunks"], r["kind"]): r for r in records}
    rows_bytes = 4 * WIDTH * 4  # half of eight rows, one way
    for (share, _, kind), r in by_case.items():
        least = 0 if kind == "parts" else 2 * rows_bytes * share // 50
        assert least <= r["bytes"] <= least + 4 * 400, r
        assert (r["secondary_compute_s"] > 0) == (share > 0 and kind != "echo"), r
    found = chain_results.points(records)
    assert set(chain_results.gains(found, Condition(940, 100))) == {8}
    assert all(p.overlap_s for p in found.values())


class Remembering:
    """A host that keeps the process that was started on it."""

    def __init__(self, host):
        self.host, self.python = host, host.python

    def talk(self, *arguments):
        self.process = self.host.talk(*arguments)
        return self.process


@pytest.mark.broker
@pytest.mark.processes
def test_a_device_that_dies_is_named(tmp_path):
    with start_broker() as broker, LocalHost("a", tmp_path / "a") as a, LocalHost("b", tmp_path / "b") as b:
        secondary = Remembering(b)
        pair = ChainPair(a, secondary, broker.url, "dies")
        secondary.process.signal(signal.SIGKILL)
        secondary.process.wait(30)
        with pytest.raises(LabError, match="chain-secondary"):
            pair.measure(Case(8, 50))
        pair.close()


def record(rate, cpu, share, kind, seconds, rows=256, chunks=1, number=0):
    return {
        "rate_mbit": rate, "cpu_percent": cpu, "rows": rows, "share": share, "kind": kind, "chunks": chunks,
        "round": number, "latency_s": seconds, "primary_compute_s": seconds, "secondary_compute_s": seconds / 2,
    }  # fmt: skip


def curve(rate, cpu, work):
    out = [record(rate, cpu, 0, "work", 0.1)]
    for share, seconds in work.items():
        out += [record(rate, cpu, share, kind, seconds / 2) for kind in ("parts", "echo")]
        out.append(record(rate, cpu, share, "work", seconds))
    return out


def test_the_best_share_is_that_of_least_time():
    records = curve(940, 100, {50: 0.08, 90: 0.05}) + curve(940, 25, {50: 0.09, 90: 0.2})
    found = chain_results.points(records)
    assert chain_results.best_shares(found, 256) == {Condition(940, 100): 90, Condition(940, 25): 50}
    assert chain_results.gains(found, Condition(940, 100)) == {256: pytest.approx(50.0)}
    assert chain_results.contradictions(found, 256) == []


def test_what_differs_from_the_paper_is_said():
    records = curve(240, 100, {50: 0.2, 90: 0.15}) + curve(940, 100, {50: 0.3, 90: 0.4}) + curve(940, 25, {50: 0.1})
    said = chain_results.contradictions(chain_results.points(records), 256)
    assert len(said) == 3
    assert "90 % at 240 Mbit/s and 50 % at 940 Mbit/s" in said[1]
    assert "longer than one" in said[2]


def test_a_point_needs_all_its_parts_in_one_round():
    records = [r for r in curve(940, 100, {50: 0.08}) if r["kind"] != "echo"]
    assert chain_results.points(records) == {}


def test_plots_are_written(tmp_path):
    found = chain_results.points(curve(940, 100, {50: 0.08, 90: 0.05}) + curve(940, 25, {50: 0.09, 90: 0.2}))
    plot_shares(found, 256, tmp_path / "shares.png")
    plot_rows(found, Condition(940, 100), tmp_path / "rows.png")
    for name in ("shares.png", "rows.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
