"""Ops whose one Program serves every position: what they have in common.

`at` is an i32 slot [1] that is filled at run time: the number of rows that the cache has before the m new ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from hepti_mqtt.kernels.base import Array, Check
from hepti_mqtt.program import Compute, SlotSpec


def check_at(op: Compute, slots: Sequence[SlotSpec], dtypes: tuple[str, ...]) -> Check:
    """Check an op that reads arrays [m] or [m, n] of these dtypes, then `at`, and writes f32 [m, n]."""
    check = Check(op, slots)
    check.count(len(dtypes) + 1)
    got = tuple(s.dtype for s in check.reads)
    check.that(got == (*dtypes, "i32"), f"must read {[*dtypes, 'i32']}, not {list(got)}")
    check.that(check.writes[0].dtype == "f32", "must write f32")
    check.shape(check.reads[-1], (1,))
    ranks = [len(s.shape) for s in (*check.reads[:-1], check.writes[0])]
    check.that(ranks == [1 if d == "i32" else 2 for d in (*dtypes, "f32")], "slots must be matrices, ids a vector")
    return check


def first_of(op: Compute, at: Array, m: int, size: int, what: str) -> int:
    """Return the first of the m new rows; raises ValueError if they do not lie in `size`."""
    first = int(at[0])
    if first < 0 or first + m > size:
        raise ValueError(
            f"{op.kernel}: rows {first}..{first + m} do not lie in the {size} {what}; end sequences earlier"
        )
    return first
