"""The state that a planner leaves to the next one: read again until it is replaced, and only for the same model."""

import logging

import numpy as np
import pytest

from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.models import largest_shape
from hepti_mqtt.planner import EarlierPlan
from hepti_mqtt.runtime.coordinator.prefixes import HeldText
from hepti_mqtt.service import last_state
from hepti_mqtt.service.last_state import FILE, LastState, read_state, save_state

LOG = logging.getLogger("test")
PLAN = Plan("tiny", PlanVersion(4, 2), "single", ("a",), "a", predicted_s=0.5)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    opened = [Checkpoint.open(make_model("tiny-llama", root / str(seed), seed), "tiny") for seed in (1, 2)]
    yield opened
    for checkpoint in opened:
        checkpoint.close()


def saved(directory, models):
    longest = largest_shape(models["tiny"].spec).session_rows
    texts = [HeldText((PlanVersion(4, 2), n), np.arange(-3, 9 + n, dtype=np.int32), longest, "tiny") for n in (5, 3)]
    save_state(directory, {"tiny": EarlierPlan(PLAN, {"a": 9})}, texts, models, LOG)


def described(state):
    return state.plans, [(t.session, t.ids.tolist(), t.model) for t in state.texts]


def test_texts_and_plans_stay_until_they_are_replaced(tmp_path, checkpoints):
    models = {"tiny": checkpoints[0], "tiny.image": checkpoints[1]}
    saved(tmp_path, models)
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    for _start in range(2):  # the first one failed before it had a plan
        plans, texts = described(read_state(tmp_path, models, LOG))
        assert plans == {"tiny": EarlierPlan(PLAN, {"a": 9})}
        assert texts == [((PlanVersion(4, 2), n), list(range(-3, 9 + n)), "tiny") for n in (5, 3)]
    save_state(tmp_path, {"tiny": EarlierPlan(PLAN, {"a": 9})}, (), models, LOG)
    assert described(read_state(tmp_path, models, LOG)) == (plans, [])


def test_texts_of_another_model_or_another_tower_are_dropped(tmp_path, checkpoints):
    one, other = checkpoints
    for before, after in (
        ({"tiny": one}, {"tiny": other}),
        ({"tiny": one, "tiny.image": one}, {"tiny": one, "tiny.image": other}),
    ):
        saved(tmp_path, before)
        assert read_state(tmp_path, after, LOG).texts == ()


@pytest.mark.parametrize("fault", ["a changed byte", "empty", "another format", "another version"])
def test_a_file_that_is_not_this_planners_is_dropped(tmp_path, checkpoints, fault, monkeypatch):
    models = {"tiny": checkpoints[0]}
    saved(tmp_path, models)
    data = bytearray((tmp_path / FILE).read_bytes())
    data[-1] ^= 1
    if fault in ("a changed byte", "empty"):
        (tmp_path / FILE).write_bytes(data if fault == "a changed byte" else b"")
    monkeypatch.setattr(last_state, "FORMAT", 2 if fault == "another format" else 1)
    monkeypatch.setattr(last_state, "__version__", "9" if fault == "another version" else last_state.__version__)
    assert read_state(tmp_path, models, LOG) == LastState()
