"""Plans, specs and shapes that cannot be: refused by name before anything is built of them."""

from __future__ import annotations

import copy

import pytest
from sites import EVERY_FAMILY, FAMILIES, plan

from hepti_mqtt.errors import PlanError, WireError
from hepti_mqtt.models import largest_shape
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.worker import residents
from hepti_mqtt.runtime.worker.interface import MessageIn, Study
from hepti_mqtt.runtime.worker.programs import study
from hepti_mqtt.runtime.worker.residents import MAX_DEVICES, check_prepare, shape_of
from hepti_mqtt.runtime.worker.session import ASKED, WorkerSession
from hepti_mqtt.spec import PlainShape

SPEC = FAMILIES["bert-embedding"]
HALVES = plan(SPEC, ("row", {"variant": "kv"}), (1.0, 1.0))


def changed(data, path, value):
    data = copy.deepcopy(data)
    *outer, last = path.split(".")
    inner = data
    for key in outer:
        inner = inner[key]
    assert last in inner
    inner[last] = value
    return data


def found(made=None, spec=None, shapes=(), in_flight=1):
    prepare = messages.Prepare(1, made or HALVES.to_dict(), spec or SPEC.to_dict(), bytes(32), in_flight, shapes)
    message = messages.decode(messages.encode(prepare))
    return study(Study(message), "d0", Topics("home")).found


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_plans_of_every_family_are_believed(name):
    spec = EVERY_FAMILY[name]
    check_prepare("d0", plan(spec, ("single", {}), (1.0,)), spec, [largest_shape(spec).plain()], 2)


@pytest.fixture
def nothing_built(monkeypatch):
    for name in ("resident_weights", "most_live_bytes", "programs_bytes", "peers", "programs_digest"):
        monkeypatch.setattr(residents, name, lambda *_, name=name: pytest.fail(f"{name} was worked out"))


ABSURD_SPECS = [
    ("layers", 10_000), ("layers", 2**53), ("layers", -1), ("hidden", 2**31), ("heads", 2**31), ("mlp", 2**53),
    ("max_tokens", 2**20), ("max_tokens", 41), ("text.vocab", 2**53), ("text.width", -5), ("text.positions", 2**40),
    ("head.outputs", 2**31), ("family", "x" * 5000), ("head.labels", ["x"] * 100_000),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), ABSURD_SPECS)
def test_an_absurd_spec_is_refused_before_anything_is_built(nothing_built, path, value):
    error = found(spec=changed(SPEC.to_dict(), path, value))
    assert isinstance(error, PlanError | WireError)
    assert path in str(error) or isinstance(error, WireError)


@pytest.mark.parametrize(
    ("family", "path", "value"),
    [("vit-classifier", "image.size", 1_000_000), ("vit-classifier", "image.channels", 2**53)],
)
def test_so_are_absurd_pictures(nothing_built, family, path, value):
    spec = FAMILIES[family]
    made = plan(spec, ("row", {"variant": "kv"}), (1.0, 1.0)).to_dict()
    assert path in str(found(made, changed(spec.to_dict(), path, value)))


MANY = [f"d{i}" for i in range(MAX_DEVICES + 1)]
ABSURD_PLANS = [
    ("devices", MANY, "devices"),
    ("devices", ["d0", "d0"], "different"),
    ("devices", ["d1", "d2"], "without d0"),
    ("devices", ["d0", "../#"], "name"),
    ("head", "d7", "without d7"),
    ("strategy", "none-such", "strategy"),
    ("options", {"variant": "none-such"}, "options"),
    ("wire", "f64", "wire"),
    ("weights.rows", [1e308, 1e308], "weights rows"),
    ("weights.rows", [1.0] * 9, "weights rows"),
    ("weights.rows", [-1.0, 2.0], "weights rows"),
    ("ranges", {"parts": [[0, 2**31], [0, 2**31]]}, "ranges parts"),
    ("ranges", {"parts": [[0, 1]] * 5000}, "ranges parts"),
    ("predicted_s", "soon", "prediction"),
    ("reason", "x" * 60_000, "reason"),
]


@pytest.mark.parametrize(("path", "value", "says"), ABSURD_PLANS)
def test_an_absurd_plan_is_refused_before_anything_is_built(nothing_built, path, value, says):
    error = found(changed(HALVES.to_dict(), path, value))
    assert isinstance(error, PlanError)
    assert says in str(error)
    assert len(str(error)) < 300


def test_weights_of_a_plan_may_be_speeds_that_balancing_has_doubled():
    """Of tiny layers most time is no work: a device that is busy with nothing looks many times as fast as it is."""
    assert not isinstance(found(changed(HALVES.to_dict(), "weights.rows", [2.6e10, 1.3e12])), Exception)


def test_so_are_shapes_and_numbers_of_runs_that_no_plan_was_made_for(nothing_built):
    assert "tokens" in str(found(shapes=(PlainShape((2**20,)),)))
    assert "in_flight" in str(found(in_flight=2**40))
    decoder = EVERY_FAMILY["tiny-gpt2"]
    with pytest.raises(PlanError, match="cache"):
        shape_of(decoder, PlainShape((1,), session_rows=2**20))


def test_plans_wait_to_be_studied_in_a_bounded_number():
    device = WorkerSession("d0", "home", 1 << 30)
    for number in range(ASKED):
        made = changed(HALVES.to_dict(), "epoch", [1, number])
        (order,) = device.handle(MessageIn(messages.Prepare(number, made, SPEC.to_dict(), bytes(32), 1)), 0.0)
        assert isinstance(order, Study)
    made = changed(HALVES.to_dict(), "epoch", [1, ASKED])
    (reply,) = device.handle(MessageIn(messages.Prepare(ASKED, made, SPEC.to_dict(), bytes(32), 1)), 0.0)
    failed = messages.decode(reply.payload)
    assert isinstance(failed, messages.Failed)
    assert "plans to study already" in failed.text
