"""Elementary functions in f32, written so that a loop over them vectorises: no branch, no table, no call.

In all of them NaN gives NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types

from hepti_mqtt.kernels.jit import exact, lowered

f32 = np.float32

ZERO: Final = f32(0.0)
ONE: Final = f32(1.0)
HALF: Final = f32(0.5)

_I32: Final = ir.IntType(32)


def _emit_power_of_two(_context: Any, _shifted: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bits = builder.add(builder.bitcast(arguments[0], _I32), ir.Constant(_I32, 127))
        return builder.bitcast(builder.shl(bits, ir.Constant(_I32, 23)), ir.FloatType())

    return types.float32(types.float32), codegen


def _emit_bits_of(_context: Any, _x: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _I32)

    return types.int32(types.float32), codegen


def _emit_from_bits(_context: Any, _bits: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


def _plain_bits_of(x: Any) -> Any:
    return int(f32(x).view(np.int32))


def _plain_from_bits(bits: Any) -> Any:
    return np.uint32(int(bits) & 0xFFFFFFFF).view(f32)


def _plain_power_of_two(shifted: Any) -> Any:
    return _plain_from_bits(_plain_bits_of(shifted) + 127 << 23)


bits_of: Final = lowered(_emit_bits_of, _plain_bits_of)  # f32 -> i32
from_bits: Final = lowered(_emit_from_bits, _plain_from_bits)  # i32 -> f32

# 2**n for 1.5 * 2**23 + n: the low bits of such a float are the integer n.
_power_of_two: Final = lowered(_emit_power_of_two, _plain_power_of_two)

_LOG2E: Final = f32(1.4426950408889634)
_SHIFT: Final = f32(12582912.0)
_LN2_HIGH: Final = f32(0.693359375)
_LN2_LOW: Final = f32(-2.12194440e-4)
_LOWEST: Final = f32(-87.33654)
_E0, _E1, _E2 = f32(1.9875691500e-4), f32(1.3981999507e-3), f32(8.3334519073e-3)
_E3, _E4, _E5 = f32(4.1665795894e-2), f32(1.6666665459e-1), f32(5.0000001201e-1)


@exact
def exp_of_negative(x: Any) -> Any:
    """Return e**x for x <= 0 to 2 ulp; 0 below -87.3, where the result would be denormal (Cephes expf)."""
    y = _LOWEST if x < _LOWEST else x
    shifted = y * _LOG2E + _SHIFT
    n = shifted - _SHIFT
    r = y - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _E0 * r + _E1
    p = p * r + _E2
    p = p * r + _E3
    p = p * r + _E4
    p = p * r + _E5
    p = p * r * r + r + ONE
    p = p * _power_of_two(shifted)
    return ZERO if x < _LOWEST else p


_SPLIT: Final = f32(0.927734375)
_A0, _A1, _A2, _A3 = f32(-1.72853470e-5), f32(3.83197126e-4), f32(-3.88396438e-3), f32(2.42546219e-2)
_A4, _A5, _A6 = f32(-1.06777877e-1), f32(-6.34846687e-1), f32(-1.28717512e-1)
_B0, _B1, _B2 = f32(-5.96761703e-4), f32(4.99119423e-3), f32(-2.67681349e-2)
_B3, _B4, _B5 = f32(1.12819925e-1), f32(-3.76125336e-1), f32(1.28379166e-1)


@exact
def erf(x: Any) -> Any:
    """Return the error function to 2 ulp: a polynomial near 0, 1 - exp(polynomial) beyond 0.93."""
    t = abs(x)
    s = x * x
    r = _A0 * t + _A1
    u = _A2 * t + _A3
    r = r * s + u
    r = r * t + _A4
    r = r * t + _A5
    r = r * t + _A6
    far = ONE - exp_of_negative(r * t - t)
    far = far if x > ZERO else -far
    p = _B0 * s + _B1
    p = p * s + _B2
    p = p * s + _B3
    p = p * s + _B4
    p = p * s + _B5
    near = p * x + x
    return far if t > _SPLIT else near


_T0, _T1, _T2 = f32(-5.70498872745e-3), f32(2.06390887954e-2), f32(-5.37397155531e-2)
_T3, _T4, _T_SPLIT = f32(1.33314422036e-1), f32(-3.33332819422e-1), f32(0.625)
_MINUS_TWO: Final = f32(-2.0)


@exact
def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent to 2 ulp (Cephes tanhf)."""
    t = abs(x)
    e = exp_of_negative(_MINUS_TWO * t)
    far = (ONE - e) / (ONE + e)
    far = far if x > ZERO else -far
    s = x * x
    p = _T0 * s + _T1
    p = p * s + _T2
    p = p * s + _T3
    p = p * s + _T4
    near = p * s * x + x
    return far if t > _T_SPLIT else near


_SQRT_HALF: Final = f32(0.7071067811865476)
_G0, _G1 = f32(0.7978845608028654), f32(0.044715)


@exact
def gelu(x: Any) -> Any:
    """Return x * Phi(x) by the error function."""
    return x * HALF * (ONE + erf(x * _SQRT_HALF))


@exact
def gelu_tanh(x: Any) -> Any:
    """Return the tanh approximation of gelu (Hendrycks and Gimpel)."""
    return x * HALF * (ONE + tanh(_G0 * (x + _G1 * x * x * x)))


@exact
def relu(x: Any) -> Any:
    """Return max(x, 0)."""
    return ZERO if x < ZERO else x


@exact
def silu(x: Any) -> Any:
    """Return x / (1 + exp(-x))."""
    e = exp_of_negative(-abs(x))
    above = x if x > ZERO else x * e
    return above / (ONE + e)
