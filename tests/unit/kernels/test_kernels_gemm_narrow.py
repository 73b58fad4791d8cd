"""`linear` over narrow weights: f16, int8 with f32 arithmetic, int8 with int8 activations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

from hepti_mqtt.errors import ConfigError
from hepti_mqtt.kernels import NarrowMatrix, allocate, cpu
from hepti_mqtt.kernels.cpu import DOT_OVERRIDE, DOTS, dot, require_known
from hepti_mqtt.kernels.quantised import quantise_rows
from hepti_mqtt.kernels.weights import BLOCK, PANELS, blocks
from hepti_mqtt.program import WeightRef

STORAGES = ("f16", "w8a32", "w8a8")


def narrow(w, storage):
    buffer = allocate(WeightRef("w", (0, w.shape[0]), (0, w.shape[1]), "packed", storage))
    buffer.put(w, 0, 0)
    return buffer.finish()


def linear(storage, m, k, widths, bias=True, activation=None, residual=False, x=None, weights=None):
    """Return a case whose reference has the matrices as they are stored, so that only the kernel's error is left."""
    n = sum(widths)
    reads = [array(m, k) if x is None else x, *([array(m, n)] if residual else [])]
    matrices = [array(k, w, scale=0.3) for w in widths] if weights is None else weights
    biases = [array(w) for w in widths] if bias else []
    attrs = {"bias": bias, "activation": activation, "residual": residual}
    case = Case("linear", reads, [(m, n)], [*matrices, *biases], packed=len(widths), **attrs)
    case.weights[: len(widths)] = [narrow(w, storage) for w in matrices]
    case.plain[: len(widths)] = [w.plain() for w in case.weights[: len(widths)]]
    return case


def bound(case, storage, widths):
    """Return how far each result may be from the reference, before activation."""
    x = case.reads[0].astype(np.float64)
    w = np.concatenate([np.abs(p.astype(np.float64)) for p in case.plain[: len(widths)]], axis=1)
    rounding = np.abs(x) @ w * (4 + x.shape[1]) * 2.0**-24
    if storage == "w8a8":
        for start in range(0, x.shape[1], BLOCK):
            part, under = x[:, start : start + BLOCK], w[start : start + BLOCK]
            step = (np.maximum(part, 0).max(axis=1, initial=0) - np.minimum(part, 0).min(axis=1, initial=0)) / 254
            # Half a step; a thousandth for f32; magnitudes that count as 0.
            rounding = rounding + np.outer(0.501 * step + 254e-35, under.sum(axis=0))
    return rounding + 1e-5


@given(
    storage=st.sampled_from(STORAGES),
    m=st.integers(0, 20),
    k=st.one_of(st.integers(0, 70), st.integers(120, 800)),
    widths=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    bias=st.booleans(),
    residual=st.booleans(),
    scale=st.sampled_from([1e-20, 1.0, 1e4]),
    shift=st.sampled_from([0.0, 1.0, -3.0]),
)
def test_any_shape_equals_the_reference(storage, m, k, widths, bias, residual, scale, shift):
    x = (array(m, k) + np.float32(shift)) * np.float32(scale)
    case = linear(storage, m, k, widths, bias, None, residual, x=x)
    got, want = case.run()[0], case.reference()[0]
    extra = 1e-6 * np.abs(want)
    assert (np.abs(got - want) <= bound(case, storage, widths) + extra).all()


@given(storage=st.sampled_from(STORAGES), m=st.integers(1, 30), k=st.integers(0, 600), data=st.data())
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(storage, m, k, data):
    case = linear(storage, m, k, [70], activation="gelu")
    first = data.draw(st.integers(0, m - 1))
    stop = data.draw(st.integers(first + 1, m))
    part = linear(storage, stop - first, k, [70], activation="gelu", x=case.reads[0][first:stop])
    part.weights = case.weights
    np.testing.assert_array_equal(part.run()[0], case.run()[0][first:stop])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("m", "widths"), [(1, [700, 300]), (130, [20]), (600, [200])])
def test_any_number_of_threads_gives_the_same_bits(storage, m, widths):
    case = linear(storage, m, 300, widths, activation="gelu", residual=True)
    np.testing.assert_array_equal(case.run(3)[0], case.run(1)[0])


@pytest.mark.parametrize("storage", ["f16", "w8a32"])
@pytest.mark.parametrize("rows", [1, 2])
def test_panels_of_two_matrices_side_by_side_keep_their_own_bias_and_scales(storage, rows):
    """Memory for weights lies side by side, that of biases and scales apart."""
    width = PANELS[storage].width
    case = linear(storage, rows, 70, [width] * 4)
    one = np.concatenate([w.panels for w in case.weights[:4]])
    for i, weight in enumerate(case.weights[:4]):
        case.weights[i] = replace(weight, panels=one[i : i + 1])
    np.testing.assert_allclose(case.run()[0], case.reference()[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_no_number_in_its_row_alone(storage, value):
    x = array(9, 20)
    x[4, 3] = value
    got = linear(storage, 9, 20, [11], x=x).run()[0]
    assert not np.isfinite(got[4]).any()
    if np.isnan(value) or storage == "w8a8":
        assert np.isnan(got[4]).all()
    assert np.isfinite(np.delete(got, 4, axis=0)).all()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("value", [3e38, -3e38, 1e30, 1e-30, 1e-42, 0.0])
def test_huge_and_denormal_rows_stay_within_the_bound(storage, value):
    x = array(9, 20)
    x[4] = value
    x[4, ::3] = -value
    case = linear(storage, 9, 20, [11], bias=False, x=x, weights=[array(20, 11, scale=0.01)])
    got, want = case.run()[0], case.reference()[0]
    if storage == "w8a32" and abs(value) > 1e36:
        assert not np.isfinite(got[4]).any()  # the sum before scaling overflows: loud, not wrong
        got, want = np.delete(got, 4, axis=0), np.delete(want, 4, axis=0)
    assert np.isfinite(got).all()
    near = bound(case, storage, [11])
    near = near if len(got) == len(near) else np.delete(near, 4, axis=0)
    assert (np.abs(got - want) <= near + 1e-6 * np.abs(want)).all()


@pytest.mark.parametrize("storage", ["w8a32", "w8a8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_column_that_is_not_finite_comes_out_as_nan(storage, value):
    w = array(20, 11)
    w[3, 5] = value
    got = linear(storage, 7, 20, [11], weights=[w]).run()[0]
    assert np.isnan(got[:, 5]).all()
    assert np.isfinite(np.delete(got, 5, axis=1)).all()


@given(k=st.integers(0, 300), scale=st.sampled_from([1e-44, 1e-38, 1e-20, 1.0, 1e38]))
def test_codes_of_int8_weights_are_within_half_a_step_of_their_block(k, scale):
    w = (array(k, 21).clip(-3, 3) * np.float64(scale)).astype(np.float32)
    stored = narrow(w, "w8a8")
    assert isinstance(stored, NarrowMatrix)
    off = np.abs(stored.plain() - w.astype(np.float64))
    for block in range(blocks(k)):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        step = np.abs(w[rows]).max(axis=0, initial=0).astype(np.float64) / 127
        # Below 2**-126 a step itself is rounded to a multiple of 2**-149.
        assert (off[rows] <= 0.5001 * step + 127 * 2.0**-149).all()
        groups = slice(block * BLOCK // 4, (block + 1) * BLOCK // 4)
        assert (stored.sums[:, block] == stored.panels[:, groups].sum(axis=(1, 3), dtype=np.int32)).all()


@given(m=st.integers(1, 6), k=st.integers(0, 300), scale=st.sampled_from([1e-30, 1.0, 1e37]))
def test_codes_of_rows_are_within_half_a_step_and_zero_is_exact(m, k, scale):
    x = array(m, k, scale=scale)
    x[:, ::4] = 0
    codes = np.zeros((m, -(-k // 4) * 4), np.uint8)
    scales, zeros = np.zeros((m, blocks(k)), np.float32), np.zeros((m, blocks(k)), np.float32)
    quantise_rows(x, codes, scales, zeros, 0, m)
    signed = codes.view(np.int8) if DOTS[dot()].signed else codes
    step, zero = (np.repeat(a, BLOCK, axis=1)[:, :k] for a in (scales.astype(np.float64), zeros))
    back = (signed[:, :k].astype(np.float64) - zero) * step
    assert (np.abs(back - x) <= 0.501 * step).all()
    assert (back[:, ::4] == 0).all()


def test_every_half_is_widened_exactly():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):  # ARM signals a NaN that is cast
        wide = halves.astype(np.float32)
    case = linear("f16", 1, 1, [len(wide)], bias=False, x=np.ones((1, 1), np.float32), weights=[wide[None]])
    np.testing.assert_array_equal(case.run()[0][0], wide)


def test_matrices_in_two_storages_are_refused():
    case = linear("f16", 4, 6, [8, 8])
    case.weights[1] = linear("w8a8", 4, 6, [8]).weights[0]
    with pytest.raises(ValueError, match="in one storage"):
        case.run()
    case.weights[1] = linear("f16", 4, 5, [8]).weights[0]
    with pytest.raises(ValueError, match="has 5 rows, x has 6 columns"):
        case.run()
    case.weights[2] = case.weights[0]
    case.weights[1] = case.weights[0]
    with pytest.raises(ValueError, match="got a packed f16 matrix"):
        case.run()


def test_the_int8_tile_can_be_forced_to_one_that_exists(monkeypatch):
    monkeypatch.setenv(DOT_OVERRIDE, "plain")
    assert dot() == "plain"
    monkeypatch.setenv(DOT_OVERRIDE, "mmx")
    with pytest.raises(ConfigError, match="'mmx' is no int8 tile"):
        require_known()


@pytest.mark.parametrize(
    ("machine", "features", "forced"),
    [
        ("x86_64", {"avx2": True, "fma": True}, "dotprod"),
        ("x86_64", {"avx2": True, "fma": True}, "avxvnni"),
        ("aarch64", {"neon": True}, "avx512vnni"),
    ],
)
def test_an_int8_tile_of_instructions_that_the_cpu_has_not_is_an_error_in_words(monkeypatch, machine, features, forced):
    monkeypatch.delenv("HEPTI_KERNELS_ISA", raising=False)
    monkeypatch.setenv(DOT_OVERRIDE, forced)
    monkeypatch.setattr("llvmlite.binding.get_process_triple", lambda: f"{machine}-unknown-linux-gnu")
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    monkeypatch.setattr(cpu, "_hwcap", lambda: 0)
    with pytest.raises(ConfigError, match=f"'{forced}' is an int8 tile that .* lacks"):
        require_known()


@pytest.mark.parametrize(("told", "expected"), [("", "sse"), ("+avx2,+fma", "avx2"), ("+avx2,-fma", "sse")])
def test_the_instruction_set_is_one_that_numba_compiles_for(monkeypatch, told, expected):
    monkeypatch.delenv("HEPTI_KERNELS_ISA", raising=False)
    monkeypatch.setattr("llvmlite.binding.get_process_triple", lambda: "x86_64-unknown-linux-gnu")
    monkeypatch.setattr("numba.config.CPU_FEATURES", told)
    assert cpu.isa() == expected


@pytest.mark.parametrize(
    ("machine", "features", "hwcap", "expected"),
    [
        ("aarch64", {"dotprod": True}, 0, "dotprod"),
        # As Linux and LLVM say of a Cortex-A76, and of a Cortex-A72.
        ("aarch64", {"neon": True, "lse": True}, 0x119FFB, "dotprod"),
        ("aarch64", {"neon": True}, 0x8FB, "plain"),
        ("x86_64", {"avx512f": True, "avx512vnni": True}, 0, "avx512vnni"),
        ("x86_64", {"avx512f": True}, 0, "plain"),
        ("x86_64", {"avx2": True, "fma": True, "avxvnni": True}, 0, "avxvnni"),
        ("x86_64", {"avx2": True, "fma": True}, 0x119FFB, "plain"),
        ("riscv64", {}, 0x119FFB, "plain"),
    ],
)
def test_the_int8_tile_follows_from_the_machine(monkeypatch, machine, features, hwcap, expected):
    monkeypatch.delenv("HEPTI_KERNELS_ISA", raising=False)
    monkeypatch.delenv(DOT_OVERRIDE, raising=False)
    monkeypatch.setattr("llvmlite.binding.get_process_triple", lambda: f"{machine}-unknown-linux-gnu")
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    monkeypatch.setattr(cpu, "_hwcap", lambda: hwcap)
    assert dot() == expected
