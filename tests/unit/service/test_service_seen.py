"""Prompts with pictures: the tower's request, then the text's; tests/site compares whole answers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from picture_cases import CASES, TOKENS, encoded

from hepti_mqtt.checkpoint import Checkpoint, make_model, model_parts
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.models import reference
from hepti_mqtt.runtime.coordinator.interface import AnswerRequest, RefuseRequest, RequestArrived, RequestCancelled
from hepti_mqtt.runtime.coordinator.plans import ServedModel
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.session import CoordinatorSession
from hepti_mqtt.service.decoder import RawRequest
from hepti_mqtt.service.forecast import Forecasts
from hepti_mqtt.service.handler import OpenModel, Reply, RequestHandler

TOLERANCE = 1e-4
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.file.stem)


@pytest.fixture
def parts(tmp_path, case):
    path = make_model(case.kind, tmp_path / "model", case.seed)
    opened = [Checkpoint.open(path, "seer", part) for part in model_parts(path)]
    yield opened
    for checkpoint in opened:
        checkpoint.close()


@pytest.fixture
def desk(parts):
    models = {one.name: OpenModel(one.name, one, Pins()) for one in parts}
    return RequestHandler("home", models, Forecasts("home", {n: m.checkpoint.spec for n, m in models.items()}))


def sent(desk, name="1", **request):
    return desk.read_request(RawRequest("seer", "me", json.dumps({"id": name, **request}).encode()), 0.0)


def answered(request):
    plan = Plan(request.key.model, PlanVersion(1, 1), "single", ("d",), "d")
    return AnswerRequest(request, plan, ())


def looked(eyes, request):
    """Compute the rows of a request's pictures."""
    for i, batch in enumerate(request.batches):
        _, request.outputs[i] = reference(eyes.spec, eyes.tensors(), batch.inputs, batch.shape)
    return answered(request)


@by_case
def test_the_prompt_is_that_of_the_processor(case, parts, desk):
    golden = np.load(case.file)
    first = sent(desk, text=case.text, images=[encoded(*size) for size in case.sizes], max_new_tokens=TOKENS)
    assert not isinstance(first, Reply), first
    assert first.key.model == "seer.image"
    assert desk.parts_of(first) == (first,)
    text = desk.following(looked(parts[1], first))
    assert text.generation.prompt == tuple(golden["ids"])
    assert desk.encode_answer(answered(first), 1.0) is None


PICTURE = encoded(20, 20)


@pytest.mark.parametrize("case", CASES[:1])
@pytest.mark.parametrize(
    "request_",
    [
        {"text": "<image> <image> and", "image": PICTURE},
        {"text": "a room <global-img>", "image": PICTURE},
        {"text": "a room", "image": PICTURE, "truncate": True},
        {"text": "a room", "image": PICTURE, "want": "hidden"},
        {"text": "a room", "image": PICTURE, "images": [PICTURE]},
        {"image": PICTURE},
        {"messages": [{"role": "assistant", "content": "a room"}], "image": PICTURE},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": PICTURE, "alt": "x"}]}]},
    ],
    ids=str,
)
def test_what_is_not_understood_is_refused(case, desk, request_):
    reply = sent(desk, **request_)
    assert isinstance(reply, Reply)
    assert reply.outcome == "bad_request"


@pytest.mark.parametrize("case", CASES[:1])
def test_a_picture_has_its_place_in_messages(case, desk):
    image = {"type": "image", "image": PICTURE}
    text = {"type": "text", "text": "what is in the room"}
    first, second = (
        sent(desk, messages=[{"role": "user", "content": content}], **more)
        for content, more in (([image, text], {}), ("what is in the room", {"image": PICTURE}))
    )
    last = sent(desk, messages=[{"role": "user", "content": [text, image]}])
    low = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}", "detail": "low"}}
    whole = sent(desk, messages=[{"role": "user", "content": [low, text]}])
    assert (len(first.batches), len(second.batches), len(last.batches), len(whole.batches)) == (5, 5, 5, 1)


@pytest.mark.parametrize("case", CASES[:1])
@pytest.mark.parametrize("stage", ["picture", "between", "text"])
def test_a_cancel_ends_picture_and_text_once_and_frees_the_id(case, parts, desk, stage):
    """The session knows no request between the answer of the tower and the start of the text."""
    served = tuple(ServedModel(one.name, one.spec, bytes(32)) for one in parts)
    session = CoordinatorSession("home", 1, served, checks=True)

    def handle(event):
        commands = session.handle(event, 0.0)
        return [reply for one in commands if isinstance(one, RefuseRequest) if (reply := desk.encode_refusal(one))]

    def ask():
        return sent(desk, text="a room", image=PICTURE, max_new_tokens=TOKENS)

    cancel = desk.read_request(RawRequest("seer", "me", b'{"cancel": "1"}'), 0.0)
    first, replies = ask(), []
    if stage == "picture":
        replies += [*handle(RequestArrived(first)), *handle(RequestCancelled(cancel))]
    else:
        text = RequestArrived(desk.following(looked(parts[1], first)))
        events = (RequestCancelled(cancel), text) if stage == "between" else (text, RequestCancelled(cancel))
        replies += [reply for event in events for reply in handle(event)]
    assert [reply.outcome for reply in replies] == ["cancelled"]
    again = ask()
    assert handle(RequestArrived(again)) == []
    assert handle(RequestArrived(desk.following(looked(parts[1], again)))) == [], "another request under the same id"
