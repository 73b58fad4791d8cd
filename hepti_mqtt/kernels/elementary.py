"""Elementary functions in f32, written so that a loop over them vectorises: no branch, no table, no call.

In all of them NaN gives NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types

from hepti_mqtt.kernels.jit import emitter, exact, lowered

f32 = np.float32

ZERO: Final = f32(0.0)
ONE: Final = f32(1.0)
HALF: Final = f32(0.5)

_I32: Final = ir.IntType(32)


def _emit_power_of_two(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    bits = builder.add(builder.bitcast(arguments[0], _I32), ir.Constant(_I32, 127))
    return builder.bitcast(builder.shl(bits, ir.Constant(_I32, 23)), ir.FloatType())


def _emit_bits_of(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    return builder.bitcast(arguments[0], _I32)


def _emit_from_bits(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    return builder.bitcast(arguments[0], ir.FloatType())


def _plain_bits_of(x: Any) -> Any:
    return int(f32(x).view(np.int32))


def _plain_from_bits(bits: Any) -> Any:
    return np.uint32(int(bits) & 0xFFFFFFFF).view(f32)


def _plain_power_of_two(shifted: Any) -> Any:
    return _plain_from_bits(_plain_bits_of(shifted) + 127 << 23)


bits_of: Final = lowered(emitter(1, _emit_bits_of, types.int32, types.float32), _plain_bits_of)
from_bits: Final = lowered(emitter(1, _emit_from_bits, types.float32, types.int32), _plain_from_bits)

_REBIAS: Final = f32(2.0**112)  # from the exponent of a half to that of a float
_HALF_INFINITY: Final = 0x7C00 << 13


@exact
def from_half(bits: Any) -> Any:
    """Return the f32 of the bits of a half."""
    magnitude = (bits & 0x7FFF) << 13
    value = from_bits(np.int32(magnitude | 0x7F800000)) if magnitude >= _HALF_INFINITY else ZERO
    value = from_bits(np.int32(magnitude)) * _REBIAS if magnitude < _HALF_INFINITY else value
    return -value if bits & 0x8000 else value


# 2**n for 1.5 * 2**23 + n: the low bits of such a float are the integer n.
_power_of_two: Final = lowered(emitter(1, _emit_power_of_two, types.float32, types.float32), _plain_power_of_two)

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


# Q(t), the chance that a normal variable exceeds t, as a polynomial in u = 2 t / 5.5 - 1: the error, times t where that
# is above 1, is at most 2.5e-8 (least squares over Chebyshev nodes, with weights moved to where the error is largest).
# All coefficients are below 0.3, so that rounding adds little. Beyond 5.5, t Q(t) is less than half of an ulp of t.
_Q0, _Q1, _Q2 = f32(2.9797584e-3), f32(-2.500744e-2), f32(9.455983e-2)
_Q3, _Q4, _Q5 = f32(-2.0683983e-1), f32(2.7185532e-1), f32(-1.767045e-1)
_Q6, _Q7, _Q8 = f32(-5.119087e-2), f32(2.1550404e-1), f32(-1.6349544e-1)
_Q9, _Q10, _Q11 = f32(-2.5283279e-2), f32(1.3311194e-1), f32(-6.6586755e-2)
_Q12, _Q13, _Q14 = f32(-4.191306e-2), f32(4.767674e-2), f32(3.2627801e-3)
_Q15, _Q16, _Q17 = f32(-1.4540617e-2), f32(8.297518e-4), f32(1.7816557e-3)
_TAIL_END: Final = f32(5.5)
_TAIL_UNIT: Final = f32(2.0 / 5.5)


@exact
def gelu(x: Any) -> Any:
    """Return x * Phi(x), as max(x, 0) - t Q(t) with t = abs(x): within 4e-7, for x > 0 of its value.

    Even and odd powers are two chains: one of twice the length would wait for its own results.
    """
    t = abs(x)
    t = _TAIL_END if t > _TAIL_END else t
    u = t * _TAIL_UNIT - ONE
    s = u * u
    even, odd = _Q16, _Q17
    even, odd = even * s + _Q14, odd * s + _Q15
    even, odd = even * s + _Q12, odd * s + _Q13
    even, odd = even * s + _Q10, odd * s + _Q11
    even, odd = even * s + _Q8, odd * s + _Q9
    even, odd = even * s + _Q6, odd * s + _Q7
    even, odd = even * s + _Q4, odd * s + _Q5
    even, odd = even * s + _Q2, odd * s + _Q3
    even, odd = even * s + _Q0, odd * s + _Q1
    q = odd * u + even
    q = ZERO if t >= _TAIL_END else q
    return (x if x > ZERO else ZERO) - t * q


_G0, _G1 = f32(0.7978845608028654), f32(0.044715)


@exact
def gelu_tanh(x: Any) -> Any:
    """Return the tanh approximation of gelu (Hendrycks and Gimpel)."""
    return x * HALF * (ONE + tanh(_G0 * (x + _G1 * x * x * x)))


@exact
def silu(x: Any) -> Any:
    """Return x / (1 + e**-x)."""
    e = exp_of_negative(-abs(x))
    return (x if x > ZERO else x * e) / (ONE + e)


_QUICK: Final = f32(1.702)


@exact
def quick_gelu(x: Any) -> Any:
    """Return x / (1 + e**(-1.702 x)), the sigmoid approximation of gelu (Hendrycks and Gimpel)."""
    e = exp_of_negative(-abs(x * _QUICK))
    return (x if x > ZERO else x * e) / (ONE + e)


@exact
def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e**-x)."""
    e = exp_of_negative(-abs(x))
    return (ONE if x > ZERO else e) / (ONE + e)


@exact
def relu(x: Any) -> Any:
    """Return max(x, 0)."""
    return ZERO if x < ZERO else x


_SIX: Final = f32(6.0)
_LEAK: Final = f32(0.1)


@exact
def relu6(x: Any) -> Any:
    """Return x cut to 0..6."""
    y = ZERO if x < ZERO else x
    return _SIX if y > _SIX else y


_THREE, _SIXTH = f32(3.0), f32(1 / 6)


@exact
def hard_sigmoid(x: Any) -> Any:
    """Return (x + 3) / 6 cut to 0..1 (Howard et al., 2019)."""
    return relu6(x + _THREE) * _SIXTH


@exact
def hard_swish(x: Any) -> Any:
    """Return x times its hard sigmoid (Howard et al., 2019)."""
    return x * (relu6(x + _THREE) * _SIXTH)


@exact
def leaky_relu(x: Any) -> Any:
    """Return x, or 0.1 x below 0."""
    return x * _LEAK if x < ZERO else x
