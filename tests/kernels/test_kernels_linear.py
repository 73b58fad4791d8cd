from __future__ import annotations

import os
import platform
import subprocess
import sys

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import ALONE, Case, array

from hepti_mqtt.kernels.epilogue import ACTIVATIONS
from hepti_mqtt.kernels.isa import OVERRIDE
from hepti_mqtt.kernels.jit import JIT
from hepti_mqtt.kernels.linear import DEPTH, ROWS, SHALLOW
from hepti_mqtt.program import SlotSpec


def runnable():
    """Return the instruction sets with a tile that this CPU can run."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return ["generic", "neon"]
    features = llvm.get_host_cpu_features()
    wide = [("avx2", "avx2"), ("avx512", "avx512f")]
    return ["generic", "sse", *(name for name, feature in wide if features.get(feature))]


def linear(m, k, widths, bias=True, activation=None, residual=False, x=None, **attrs):
    n = widths[0] if activation == "silu_gate" else sum(widths)
    reads = [array(m, k) if x is None else x, *([array(m, n)] if residual else [])]
    weights = [array(k, w, scale=0.3) for w in widths]
    biases = [array(w) for w in widths] if bias else []
    return Case(
        "linear",
        reads,
        [(m, n)],
        [*weights, *biases],
        packed=len(widths),
        bias=bias,
        activation=activation,
        residual=residual,
        **attrs,
    )


@given(
    m=st.integers(0, 40),
    k=st.integers(0, 70),
    widths=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    bias=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
    residual=st.booleans(),
    scale=st.sampled_from([1.0, 0.125, -3.0]),
)
def test_any_shape_equals_the_reference(m, k, widths, bias, activation, residual, scale):
    widths = widths[:1] * 2 if activation == "silu_gate" else widths
    linear(m, k, widths, bias, activation, residual, scale=scale).check(rtol=1e-4, atol=1e-4)


@given(
    m=st.integers(1, 20),
    n=st.integers(1, 140),
    before=st.integers(0, 70),
    behind=st.integers(0, 70),
    activation=st.sampled_from(ACTIVATIONS),
    residual=st.booleans(),
)
def test_a_column_range_is_filled_and_nothing_beside_it(m, n, before, behind, activation, residual):
    widths = [n, n] if activation == "silu_gate" else [n]
    case = linear(m, 30, widths, activation=activation, residual=residual)
    whole = case.run()[0]
    into = linear(m, 30, widths, activation=activation, residual=residual, out_column=before)
    into.reads, into.weights = case.reads, case.weights
    into.slots[-1] = SlotSpec((m, before + n + behind))
    got = into.run()[0]
    np.testing.assert_array_equal(got[:, before : before + n], whole)
    assert (np.delete(got, np.s_[before : before + n], axis=1) == np.float32(7e7)).all()


@pytest.mark.parametrize(("column", "width"), [(-1, 20), (13, 20), (0, 7)])
def test_a_column_range_outside_the_slot_is_refused(column, width):
    case = linear(4, 6, [8], out_column=column)
    case.slots[-1] = SlotSpec((4, width))
    with pytest.raises(ValueError, match="do not lie in the written slot"):
        case.run()


@pytest.mark.parametrize("m", [1, 13, ROWS - 1, ROWS, ROWS + 1])
@pytest.mark.parametrize("k", [SHALLOW + 1, DEPTH - 1, DEPTH, DEPTH + 1, 3 * DEPTH])
@pytest.mark.parametrize("activation", [None, "silu_gate"])
def test_shapes_beside_the_sizes_of_the_blocks(m, k, activation):
    if not JIT:
        m, k = min(m, 30), min(k, 40)
    linear(m, k, [70, 70], activation=activation, residual=True).check(rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("widths", [[8], [8, 9], [8, 8, 8]])
def test_a_gate_needs_two_weights_of_one_width(widths):
    case = linear(4, 6, widths)
    case.op.attrs["activation"] = "silu_gate"
    case.slots[-1] = SlotSpec((4, 8))
    with pytest.raises(ValueError, match="gate"):
        case.run()


@pytest.mark.wide
@pytest.mark.skipif(not JIT or bool(os.environ.get(OVERRIDE)), reason="runs the tests of compiled code once again")
@pytest.mark.parametrize("name", runnable())
def test_the_kernel_with_the_tile_of_every_instruction_set_of_this_machine(name):
    environment = {**os.environ, OVERRIDE: name, ALONE: "linear handover"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("m", [*range(1, 30), 48, 61])
def test_every_number_of_rows(m):
    linear(m, 33, [64, 5]).check(atol=1e-4)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(("m", "widths"), [(1, [700, 300]), (130, [20]), (130, [300, 300, 300]), (57, [64])])
def test_any_number_of_threads_gives_the_same_bits(threads, m, widths):
    case = linear(m, 300, widths, activation="gelu", residual=True)
    np.testing.assert_array_equal(case.run(threads)[0], case.run(1)[0])


@given(m=st.integers(1, 40), data=st.data())
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(m, data):
    case = linear(m, 50, [40], activation="gelu")
    first = data.draw(st.integers(0, m - 1))
    stop = data.draw(st.integers(first + 1, m))
    part = linear(stop - first, 50, [40], activation="gelu", x=case.reads[0][first:stop])
    part.weights = case.weights
    np.testing.assert_array_equal(part.run()[0], case.run()[0][first:stop])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, 1e-42])
def test_odd_values_stay_in_their_row(value):
    x = array(9, 20)
    x[4, 3] = value
    case = linear(9, 20, [11], x=x)
    got, want = case.run()[0], case.reference()[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert np.isfinite(np.delete(got, 4, axis=0)).all()


def test_arrays_that_cannot_be_written_are_read():
    x = np.frombuffer(array(7, 12).tobytes(), np.float32).reshape(7, 12)
    assert not x.flags.writeable
    linear(7, 12, [9], x=x).check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swish"}, "activation 'swish'"),
        ({"residual": True}, "must read 2 slots"),
        ({"bias": None}, None),
    ],
)
def test_an_op_that_does_not_fit_is_refused(change, message):
    case = linear(4, 6, [8])
    attrs = {**case.op.attrs, **change}
    if message is None:
        del attrs["bias"]
        message = "attribute 'bias' is missing"
    case.op = type(case.op)("linear", case.op.reads, case.op.writes, (), attrs)
    with pytest.raises(ValueError, match=message):
        case.run()


def test_weights_that_do_not_fit_are_refused():
    case = linear(4, 6, [8])
    good = case.weights
    case.weights = linear(4, 5, [8]).weights
    with pytest.raises(ValueError, match="has 5 rows, x has 6 columns"):
        case.run()
    case.weights = good[:1]
    with pytest.raises(ValueError, match="needs"):
        case.run()
    case.weights = good[::-1]
    with pytest.raises(ValueError, match="needs a packed f32 matrix"):
        case.run()
    case.weights = [good[0], good[0]]
    with pytest.raises(ValueError, match="needs a plain array"):
        case.run()


def test_work_is_that_of_the_matmul():
    work = linear(4, 6, [8, 3]).kernel.work(linear(4, 6, [8, 3]).op, linear(4, 6, [8, 3]).slots)
    assert (work.kind, work.rows, work.k, work.n, work.flops) == ("linear", 4, 6, 11, 2 * 4 * 6 * 11)
