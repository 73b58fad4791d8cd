"""The kernels' benchmark: what it measures, that it refuses wrong results, and that it goes on where it ended."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from contextlib import closing
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from hepti_mqtt.bench import (
    kernel_bars,
    kernel_cases,
    kernel_linear,
    kernel_maps,
    kernel_report,
    kernel_rivals,
    kernel_shapes,
    kernels,
)
from hepti_mqtt.bench.kernel_cases import Case, Conditions
from hepti_mqtt.bench.kernel_options import Options
from hepti_mqtt.bench.kernel_shapes import Shape, shapes
from hepti_mqtt.bench.kernel_timing import interleaved, ratio
from hepti_mqtt.checkpoint.make import spec_of_kind
from hepti_mqtt.cli.main import main
from hepti_mqtt.errors import BenchError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import Workers, works
from hepti_mqtt.models import encoder, shape_for
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import make_plan, programs
from hepti_mqtt.program import Compute

ORIGIN = {
    "machine": "2 x some CPU, Linux",
    "isa": "avx2",
    "python": "3.11",
    "versions": {"numpy": "2"},
    "blas": "openblas",
    "revision": "abc",
    "seed": 1,
    "rounds": 3,
}


def record(m, n, k, weight, ours, threads=1, group="linear", **rivals):
    """Return a record with three rounds of equal time."""
    seconds = {name: [t] * 3 for name, t in {"ours": ours, **rivals}.items()}
    names = {"key": f"{group}:{m}x{n}x{k}", "group": group, "threads": threads, "m": m, "n": n, "k": k}
    return {
        **names,
        "weight": weight,
        "seconds": seconds,
        "storage": "f32",
        "flops": 2.0 * m * n * k,
        "elapsed_s": 1.0,
        "roofs": {
            "roof": {"amount": threads * 1e9, "seconds": [0.5, 1.0, 2.0]},
            "roof, 1 thread": {"amount": 1e9, "seconds": [0.5, 0.5, 2.0]},
        },
        "provenance": ORIGIN,
        "command": "c",
    }


@pytest.mark.wide  # half a minute
def test_the_shapes_are_those_of_the_programs():
    assert {"bert-large", "vit-base"} < set(kernel_shapes.MODELS)
    some = shapes(("bert-large", "vit-base"))
    found = {(s.m, s.n, s.k) for s in some}
    assert len(found) == len(some)
    assert (384, 3 * 1024, 1024) in found  # BERT-Large alone: Q, K and V at once
    assert (16, 4096, 1024) in found  # 128 tokens over eight devices by rows
    assert (197, 768, 3072) in found  # ViT-Base alone
    assert all(s.weight % s.flops == 0 and s.weight > 0 for s in some)


@pytest.mark.parametrize(("strategy", "options"), [("row", {"variant": "heads"}), ("column", {}), ("single", {})])
def test_layers_that_are_alike_count_for_each_of_them(strategy, options):
    spec, devices = encoder(spec_of_kind("vit-base")), ("d0", "d1") if strategy != "single" else ("d0",)
    shape, template = shape_for(spec, spec.max_tokens), Plan("bench", Epoch(1, 1), strategy, devices, "d0")
    plan = make_plan(spec, template, strategy, options, [1.0] * len(devices))
    whole = Counter()
    for program in programs(spec, plan, shape).values():
        for op in program.ops:
            for work in works(op, program.slots) if isinstance(op, Compute) else ():
                if work.kind == "linear":
                    whole[work.rows, work.n, work.k] += int(work.flops)
    assert kernel_shapes.flops_of(spec, plan, shape) == whole


def test_every_contender_runs_in_every_round_and_the_order_turns():
    ran = []
    samples = interleaved({name: lambda name=name: ran.append(name) for name in "abc"}, 3)
    assert {name: len(times) for name, times in samples.items()} == {"a": 3, "b": 3, "c": 3}
    changes = [name for i, name in enumerate(ran) if i == 0 or ran[i - 1] != name]
    assert "".join(changes).endswith("abcbcacab")


def test_a_ratio_is_that_of_the_medians_and_lies_in_its_interval():
    found = ratio([1.0, 2.0, 3.0, 2.0, 2.0], [4.0, 5.0, 6.0, 5.0, 5.0], seed=1)
    assert found.value == 2.5
    assert found.low <= 2.5 <= found.high
    assert found == ratio([1.0, 2.0, 3.0, 2.0, 2.0], [4.0, 5.0, 6.0, 5.0, 5.0], seed=1)


def test_the_rivals_compute_the_same():
    rng = np.random.default_rng(1)
    x, w, b = (rng.standard_normal(s, np.float32) for s in ((5, 7), (7, 9), (9,)))
    assert "numpy" in kernel_rivals.rivals()
    of = kernel_linear.made_of(x, w, b)
    assert set(kernel_linear.theirs(of, kernel_rivals.rivals(), 1)) == set(kernel_rivals.rivals())
    assert set(kernel_linear.theirs_int8(of, kernel_rivals.int8_rivals(), 1)) == set(kernel_rivals.int8_rivals())


@pytest.mark.parametrize("wrong", [1e-4, np.nan])
def test_a_wrong_result_is_refused_before_anything_is_timed(wrong):
    x, w, b = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32), np.zeros(5, np.float32)
    good = x @ w
    of = kernel_linear.made_of(x, w, b)
    kernel_linear.check("ours", good, of, of.rounding())
    good[2, 4] += wrong
    with pytest.raises(BenchError, match=r"ours computes .* wrongly in 1 of 15 values; nothing was timed"):
        kernel_linear.check("ours", good, of, of.rounding())


def test_a_rival_that_computes_wrongly_stops_the_case(monkeypatch):
    def make(x, w, b, _threads):
        return (lambda: None), lambda: np.zeros((len(x), len(b)), np.float32)

    monkeypatch.setattr(kernel_cases, "rivals", lambda: {"liar": make})
    with pytest.raises(BenchError, match="liar computes"):
        kernel_cases.measure(Case("linear", Shape(2, 3, 4, 1.0)), Conditions(1, 1, 1), {"ours": Workers(1)})


def test_the_layers_of_image_models_are_those_that_are_published():
    macs = {name: sum(layer.shape.flops for layer in layers()) / 2e9 for name, layers in kernel_maps.MODELS.items()}
    assert macs["vgg16"] == pytest.approx(15.35, abs=0.01)
    assert macs["resnet50"] == pytest.approx(4.09, abs=0.01)
    assert macs["mobilenet-v2"] == pytest.approx(0.30, abs=0.01)


def test_shares_of_a_layer_make_its_rows_from_those_that_they_see():
    layer = kernel_maps.Layer(14, 9, 4, 6, 3, 2, (1, 1, 1, 1), 1, "relu")
    assert list(kernel_maps.shares(layer, 1)) == [layer._replace(pad=(1, 1, 0, 1))]  # no patch sees the row beyond
    whole = kernel_maps.data(layer, 1)
    with closing(Workers(1)) as workers:
        wanted = called(kernel_maps.ours(whole, workers))
        for devices in (2, 3, 9):
            parts, first = list(kernel_maps.shares(layer, devices)), 0
            found = []
            for part in parts:
                low = max(first * 2 - 1, 0)
                of = replace(whole, layer=part, x=np.ascontiguousarray(whole.x[low : low + part.rows]))
                found.append(called(kernel_maps.ours(of, workers)))
                first += part.out[0]
            np.testing.assert_array_equal(np.concatenate(found), wanted)


def called(contender):
    contender()
    return contender.args[1][0]


def test_a_convolution_is_checked_and_timed():
    layer = kernel_maps.Layer(5, 6, 8, 8, 3, 1, (1, 1, 0, 1), 8, "relu6")
    case = Case("maps", layer.shape, "f32", "small", layer)
    with closing(Workers(1)) as workers:
        found = kernel_cases.measure(case, Conditions(1, 2, 1), {"ours": workers})
    assert set(found["seconds"]) == {"ours", *kernel_maps.theirs(kernel_maps.data(layer, 1), 1)}
    assert (found["model"], found["flops"]) == ("small", 2.0 * 4 * 6 * 8 * 9)
    of = kernel_maps.data(layer, 1)
    with pytest.raises(BenchError, match=r"ours computes 5x6x8 to 8, 3x3 by 1 in 8 groups.* wrongly in 192 of 192"):
        of.check("ours", np.full(layer.out, np.nan, np.float32))


def test_the_summary_weighs_by_flops_and_names_the_worst_shape():
    records = [
        record(128, 1024, 1024, 3.0, ours=1.0, numpy=2.0),
        record(16, 512, 512, 1.0, ours=1.0, numpy=1.0),
        record(8, 32, 32, 0.0, ours=1.0, numpy=0.1),  # too few weights to be judged alone
    ]
    figures = {f.name: f for f in kernel_report.summary(records)}
    assert figures["f32 × numpy, 1 thread: mean by FLOPs"].value == pytest.approx(1.75)
    least = figures["f32 × numpy, 1 thread: least of n·k ≥ 2^18"]
    assert (least.value, least.shape, least.of) == (1.0, "m=16 n=512 k=512", 2)
    assert figures["f32 × numpy, 1 thread, 8 ≤ m ≤ 48: mean by FLOPs"].value == pytest.approx(1.0)
    assert figures["of the FMA peak, 1 thread, m ≥ 96, n, k ≥ 768: least"].value == pytest.approx(
        2 * 128 / 1000 * 1.048576
    )


def test_every_bar_has_a_verdict():
    records = [
        record(128, 1024, 1024, 1.0, ours=1.0, torch=1.25),
        record(16, 1024, 1024, 1.0, ours=1.0, torch=1.0),
        record(128, 1024, 1024, 1.0, ours=1.0, torch=9.0, threads=2),
        record(64, 512, 512, 1.0, ours=1.0, group="int8", **{"ours, f32": 3.6}),
    ]
    found = {v.name: v for v in kernel_bars.verdicts(records)}
    assert len(found) == len(kernel_bars.BARS)
    assert found["f32 × PyTorch: mean by FLOPs"].met
    assert found["f32 × PyTorch: mean by FLOPs"].found == (pytest.approx(1.125), 2, "")
    few = found["f32, 8 ≤ m ≤ 48 × PyTorch: least of n·k ≥ 2^18"]
    assert (few.met, few.found) == (False, (1.0, 1, "m=16 n=1024 k=1024"))
    assert found["w8a8, m ≥ 48 × own f32: mean by FLOPs"].met
    assert found["f32 × NumPy: mean by FLOPs"].met is None
    lines = "\n".join(kernel_bars.table(records))
    assert lines.count("not measured") == len(found) - 6 - 2
    assert lines.count("**not met**") == 2 + 2


def test_two_threads_are_compared_with_one_of_the_same_process():
    records = [record(64, 512, 512, 1.0, ours=1.0, threads=2, group="threads", **{"ours, 1 thread": 1.8})]
    records[0]["seconds"] = {"ours": [0.9, 1.8, 0.9], "ours, 1 thread": [1.62, 1.8, 1.8]}
    figures = {f.name: f.value for f in kernel_report.summary(records)}
    assert figures == {
        "× own one thread, 2 threads, m ≥ 64: mean by FLOPs": pytest.approx(2.0),
        "× own one thread, 2 threads, m ≥ 64: least": pytest.approx(2.0),
        "FMA peak of 2 threads × of one, same rounds: mean by FLOPs": pytest.approx(2.0),
        "FMA peak of 2 threads × of one, same rounds: least": pytest.approx(2.0),
    }
    scaling = {
        v.name.removeprefix("2 threads × 1 thread, f32, m ≥ 64"): v for v in kernel_bars.verdicts(records) if v.found
    }
    assert {(v.bar, v.met) for v in scaling.values()} == {(1.85, True)}
    # The second round's two threads had the FMA peak of one: it does not count where cores are free.
    free = ", rounds with 95% of two FMA peaks"
    assert {name: v.found.value for name, v in scaling.items()} == {
        ": mean by FLOPs": pytest.approx(2.0),
        ": least of n·k ≥ 2^18": pytest.approx(2.0),
        f"{free}: mean by FLOPs": pytest.approx(1.71 / 0.9),
        f"{free}: least of n·k ≥ 2^18": pytest.approx(1.71 / 0.9),
    }


def test_rounds_without_free_cores_say_nothing_of_several_threads():
    records = [record(64, 512, 512, 1.0, ours=1.0, threads=2, group="threads", **{"ours, 1 thread": 1.0})]
    records[0]["roofs"]["roof"]["amount"] = 1e9
    verdicts = {v.name: v for v in kernel_bars.verdicts(records) if "FMA peaks" in v.name}
    assert [v.met for v in verdicts.values()] == [None, None]


@pytest.mark.parametrize(
    ("groups", "threads", "processes"),
    [
        (("linear", "threads", "int8"), 2, [("linear", "int8"), ("threads",)]),
        (("linear", "threads"), 1, [("linear",)]),
        (("threads",), 2, [("threads",)]),
        (("threads",), 1, []),
    ],
)
def test_several_threads_are_measured_in_a_process_without_rivals(groups, threads, processes, tmp_path, monkeypatch):
    handed = []
    monkeypatch.setattr(kernels, "_in_own_process", handed.append)
    with pytest.raises(BenchError, match="nothing was measured of"):
        kernels.run(Options(tmp_path, threads=(threads,), only=groups))
    assert [(o.threads, o.only) for o in handed] == [((threads,), only) for only in processes]


def test_several_threads_are_timed_beside_one():
    pools = {"ours": Workers(2), kernel_cases.SINGLE: Workers(1)}
    found = kernel_cases.measure(Case("threads", Shape(66, 64, 32, 1.0)), Conditions(2, 3, 1), pools)
    pools["ours"].close()
    assert (found["group"], found["threads"]) == ("threads", 2)
    assert {name: len(times) for name, times in found["seconds"].items()} == {"ours": 3, "ours, 1 thread": 3}


def test_the_report_is_tables_and_plots(tmp_path):
    pytest.importorskip("matplotlib")
    records = [record(m, 64, 32, 0.0, ours=1e-3 * m, numpy=2e-3 * m, group="curve") for m in (1, 8, 64)]
    kernel_report.write(records, ORIGIN, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"kernels.md", "kernels.csv", "rows-1.png", "rows-1.svg"}
    lines = (tmp_path / "kernels.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 3
    assert lines[2].split(",")[6] == "numpy"
    assert float(lines[2].split(",")[9]) == 2.0


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Return options for two small shapes, measured in this process; NumPy alone is the rival."""
    two = [(Shape(2, 33, 7, 2.0), "f32", "", None), (Shape(3, 16, 5, 1.0), "f32", "", None)]
    monkeypatch.setitem(kernel_cases.GROUPS, "linear", (lambda _quick, _seed: two, kernel_cases.GROUPS["linear"][1]))
    monkeypatch.setattr(kernels, "_in_own_process", kernels._measure_all)
    monkeypatch.setattr(kernels, "provenance", lambda: {k: v for k, v in ORIGIN.items() if k != "rounds"})
    return Options(tmp_path, quick=True, threads=(1,), only=("linear",))


def test_a_run_goes_on_where_the_last_one_ended(small):
    assert kernels.run(small).missing == 0
    lines = small.out / kernels.LINES
    whole = lines.read_text()
    first, second = whole.splitlines(keepends=True)
    lines.write_text(first + second[:40])  # cut off while it was written
    results = kernels.run(small)
    assert [r["key"] for r in results.records] == ["linear:2x33x7:f32", "linear:3x16x5:f32"]
    assert lines.read_text().startswith(first)
    assert all(median(r["seconds"]["ours"]) > 0 for r in results.records)


def test_a_group_of_several_passes_measures_every_case_before_one_again(small, monkeypatch):
    monkeypatch.setitem(kernel_cases.PASSES, "linear", 2)
    options = replace(small, quick=False)
    results = kernels.run(options)
    lines = [json.loads(line) for line in (small.out / kernels.LINES).read_text().splitlines()]
    assert [(r["m"], r["pass"]) for r in lines] == [(2, 0), (3, 0), (2, 1), (3, 1)]
    assert [len(r["seconds"]["ours"]) for r in lines] == [kernels._ROUNDS // 2] * 4
    first = results.records[0]
    assert len(results.records) == 2
    assert first["seconds"]["numpy"] == lines[0]["seconds"]["numpy"] + lines[2]["seconds"]["numpy"]
    measured = [r["roofs"]["roof"] for r in (lines[0], lines[2], first)]
    one, other, both = ([s / roof["amount"] for s in roof["seconds"]] for roof in measured)
    assert both == pytest.approx(one + other)
    assert first["elapsed_s"] == lines[0]["elapsed_s"] + lines[2]["elapsed_s"]
    (small.out / kernels.LINES).write_text("".join(f"{json.dumps(r)}\n" for r in lines[:3]))
    assert kernels.run(replace(options, seconds=0.0)).missing == 1


def test_results_of_other_software_are_not_mixed(small, monkeypatch):
    kernels.run(small)
    monkeypatch.setattr(kernels, "provenance", lambda: {**ORIGIN, "revision": "def"})
    with pytest.raises(BenchError, match="revision abc then, def now; choose another --out"):
        kernels.run(small)


def test_a_damaged_file_is_named(small):
    (small.out / kernels.LINES).write_text("{\n")
    with pytest.raises(BenchError, match="is damaged"):
        kernels.run(small)


def test_the_command_measures_in_a_process_of_its_own(tmp_path, capsys):
    arguments = ["bench", "--json", "kernels", "--quick", "--threads", "1", "--only", "curve", "--out", str(tmp_path)]
    assert main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["missing"] == 0
    assert said["provenance"]["versions"]["numpy"]
    assert (tmp_path / "rows-1.svg").exists()


@pytest.fixture
def environment(monkeypatch):
    """Return the environment that the last measuring process would have had."""
    handed = {}

    def run(_command, env, **_options):
        handed.update(env)
        return subprocess.CompletedProcess([], 0, stderr="")

    monkeypatch.setattr(kernels.subprocess, "run", run)
    return handed


def test_rivals_are_not_slowed_by_inherited_settings(tmp_path, monkeypatch, environment):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    kernels._in_own_process(Options(tmp_path, threads=(2,)))
    assert "OPENBLAS_CORETYPE" not in environment
    assert environment["OPENBLAS_NUM_THREADS"] == "2"


def test_no_blas_has_threads_beside_our_own_alone(tmp_path, environment):
    kernels._in_own_process(Options(tmp_path, threads=(2,), only=("threads",)))
    assert environment["OPENBLAS_NUM_THREADS"] == "1"


@pytest.mark.parametrize("wrong", [["--only", "nothing"], ["--threads", "0"], ["--threads", "x"]])
def test_a_wrong_argument_is_usage(wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", "kernels", *wrong])
    assert caught.value.code == 2
    assert wrong[1] in capsys.readouterr().err
