"""Models under one name: which of them reads a request, answers that need several, and prompts with pictures."""

import json

import numpy as np
import pytest
from picture_cases import CASES, TOKENS
from picture_cases import encoded as a_picture
from service_support import encoded, noise

from hepti_mqtt.checkpoint import Checkpoint, make_model, model_parts
from hepti_mqtt.core.errors import BadNameError, NetworkError, RequestError
from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.models import reference
from hepti_mqtt.models.shapes import TokenBatch, fixed_point
from hepti_mqtt.runtime.coordinator.interface import AnswerRequest, RefuseRequest, RequestArrived, RequestCancelled
from hepti_mqtt.runtime.coordinator.plans import ServedModel
from hepti_mqtt.runtime.coordinator.requests import Pins
from hepti_mqtt.runtime.coordinator.session import CoordinatorSession
from hepti_mqtt.service.decoder import RawRequest
from hepti_mqtt.service.forecast import Forecasts
from hepti_mqtt.service.handler import OpenModel, Reply, RequestHandler
from hepti_mqtt.service.pictures import decode_views
from hepti_mqtt.service.requests import read_input

PICTURE = encoded(noise(20, 20))


def desk_of(parts):
    models = {one.name: OpenModel(one.name, one, Pins()) for one in parts}
    return RequestHandler("home", models, Forecasts("home", {n: m.checkpoint.spec for n, m in models.items()}))


def sent(desk, name="1", **request):
    return desk.read_request(RawRequest("photos", "me", json.dumps({"id": name, **request}).encode()), 0.0)


def looked(parts, request):
    """Return the Answer of a request that the reference has computed."""
    checkpoint = parts[request.key.model == "photos.image"]
    for i, batch in enumerate(request.batches):
        _, request.outputs[i] = reference(checkpoint.spec, checkpoint.tensors(), batch.inputs, batch.shape)
    return AnswerRequest(request, Plan(request.key.model, PlanVersion(1, 1), "single", ("d",), "d"), ())


@pytest.fixture(scope="module", params=["tiny-clip", "tiny-siglip"])
def towers(request, tmp_path_factory, kept_hashes):
    path = make_model(request.param, tmp_path_factory.mktemp("towers") / "m", seed=3)
    opened = [Checkpoint.open(path, "photos", part) for part in model_parts(path)]
    yield opened
    for checkpoint in opened:
        checkpoint.close()


@pytest.fixture
def photos(towers):
    return desk_of(towers)


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


def test_labels_of_a_picture(photos, towers):
    first = sent(photos, image=PICTURE, candidate_labels=[*LABELS])
    both = photos.parts_of(first)
    assert {photos.address(request)[0].key.model for request in both} == {"photos"}
    assert photos.encode_answer(looked(towers, both[1]), 1.0) is None  # the vectors of the labels are missing
    want = SCORES[towers[0].spec.family]
    labels_of_picture = result(photos.encode_answer(looked(towers, both[0]), 1.0))["labels"]
    assert [one["label"] for one in labels_of_picture] == [label for label, _ in want]
    np.testing.assert_allclose([one["score"] for one in labels_of_picture], [score for _, score in want], rtol=1e-4)
    again = sent(photos, image=PICTURE, candidate_labels=[*LABELS])
    assert isinstance(again, Reply), "an answer is kept for a repetition under its id"
    several = sent(photos, "2", images=[PICTURE] * 2, candidate_labels=[*LABELS], hypothesis_template="{}", top_k=2)
    *_, reply = [photos.encode_answer(looked(towers, request), 1.0) for request in photos.parts_of(several)]
    assert [len(one["labels"]) for one in result(reply)["results"]] == [2, 2]


def test_an_answer_of_several_outputs_ends_with_the_first_error(photos, towers):
    both = photos.parts_of(sent(photos, image=PICTURE, candidate_labels=["a", "b"]))
    refused = [photos.encode_error(RefuseRequest(request, NetworkError("gone"))) for request in both]
    assert [reply and reply.outcome for reply in refused] == [NetworkError.code, None]
    assert photos.encode_answer(looked(towers, both[0]), 1.0) is None


@pytest.mark.parametrize(
    "body",
    [
        {"image": PICTURE, "text": "a"},
        {"image": PICTURE, "candidate_labels": []},
        {"image": PICTURE, "candidate_labels": ["a", "a"]},
        {"image": PICTURE, "candidate_labels": ["a"], "multi_label": True},
        {"image": PICTURE, "candidate_labels": ["a"], "want": "hidden"},
        {"image": PICTURE, "candidate_labels": ["a"], "hypothesis_template": "no place"},
        {"images": [], "candidate_labels": ["a"]},
        {"image": "no picture", "candidate_labels": ["a"]},
        {"text": "a", "candidate_labels": ["a"]},
        {"audio": "a"},
    ],
)
def test_what_no_model_reads_is_refused(photos, body):
    assert sent(photos, **body).outcome == RequestError.code


def test_a_part_has_no_requests_of_its_own(photos):
    raw = RawRequest("photos.image", "me", json.dumps({"id": "1", "image": PICTURE}).encode())
    with pytest.raises(BadNameError):
        photos.read_request(raw, 0.0)


# Prompts with pictures: views, rows and logits equal to transformers, the tower's request, then the text's; tests/site
# compares whole answers.

TOLERANCE = 1e-4
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.file.stem)


@pytest.fixture
def parts(tmp_path, case):
    path = make_model(case.kind, tmp_path / "model", case.seed)
    opened = [Checkpoint.open(path, "photos", part) for part in model_parts(path)]
    yield opened
    for checkpoint in opened:
        checkpoint.close()


@pytest.fixture
def desk(parts):
    return desk_of(parts)


@by_case
def test_views_are_those_of_the_processor(case, parts):
    golden = np.load(case.file)
    items = [(f"images[{i}]", a_picture(*size)) for i, size in enumerate(case.sizes)]
    pixels, _ = decode_views(items, parts[1].spec.input_spec, parts[1].views)
    np.testing.assert_array_equal(pixels, golden["views"])


@by_case
def test_rows_and_logits_are_those_of_transformers(case, parts):
    golden, (words, eyes) = np.load(case.file), parts
    views = golden["views"]
    shape = eyes.spec.input_spec.batch(len(views))
    _, rows = reference(eyes.spec, eyes.tensors(), views, shape)
    assert np.abs(rows - golden["rows"]).max() < TOLERANCE
    if words.spec.block.picture_rows:  # the reference reads one run, and a picture is one of its own
        return
    ids, mark = golden["ids"], words.config["image_token_id"]
    added = np.zeros((len(ids), words.spec.hidden), np.float32)
    added[ids == mark] = rows - words.embedding(mark)
    inputs = np.concatenate([[0], ids, fixed_point(added)]).astype(np.int32)
    run = TokenBatch((len(ids),), cache=words.spec.input_spec.cache(len(ids)), added=True)
    _, logits = reference(words.spec, words.tensors(), inputs, run)
    assert np.abs(logits[0] - golden["logits"]).max() < TOLERANCE


@by_case
def test_the_prompt_is_that_of_the_processor(case, parts, desk):
    golden = np.load(case.file)
    first = sent(desk, text=case.text, images=[a_picture(*size) for size in case.sizes], max_new_tokens=TOKENS)
    assert not isinstance(first, Reply), first
    assert first.key.model == "photos.image"
    assert desk.parts_of(first) == (first,)
    text = desk.following(looked(parts, first))
    assert text.generation.prompt == tuple(golden["ids"])
    assert desk.encode_answer(looked(parts, first), 1.0) is None


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
        return [reply for one in commands if isinstance(one, RefuseRequest) if (reply := desk.encode_error(one))]

    def ask():
        return sent(desk, text="a room", image=PICTURE, max_new_tokens=TOKENS)

    cancel = desk.read_request(RawRequest("photos", "me", b'{"cancel": "1"}'), 0.0)
    first, replies = ask(), []
    if stage == "picture":
        replies += [*handle(RequestArrived(first)), *handle(RequestCancelled(cancel))]
    else:
        text = RequestArrived(desk.following(looked(parts, first)))
        events = (RequestCancelled(cancel), text) if stage == "between" else (text, RequestCancelled(cancel))
        replies += [reply for event in events for reply in handle(event)]
    assert [reply.outcome for reply in replies] == ["cancelled"]
    again = ask()
    assert handle(RequestArrived(again)) == []
    assert handle(RequestArrived(desk.following(looked(parts, again)))) == [], "another request under the same id"
