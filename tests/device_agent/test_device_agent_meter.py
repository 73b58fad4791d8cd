import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from device_agent.heartbeat import FRAMES, IDLE_S, KEPT_S, METERED, SHORTEST_S, Meter
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.ids import Epoch
from hepti_mqtt.kernels import works
from hepti_mqtt.models import largest_shape
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import programs
from hepti_mqtt.program import Compute, Send, SlotSpec, WeightRef

ROWS, K, N = 8, 64, 64
SECONDS = 1e-3
OVERHEAD = 1e-5
CURVES = {
    "linear": [{"k": K, "n": N, "points": [[1, SECONDS / ROWS], [ROWS, SECONDS], [10 * ROWS, 10 * SECONDS]]}],
    "attention_flops_per_s": 1e9,
    "rowwise_bytes_per_s": 1e9,
    "op_overhead_s": OVERHEAD,
    "frame_s": 1e-4,
    "copy_bytes_per_s": 1e9,
}


def linear(rows=ROWS):
    slots = (SlotSpec((rows, K)), SlotSpec((rows, N)))
    attrs = {"bias": False, "activation": None, "residual": False}
    return Compute("linear", (0,), (1,), (WeightRef("w", (0, K), (0, N)),), attrs), slots


OP, SLOTS = linear()


@pytest.fixture
def meter():
    return Meter(CURVES)


def test_idle_is_one(meter):
    assert meter.slowdown(0.0) == 1.0


@given(factor=st.floats(0.1, 20), counts=st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_a_constant_slowdown_is_told_as_it_is(factor, counts):
    meter = Meter(CURVES)
    for now, count in enumerate(counts):
        meter.samples.extend([(OP, SLOTS, factor * (SECONDS + OVERHEAD))] * count)
        assert meter.slowdown(float(now)) == pytest.approx(factor)


def second(meter, factor, now, count=10):
    meter.samples.extend([(OP, SLOTS, factor * (SECONDS + OVERHEAD))] * count)
    return meter.slowdown(now)


def test_a_change_shows_within_seconds_and_idleness_forgets_it(meter):
    assert second(meter, 1.0, 0.0) == pytest.approx(1.0)
    assert second(meter, 3.0, 1.0) > 2.0
    told = second(meter, 3.0, 2.0)
    assert 2.5 < told < 3.0
    assert meter.slowdown(2.0 + IDLE_S) == told
    assert meter.slowdown(2.1 + IDLE_S) == 1.0
    assert second(meter, 3.0, 20.0) == pytest.approx(3.0)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.2])
def test_who_computes_about_as_fast_as_measured_is_known_for_it_for_minutes(meter, factor):
    told = second(meter, factor, 0.0)
    assert told == pytest.approx(factor)
    assert meter.slowdown(10 * IDLE_S) == told
    assert meter.slowdown(KEPT_S) == told
    assert meter.slowdown(KEPT_S + 0.1) == 1.0


def test_a_few_ops_behind_many_say_little(meter):
    second(meter, 1.1, 0.0, 1000)
    assert second(meter, 3.0, 1.0, 10) == pytest.approx(1.1, rel=0.05)
    assert second(meter, 3.0, 60.0, 10) == pytest.approx(1.1, rel=0.1), "nor do they after a pause"


def test_what_was_seen_against_another_measurement_does_not_count(meter):
    second(meter, 1.3, 0.0)
    meter.measured(CURVES)
    assert meter.slowdown(0.1) == 1.0
    assert second(meter, 1.1, 0.2) == pytest.approx(1.1)


def test_long_ops_weigh_more_than_short_ones(meter):
    big, slots = linear(9 * ROWS)
    meter.samples.append((OP, SLOTS, 2 * SECONDS))
    meter.samples.append((big, slots, 9 * SECONDS))
    assert meter.slowdown(0.0) == pytest.approx(11 / 10, rel=0.01)


def test_ops_too_short_to_say_anything_do_not_count(meter):
    op, slots = linear(0)
    assert OVERHEAD < SHORTEST_S
    meter.samples.append((op, slots, 1.0))
    meter.samples.append((Send(0, ("d2",), 1), SLOTS, 1.0))
    assert meter.slowdown(0.0) == 1.0


@pytest.mark.parametrize("kind", ["tiny-bert", "tiny-vgg", "tiny-resnet", "tiny-gpt2"])
def test_all_that_is_priced_by_the_curves_of_matmuls_is_metered(kind):
    spec = spec_of_kind(kind)
    (program,) = programs(spec, Plan("m", Epoch(1, 1), "single", ("d",), "d"), largest_shape(spec)).values()
    ops = [op for op in program.ops if isinstance(op, Compute)]
    priced = {op.kernel for op in ops if any(work.kind == "linear" for work in works(op, program.slots))}
    assert priced
    assert priced <= METERED


def test_samples_are_bounded(meter):
    meter.samples.extend([(OP, SLOTS, SECONDS)] * 100_000)
    assert len(meter.samples) < 10_000


FRAME_S, BYTES_PER_S = 1e-4, 1e9


def frame_meter() -> Meter:
    return Meter({**CURVES, "mesh_frame_s": FRAME_S, "mesh_copy_bytes_per_s": BYTES_PER_S})


def seen(meter: Meter, windows: list[tuple[int, int]], cost: tuple[float, float]):
    """Return what the meter tells after looks at so many frames of so many bytes each, at `cost` times the price."""
    frames = nbytes = 0
    told = meter.frame_cost(0, 0)
    assert told is None
    for count, each in windows:
        frames, nbytes = frames + count, nbytes + count * each
        meter.frames_s += cost[0] * count * FRAME_S + cost[1] * count * each / BYTES_PER_S
        told = meter.frame_cost(frames, nbytes)
    assert told is not None
    return told.frame_s / FRAME_S, told.byte_s * BYTES_PER_S


@given(of_frames=st.floats(0.2, 5), of_bytes=st.floats(1, 30), rounds=st.integers(2, 5))
def test_frames_and_bytes_are_told_apart_where_there_are_small_and_large_ones(of_frames, of_bytes, rounds):
    found = seen(frame_meter(), [(1000, 2000), (1000, 200_000)] * rounds, (of_frames, of_bytes))
    assert found == (pytest.approx(of_frames, rel=0.15, abs=0.15), pytest.approx(of_bytes, rel=0.05))


@given(of_bytes=st.floats(1, 30), each=st.integers(60_000, 10**6), rounds=st.integers(1, 5))
def test_where_all_frames_are_alike_their_price_is_what_they_cost(of_bytes, each, rounds):
    of_frames, found = seen(frame_meter(), [(300, each)] * rounds, (1.0, of_bytes))
    price, cost = (p * FRAME_S + q * each / BYTES_PER_S for p, q in ((of_frames, found), (1.0, of_bytes)))
    assert price == pytest.approx(cost, rel=0.05)
    assert 0.2 < of_frames < 1.5  # no more is the frame's than loopback lets expect


@given(windows=st.lists(st.tuples(st.integers(FRAMES, 500), st.integers(0, 10**6)), min_size=1, max_size=5))
@example(windows=[(FRAMES, 0)])
def test_what_is_told_is_never_negative_and_explains_what_was_seen(windows):
    meter = frame_meter()
    of_frames, of_bytes = seen(meter, windows, (0.0, 3.0))  # frames that cost nothing but their bytes
    assert of_frames > 0
    assert of_bytes > 0


def test_a_few_frames_say_nothing_until_there_are_more():
    meter = frame_meter()
    meter.frames_s = 5.0
    assert meter.frame_cost(FRAMES - 1, 0) is None
    assert meter.frame_cost(FRAMES, 0) is not None


def test_what_probes_cost_between_two_looks_is_not_what_tensors_cost():
    meter, other = frame_meter(), frame_meter()
    other.frames_s += 3 * FRAMES * FRAME_S
    expected = other.frame_cost(FRAMES, 0)
    meter.frames_s += 7.0
    assert meter.frame_cost(0, 0) is None
    meter.frames_s += 3 * FRAMES / 2 * FRAME_S
    assert meter.frame_cost(FRAMES // 2, 0) is None
    meter.frames_s += 7.0
    assert meter.frame_cost(FRAMES // 2, 0) is None
    meter.frames_s += 3 * FRAMES / 2 * FRAME_S
    assert meter.frame_cost(FRAMES, 0) == pytest.approx(expected)
    meter.frames_s += 7.0
    assert meter.frame_cost(FRAMES, 0) == pytest.approx(expected)
