"""Models that are served under one name: which of them reads a request, and answers that need several."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from hepti_mqtt.checkpoint import Checkpoint, make_model, model_parts
from hepti_mqtt.core.errors import NetworkError, RequestError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.models import reference
from hepti_mqtt.runtime.coordinator.interface import AnswerRequest, RefuseRequest
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.service.decoder import RawRequest
from hepti_mqtt.service.forecast import Forecasts
from hepti_mqtt.service.handler import OpenModel, Reply, RequestHandler
from hepti_mqtt.service.requests import read_input

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)


def picture():
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module", params=["tiny-clip", "tiny-siglip"])
def towers(request, tmp_path_factory, kept_hashes):
    path = make_model(request.param, tmp_path_factory.mktemp("towers") / "m", seed=3)
    opened = [Checkpoint.open(path, "photos", part) for part in model_parts(path)]
    yield opened
    for checkpoint in opened:
        checkpoint.close()


@pytest.fixture
def desk(towers):
    names = ("photos", "photos.image")
    models = {name: OpenModel(name, one, Pins()) for name, one in zip(names, towers, strict=True)}
    return RequestHandler("home", models, Forecasts("home", {n: m.checkpoint.spec for n, m in models.items()}))


def sent(desk, name="1", **request):
    return desk.read_request(RawRequest("photos", "me", json.dumps({"id": name, **request}).encode()), 0.0)


def answered(desk, towers, request):
    """Return the reply when the reference has computed a request of one model."""
    checkpoint = towers[request.key.model == "photos.image"]
    for i, batch in enumerate(request.batches):
        _, request.outputs[i] = reference(checkpoint.spec, checkpoint.tensors(), batch.inputs, batch.shape)
    plan = Plan(request.key.model, PlanVersion(1, 1), "single", ("d",), "d")
    return desk.encode_answer(AnswerRequest(request, plan, ()), 1.0)


def result(reply):
    answer = json.loads(reply.payload)
    assert (answer["ok"], answer["model"], reply.key.model) == (True, "photos", "photos")
    assert reply.topic == f"hepti/v1/home/infer/photos/res/me/{reply.key.id}"
    return answer["result"]


def test_a_text_is_read_to_its_end(towers):
    """To the token at which the vector is read, without which there is none; or filled up to the longest."""
    words = towers[0]
    own = words.tokenizer.encode("a red door").ids
    ids = read_input(words, {"text": "a red door"}).inputs.tolist()
    if words.spec.text.padded:
        assert ids == [*own, *[words.padding_id] * (words.spec.max_tokens - len(own))]
        assert read_input(words, {"ids": own}).inputs.tolist() == ids
    else:
        assert read_input(words, {"ids": [*ids, 7, 7]}).inputs.tolist() == ids == own
        with pytest.raises(RequestError):
            read_input(words, {"ids": ids[:-1]})
    with pytest.raises(RequestError):  # of a pair only the first text would count
        read_input(words, {"text": "a", "text_pair": "b"})


# As the pipeline of transformers for zero-shot classification of pictures gives them.
SCORES = {
    "clip": (("the cold room", 0.37092851), ("light", 0.33391472), ("a door", 0.29515677)),
    "siglip": (("the cold room", 0.86578494), ("a door", 0.85787301), ("light", 0.85402882)),
}
LABELS = ("a door", "the cold room", "light")


def test_labels_of_a_picture(desk, towers):
    first = sent(desk, image=picture(), candidate_labels=[*LABELS])
    both = desk.parts_of(first)
    assert {desk.address(request)[0].key.model for request in both} == {"photos"}
    assert answered(desk, towers, both[1]) is None  # the vectors of the labels are missing
    labels_of_picture, want = result(answered(desk, towers, both[0]))["labels"], SCORES[towers[0].spec.family]
    assert [one["label"] for one in labels_of_picture] == [label for label, _ in want]
    np.testing.assert_allclose([one["score"] for one in labels_of_picture], [score for _, score in want], rtol=1e-4)
    again = sent(desk, image=picture(), candidate_labels=[*LABELS])
    assert isinstance(again, Reply), "an answer is kept for a repetition under its id"
    several = sent(desk, "2", images=[picture()] * 2, candidate_labels=[*LABELS], hypothesis_template="{}", top_k=2)
    *_, reply = [answered(desk, towers, request) for request in desk.parts_of(several)]
    assert [len(one["labels"]) for one in result(reply)["results"]] == [2, 2]


def test_an_answer_of_several_outputs_ends_with_the_first_error(desk, towers):
    both = desk.parts_of(sent(desk, image=picture(), candidate_labels=["a", "b"]))
    refused = [desk.encode_refusal(RefuseRequest(request, NetworkError("gone"))) for request in both]
    assert [reply and reply.outcome for reply in refused] == [NetworkError.code, None]
    assert answered(desk, towers, both[0]) is None


@pytest.mark.parametrize(
    "body",
    [
        {"image": picture(), "text": "a"},
        {"image": picture(), "candidate_labels": []},
        {"image": picture(), "candidate_labels": ["a", "a"]},
        {"image": picture(), "candidate_labels": ["a"], "multi_label": True},
        {"image": picture(), "candidate_labels": ["a"], "want": "hidden"},
        {"image": picture(), "candidate_labels": ["a"], "hypothesis_template": "no place"},
        {"images": [], "candidate_labels": ["a"]},
        {"image": "no picture", "candidate_labels": ["a"]},
        {"text": "a", "candidate_labels": ["a"]},
        {"audio": "a"},
    ],
)
def test_what_no_model_reads_is_refused(desk, body):
    assert sent(desk, **body).outcome == RequestError.code


def test_a_part_has_no_requests_of_its_own(desk):
    raw = RawRequest("photos.image", "me", json.dumps({"id": "1", "image": picture()}).encode())
    with pytest.raises(Exception, match="photos"):
        desk.read_request(raw, 0.0)
