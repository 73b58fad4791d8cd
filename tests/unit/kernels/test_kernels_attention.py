from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels_support import Case, array

from hepti_mqtt.kernels.attention import log_buckets, relative_buckets
from hepti_mqtt.kernels.tile import NR
from hepti_mqtt.models import plain

LENGTHS = st.lists(st.integers(0, 45), min_size=1, max_size=5).map(tuple)


def attention(lengths, heads, d, *, rows=None, block=None, q=None, kv=None, weights=(), **attrs):
    """All queries (or `rows`) over all keys, or over a block of them: a range, or several; q and kv are whole."""
    m, width = sum(lengths), heads * d
    shared = width // attrs.get("group", 1)
    q = array(m, width + 3) if q is None else q
    kv = array(m, 2 * shared + 5) if kv is None else kv
    rows = range(m) if rows is None else rows
    k_rows = ((0, m),) if block is None else block
    if block and isinstance(block[0], int):
        k_rows = (block,)
    return Case(
        "attention" if block is None else "attention_block",
        [np.ascontiguousarray(q[list(rows)]), np.concatenate([kv[:0], *(kv[slice(*r)] for r in k_rows)])],
        [(len(rows), width) if block is None else (len(rows), heads, d + 2)],
        weights,
        q_column=2,
        k_column=shared + 4,
        v_column=1,
        heads=heads,
        head_dim=d,
        q_rows=rows,
        k_rows=k_rows,
        lengths=lengths,
        scale=d**-0.5,
        **attrs,
    )


@given(lengths=LENGTHS, heads=st.integers(0, 3), d=st.sampled_from([1, 2, 7, 16, 32, 64]))
def test_ragged_sequences_equal_the_reference(lengths, heads, d):
    attention(lengths, heads, d).check()


@given(lengths=LENGTHS.filter(min), data=st.data())
def test_windows_shared_keys_and_a_bias_by_distance_equal_plain_attention(lengths, data):
    m, d = sum(lengths), 8
    group, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    causal, window = data.draw(st.booleans()), data.draw(st.sampled_from([-1, 0, 1, 5, 20]))
    table = array(8, group * groups + 1) if data.draw(st.booleans()) else None
    rows = tuple(data.draw(st.lists(st.integers(0, m - 1), max_size=40, unique=True))) if m else ()
    rows = sorted(rows) if data.draw(st.booleans()) else rows
    attrs = {"causal": causal} | ({"window": window} if window >= 0 else {})
    heads, bias = group * groups, None
    if table is not None:
        attrs |= {"bias_heads": tuple(range(1, heads + 1)), "farthest": 16}
        bias = plain.distance_bias(table.astype("f8")[:, 1:], 16, max(lengths))
    q, kv = array(m, heads * d + 3), array(m, 2 * groups * d + 5)
    case = attention(
        lengths, heads, d, rows=rows, q=q, kv=kv, group=group, weights=() if table is None else [table], **attrs
    )
    got = case.check()[0]
    parts = (x.astype("f8") for x in (q[:, 2 : 2 + heads * d], kv[:, groups * d + 4 :], kv[:, 1 : 1 + groups * d]))
    queries, keys, values = (x[:, : n * d] for x, n in zip(parts, (heads, groups, groups), strict=True))
    want = plain.attention(queries, keys, values, heads, lengths, causal, window, bias=bias)
    np.testing.assert_allclose(got, want[list(rows)], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("lengths", [(700,), (300, 350)])
def test_the_bits_of_a_windowed_row_do_not_depend_on_which_rows_are_computed_beside_it(lengths):
    m, heads, d = sum(lengths), 2, 16
    q, kv = array(m, heads * d + 3), array(m, 2 * heads * d + 5)
    whole = attention(lengths, heads, d, q=q, kv=kv, window=270).check()[0]
    for rows in (range(100, 640), range(333, 580)):
        part = attention(lengths, heads, d, rows=rows, q=q, kv=kv, window=270).run()[0]
        np.testing.assert_array_equal(part, whole[rows.start : rows.stop])


def test_work_counts_what_a_window_leaves():
    case = attention((6,), 2, 8, window=1)
    assert case.kernel.work(case.op, case.slots).flops == 4 * 8 * 2 * (2 + 4 * 3 + 2)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_windowed_query_does_not_see_what_is_not_finite_beyond_its_window(value):
    q, kv = array(40, 11), array(40, 21)
    kv[30] = value
    got = attention((40,), 1, 8, q=q, kv=kv, window=4).run()[0]
    seen = np.isfinite(got).all(axis=1)
    assert seen[:26].all()
    assert seen[35:].all()
    assert not seen[26:35].any()


@given(images=st.integers(1, 2), side=st.integers(1, 6), data=st.data())
def test_a_bias_by_steps_on_a_grid_equals_plain_attention(images, side, data):
    heads, d, lengths = 2, 8, (side * side + 1,) * images
    m = sum(lengths)
    table = array((2 * side - 1) ** 2 + 3, heads + 1)
    rows = sorted(data.draw(st.sets(st.integers(0, m - 1), min_size=1)))
    q, kv = array(m, heads * d + 3), array(m, 2 * heads * d + 5)
    attrs = {"bias_heads": (1, 2), "bias_side": side}
    got = attention(lengths, heads, d, rows=rows, q=q, kv=kv, weights=[table], **attrs).check()[0]
    parts = (x.astype("f8") for x in (q[:, 2:-1], kv[:, heads * d + 4 : -1], kv[:, 1 : 1 + heads * d]))
    want = plain.attention(*parts, heads, lengths, bias=plain.grid_bias(table.astype("f8")[:, 1:], side))
    np.testing.assert_allclose(got, want[rows], rtol=2e-5, atol=2e-5)


@given(lengths=LENGTHS.filter(min), heads=st.integers(1, 3), data=st.data())
def test_keys_and_queries_of_distances_equal_plain_attention(lengths, heads, data):
    m, d = sum(lengths), data.draw(st.sampled_from([7, 16]))
    rows = sorted(data.draw(st.sets(st.integers(0, m - 1), min_size=1)))
    tables = [array(data.draw(st.sampled_from([10, 16])), heads * d)]
    tables.append(array(len(tables[0]), heads * d))
    q, kv = array(m, heads * d + 3), array(m, 2 * heads * d + 5)
    attrs = {"disentangled": True, "farthest": 30}
    got = attention(lengths, heads, d, rows=rows, q=q, kv=kv, weights=tables, **attrs).check()[0]
    parts = (x.astype("f8") for x in (q[:, 2:-1], kv[:, heads * d + 4 : -1], kv[:, 1 : 1 + heads * d]))
    found = plain.log_buckets(len(tables[0]), 30, max(lengths))
    want = plain.attention(*parts, heads, lengths, positions=(*(t.astype("f8") for t in tables), found))
    np.testing.assert_allclose(got, want[rows], rtol=5e-5, atol=5e-5)
    edges = data.draw(st.lists(st.integers(0, m), max_size=5))
    attention(lengths, heads, d, rows=rows, block=ranges_of(m, edges), q=q, kv=kv, weights=tables, **attrs).check()


def test_more_keys_than_one_block_meet_queries_of_distances():
    tables = [array(64, 32), array(64, 32)]
    attrs = {"weights": tables, "disentangled": True, "farthest": 300}
    attention((290, 70), 2, 16, **attrs).check()
    case = attention((6,), 2, 16, **attrs)
    assert case.kernel.work(case.op, case.slots).flops == 10 * 16 * 2 * 36


@pytest.mark.parametrize(("rows", "farthest"), [(8, 40), (14, 40), (512, 600), (64, 33)])
def test_buckets_of_distances_are_those_of_the_oracle(rows, farthest):
    longest = 700
    found = log_buckets(np.arange(1 - longest, longest), rows, farthest)
    t = np.arange(longest)
    np.testing.assert_array_equal(found[t[:, None] - t + longest - 1], plain.log_buckets(rows, farthest, longest))
    assert (np.diff(found) >= 0).all(), "compiled code relies on it"


def test_buckets_of_distances_are_those_of_t5():
    far = np.array([0, 1, 7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 45, 46, 63, 64, 90, 91, 127, 128, 500])
    want = [0, 1, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 15, 15]
    assert relative_buckets(-far, 32, 128).tolist() == want
    assert relative_buckets(far[1:], 32, 128).tolist() == [bucket + 16 for bucket in want[1:]]


def test_more_keys_than_one_block_and_more_queries_than_one_tile():
    attention((300, 70, 129), 2, 32).check()


@pytest.mark.parametrize("d", [20, 64])
def test_a_tile_alone_reads_keys_where_they_lie_and_has_the_bits_of_tiles_that_share_copies_of_them(d):
    lengths, heads = (530, 37), 2
    q, kv = array(567, heads * d + 3), array(567, 2 * heads * d + 5)
    whole = attention(lengths, heads, d, q=q, kv=kv).run()[0]
    for first in range(0, 567, NR):
        rows = range(first, min(first + NR, 567))
        alone = attention(lengths, heads, d, rows=rows, q=q, kv=kv).run()[0]
        np.testing.assert_array_equal(alone, whole[rows.start : rows.stop])


def ranges_of(m, edges):
    """Return the ranges between every other pair of edges of 0..m, some of them empty or next to each other."""
    edges = sorted(edges)
    return tuple((min(a, m), min(b, m)) for a, b in zip(edges[::2], edges[1::2], strict=False))


@given(lengths=LENGTHS, edges=st.lists(st.integers(0, 225), max_size=9), causal=st.booleans(), data=st.data())
def test_several_ranges_of_keys_equal_the_reference_over_all_with_the_others_left_out(lengths, edges, causal, data):
    m, d = sum(lengths), 8
    rows = tuple(data.draw(st.lists(st.integers(0, m - 1), max_size=30))) if m else ()
    k_rows = ranges_of(m, edges)
    q, kv = array(m, d + 3), array(m, 2 * d + 5)
    got = attention(lengths, 1, d, q=q, kv=kv, rows=rows, block=k_rows, causal=causal).check()[0]
    held = {key for r in k_rows for key in range(*r)}
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for state, row in zip(got[:, 0], rows, strict=True):
        first = starts[np.searchsorted(starts, row, side="right") - 1]
        stop = row + 1 if causal else starts[np.searchsorted(starts, row, side="right")]
        keys = sorted(held & set(range(first, stop)))
        scores = kv[keys, d + 4 : 2 * d + 4].astype("f8") @ q[row, 2 : d + 2] * d**-0.5
        top = scores.max(initial=-np.inf)
        p = np.exp(scores - top)
        np.testing.assert_allclose(state[d:], [top, p.sum()], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(state[:d], p @ kv[keys, 1 : d + 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "k_rows", [((0, 2), (1, 2)), ((1, 3), (0, 1)), ((0, 2),), ((0, 4),), ((1, 4),), ((2, 1), (1, 3))]
)
def test_keys_that_are_no_rows_in_ascending_order_are_refused(k_rows):
    case = attention((3,), 1, 4)
    bad = Case("attention", case.reads, [(3, 4)], **{**case.op.attrs, "k_rows": k_rows})
    with pytest.raises(ValueError, match="k_rows must be ranges of the 3 packed rows"):
        bad.run()


@given(lengths=LENGTHS.filter(lambda v: sum(v) > 0), cuts=st.lists(st.floats(0, 1), max_size=10))
def test_states_of_any_split_combine_to_the_whole(lengths, cuts):
    m, heads, d = sum(lengths), 2, 8
    q, kv = array(m, heads * d + 3, scale=4), array(m, 2 * heads * d + 5, scale=4)
    edges = sorted({0, m, *(int(c * m) for c in cuts)})
    states = [attention(lengths, heads, d, q=q, kv=kv, block=(a, b)).run()[0] for a, b in pairwise(edges)]
    combine = Case("attention_combine", states, [(m, heads * d)], heads=heads, head_dim=d)
    whole = attention(lengths, heads, d, q=q, kv=kv)
    np.testing.assert_allclose(combine.check()[0], whole.reference()[0], rtol=1e-4, atol=1e-4)


def test_rows_without_keys_in_the_block():
    state = attention((4, 6), 2, 8, block=(4, 10)).check()[0]
    assert (state[:4, :, :8] == 0).all()
    assert (state[:4, :, 8] == -np.inf).all()
    assert (state[:4, :, 9] == 0).all()
    nothing = Case("attention_combine", [state[:4], state[:4]], [(4, 16)], heads=2, head_dim=8).check()[0]
    assert (nothing == 0).all()


@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads_gives_the_same_bits(threads):
    case = attention((200, 3, 150), 4, 32)
    np.testing.assert_array_equal(case.run(threads)[0], case.run(1)[0])
    states = [attention((200, 3, 150), 4, 32, block=b).run()[0] for b in ((0, 100), (100, 353))]
    combine = Case("attention_combine", states, [(353, 128)], heads=4, head_dim=32)
    np.testing.assert_array_equal(combine.run(threads)[0], combine.run(1)[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_sequence_and_is_not_hidden(value):
    q, kv = array(20, 11), array(20, 21)
    kv[3, 12] = value
    case = attention((8, 12), 1, 8, q=q, kv=kv)
    got, want = case.run()[0], case.reference()[0]
    np.testing.assert_allclose(got[8:], want[8:], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.isnan(got[:8]), np.isnan(want[:8]))


def test_ops_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="q_rows must lie in"):
        attention((3,), 1, 4, q=array(5, 7), kv=array(5, 13), rows=(4,)).run()
    case = attention((3,), 1, 4)
    for attr, value, message in (
        ("k_column", 12, "k_column leaves no room"),
        ("q_rows", (0,), "q_rows names 1 rows"),
        ("group", 2, "1 heads are no groups of 2"),
        ("head_dim", 0, "make no sense"),
    ):
        bad = Case("attention", case.reads, [(3, 4)], **{**case.op.attrs, attr: value})
        with pytest.raises(ValueError, match=message):
            bad.run()


def test_work_counts_the_pairs_of_a_sequence():
    case = attention((3, 4), 2, 8)
    assert case.kernel.work(case.op, case.slots).flops == 4 * 8 * 2 * (9 + 16)
    block = attention((3, 4), 2, 8, block=(2, 5))
    assert block.kernel.work(block.op, block.slots).flops == 4 * 8 * 2 * (3 * 1 + 4 * 2)


def test_causal_attention_equals_attention_over_the_prefix_of_the_own_sequence():
    q, kv = array(100, 11), array(100, 21)
    got = attention((37, 63), 1, 8, q=q, kv=kv, causal=True).run()[0]
    for row, start in ((0, 0), (5, 0), (36, 0), (37, 37), (70, 37), (99, 37)):
        lengths = (start, row + 1 - start, 99 - row)
        want = attention(lengths, 1, 8, q=q, kv=kv, rows=(row,)).run()[0]
        np.testing.assert_allclose(got[row], want[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [12, 3])
def test_a_causal_query_does_not_see_what_is_not_finite_after_it(value, column):
    q, kv = array(40, 11), array(40, 21)
    kv[30, column] = value
    got = attention((40,), 1, 8, q=q, kv=kv, causal=True)
    with np.errstate(invalid="ignore"):
        result, want = got.run()[0], got.reference()[0]
    assert np.isfinite(result[:30]).all()
    np.testing.assert_allclose(result[:30], want[:30], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(np.isnan(result[30:]), np.isnan(want[30:]))


@pytest.mark.parametrize("queries", range(1, 9))
def test_few_queries_over_many_keys_equal_the_reference(queries):
    attention((300,), 2, 64, rows=range(300 - queries, 300)).check()
    attention((300,), 2, 64, rows=range(300 - queries, 300), causal=True).check()
    attention((300,), 2, 64, rows=range(300 - queries, 300), block=(100, 290), causal=True).check()


@pytest.mark.parametrize("scale", [1e-41, 1e-20, 1.0, 1e4])
@pytest.mark.parametrize("rows", [3, 40])
def test_denormal_and_huge_inputs_are_within_1e_3_of_the_reference(rows, scale):
    # Huge: scores of 1e8 choose one key each; the error is that of f32 scores (1e-7 of them), so values are compared
    # where the choice is clear.
    q, kv = array(40, 19, scale=scale), array(40, 37, scale=scale)
    case = attention((40,), 2, 8, q=q, kv=kv, rows=range(rows))
    got, want = case.run()[0], case.reference()[0]
    bad = ~np.isclose(got, want, rtol=1e-3, atol=max(1e-3 * scale, 1e-44))
    assert bad.mean() <= (0.02 if scale > 1 else 0.0)
