"""What a client waits for and knows, without a broker; requests and answers as Python users have them."""

import base64
import io
import json
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from client_support import A_PLAN, a_record, an_answer
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hepti_mqtt import __version__
from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.cli.output import status_text
from hepti_mqtt.client import Answer
from hepti_mqtt.client import session as module
from hepti_mqtt.client.body import encode_picture, request_body
from hepti_mqtt.client.connection import AnswerStream
from hepti_mqtt.client.described import random_input
from hepti_mqtt.client.session import ClientSession, RequestEnded, RequestPublish, error_from, odd_clocks
from hepti_mqtt.core import errors
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.messages import Status, encode_status
from hepti_mqtt.protocol.topics import Topics

T = Topics("home")
CAPS = messages.Caps("a", 3, 4, 2, 1 << 30, 1 << 20, "neon", "0", {"linear": []}, 0, 4)


@pytest.fixture
def session():
    return ClientSession("home", "me")


def reply(request="q1", **data):
    return T.response("m", "me", request), json.dumps({**an_answer(request), **data}).encode()


def status(state="online", boot=1):
    return T.planner_status(), encode_status(Status(state, boot))


def record(model="m", boot=1, **data):
    return T.plan(model), msgpack.packb(a_record(boot=boot, **data))


def test_a_request_is_taken_back_when_its_last_caller_has_gone(session):
    for caller in (1, 2):
        session.add_request("m", "q1", {}, caller, 0.0)
    assert session.forget("m", "q1", 1) is None
    back = session.forget("m", "q1", 2)
    assert (back.topic, json.loads(back.payload)) == (T.request("m", "me"), {"cancel": "q1"})
    assert session.forget("m", "q1", 2) is None


@pytest.mark.parametrize(
    ("code", "error"), [("overloaded", errors.OverloadedError), ("from-the-future", errors.RemoteError)]
)
def test_an_error_answer_ends_a_request(session, code, error):
    session.add_request("m", "q1", {}, "token", 0.0)
    payload = json.dumps({"id": "q1", "ok": False, "error": {"code": code, "message": "later"}}).encode()
    ((_, outcome),) = session.handle_message(T.response("m", "me", "q1"), payload, 1.0)
    assert type(outcome) is error


def test_what_waits_is_published_again_when_connection_or_planner_come_back(session):
    session.handle_message(*status(boot=1), now=0.0)
    first = session.add_request("m", "q1", {"text": "x"}, 1, 0.0)
    second = session.add_request("m", "q2", {"text": "y"}, 2, 0.0)
    assert session.to_resend(0.0) == [first, second]
    session.handle_message(*reply("q1"), now=0.5)
    assert session.handle_message(*status("offline", 1), now=1.0) == []
    assert session.handle_message(*status("online", 2), now=2.0) == [second]
    assert session.handle_message(*status("online", 2), now=3.0) == [second], "it was away, its boot is the same"
    session.forget("m", "q2", 2)
    assert session.to_resend(0.0) == []


def test_a_request_without_an_answer_is_sent_again_ever_more_rarely(session):
    publication = session.add_request("m", "q1", {}, "token", 0.0)
    assert session.resend_unanswered(20.0) == [], "without a planner"
    session.handle_message(*status(), now=0.0)
    times = [now for now in range(200) if session.resend_unanswered(float(now)) == [publication]]
    assert times == [10, 30, 70, 150], "after 10, 20, 40 and 80 s"


def test_a_request_has_more_time_than_the_slowest_answer_took_and_while_its_tokens_come(session):
    session.handle_message(*status(), now=0.0)
    for name in ("q1", "q2"):
        session.add_request("m", name, {}, name, 0.0)
    session.handle_message(*reply("q1", result=1), now=40.0)
    assert [len(session.resend_unanswered(now)) for now in (49.0, 50.0)] == [0, 1]
    session.add_request("m", "q3", {}, "token", 60.0)
    session.handle_message(*reply("q2", result=1), now=60.0)
    token = json.dumps({**dict.fromkeys(messages.TOKEN, 0), "final": False}).encode()
    session.handle_message(T.response("m", "me", "q3"), token, now=100.0)
    assert [len(session.resend_unanswered(now)) for now in (170.0, 180.0)] == [0, 1]


def test_of_several_groups_one_that_goes_gives_its_requests_back_and_one_without_a_plan_passes_them_on(session):
    def say(group, state="online", boot=1, active=None, now=1.0):
        payload = msgpack.packb(a_record(boot=1, active=active))
        session.handle_message(T.plan("m", group), payload, now)
        return session.handle_message(T.planner_status(group), encode_status(Status(state, boot)), now)

    def taken(request, group):
        payload = json.dumps({"id": request, "accepted_by": group, "final": False}).encode()
        assert session.handle_message(T.response("m", "me", request), payload, 0.5) == []

    asked = session.add_request("m", "q1", {}, "token", 0.0)
    assert say("a") == [asked], "the first one: it may have been sent to nobody"
    assert say("b", active=A_PLAN) == [], "the others have it"
    assert session.models() == ["m"]
    assert session.record("m")["active"] == A_PLAN
    no_plan = reply(ok=False, error={"code": "no_plan", "message": "no device is online"})
    assert session.handle_message(*no_plan, 1.0) == [asked]
    ((_, error),) = session.handle_message(*no_plan, 1.0)
    assert isinstance(error, errors.PlanError), "both were asked"
    held, untaken = (session.add_request("m", name, {}, "token", 0.8) for name in ("q2", "q3"))
    taken("q2", "a")
    assert [type(event) for event in say("b", "offline")] == [module.CheckLater], "somebody may be about to take it"
    assert session.resend_unaccepted(2.0) == [untaken]
    assert session.resend_unaccepted(2.0) == []
    taken("q3", "a")
    assert say("b", "offline") == []
    assert say("a", boot=2, now=3.0) == [held, untaken], "a new one has forgotten them"
    ((_, answer),) = session.handle_message(*reply("q2"), 3.0)
    assert isinstance(answer, Answer)
    assert session.handle_message(*reply("q2"), 3.0) == [], "shown once, whatever else answers"
    session.handle_message(T.planner_status("a"), encode_status(Status("offline", 2)), 3.0)
    assert not session.planner_online
    assert session.record("m") is None


def test_arrays_and_numbers_of_numpy_are_plain_in_json(session):
    publication = session.add_request("m", "q1", {"ids": np.arange(3), "deadline_ms": np.float32(5)}, 1, 0.0)
    assert json.loads(publication.payload) == {"ids": [0, 1, 2], "deadline_ms": 5.0, "id": "q1"}


@pytest.mark.parametrize(
    ("model", "name", "body", "error"),
    [
        ("m", "q1", {"text": object()}, errors.RequestError),
        ("m", "q1", {"deadline_ms": float("nan")}, errors.RequestError),
        ("No Model", "q1", {}, errors.BadNameError),
        ("m", "a/b", {}, errors.BadNameError),
    ],
)
def test_what_cannot_be_asked_is_refused_here(session, model, name, body, error):
    with pytest.raises(error):
        session.add_request(model, name, body, 1, 0.0)
    assert session.to_resend(0.0) == []


def test_an_id_that_waits_is_for_the_same_request_alone(session):
    first = session.add_request("m", "q1", {"text": "hello"}, 1, 0.0)
    with pytest.raises(errors.IdInUseError):
        session.add_request("m", "q1", {"text": "other"}, 2, 0.0)
    assert session.add_request("m", "q1", {"text": "hello"}, 3, 0.0) == first
    session.forget("m", "q1", 1)
    session.forget("m", "q1", 3)
    session.add_request("m", "q1", {"text": "other"}, 4, 0.0)


def test_everybody_who_asks_the_same_under_one_id_is_told(session):
    def ask():
        for token, now in ((1, 0.0), (2, 0.5), (3, 0.5)):
            session.add_request("m", "q1", {"text": "hello"}, token, now)
        session.forget("m", "q1", 3)

    ask()
    part, answer = reply(final=False, index=0, token=7, text="a"), reply(result=1)
    assert [item.handle for item in session.handle_message(*part, now=1.0)] == [1, 2], (
        "who was cancelled takes nobody along"
    )
    ended = session.handle_message(*answer, now=1.0)
    assert [(item.handle, round(item.outcome.latency_ms)) for item in ended] == [(1, 1000), (2, 500)]
    ask()
    assert session.drop_refused([T.request("m", "me")]) == [1, 2]
    ask()
    assert session.abandon() == [1, 2]
    assert session.to_resend(0.0) == []


def test_records_count_while_their_planner_is_there(session):
    session.handle_message(*record("m", boot=1), now=0.0)
    assert session.models() == [], "no planner has said that it is there"
    session.handle_message(*status(boot=1), now=0.0)
    session.handle_message(*record("n", boot=1), now=0.0)
    assert session.models() == ["m", "n"]
    session.handle_message(*status(boot=2), now=0.0)
    assert session.record("m") is None, "left behind by the planner before"
    session.handle_message(*record("m", boot=2), now=0.0)
    assert session.models() == ["m"]
    session.handle_message(T.plan("m"), b"", 0.0)
    assert session.models() == []
    session.handle_message(T.planner_status(), b"", 0.0)
    assert not session.planner_online


def without(told, key):
    return {k: v for k, v in told.items() if k != key}


STEP = {"time": 1.0, "plan": "m 9.1", "from": "active", "to": "retiring", "cause": "lost"}
OLD = {
    "spec": without(a_record(), "spec"),
    "unused": a_record(unused=[]),
    "wire_error": a_record(active=without(A_PLAN, "wire_error")),
    "cause": a_record(story=[without(STEP, "cause")]),
    "message": a_record(error={"code": "no_plan"}),
}


@pytest.mark.parametrize("lacks", OLD)
def test_a_record_of_another_version_or_author_is_refused_with_the_own_version(session, lacks):
    session.handle_message(*status(boot=1), now=0.0)
    session.handle_message(T.plan("m"), msgpack.packb(OLD[lacks]), 0.0)
    assert (session.models(), session.unused()) == (["m"], {}), "it is served"
    with pytest.raises(errors.WireError) as refused:
        session.record("m")
    assert __version__ in str(refused.value)
    session.handle_message(*record("m", boot=1, unused={"a": "put aside"}), now=0.0)
    assert session.record("m") is not None
    assert session.unused() == {"a": "put aside"}


@pytest.mark.parametrize("lacks", ["result", "compute_ms", "plan", "devices"])
def test_an_answer_of_another_version_ends_its_request_with_the_reason(session, lacks):
    session.add_request("m", "q1", {}, "token", 0.0)
    answer = an_answer("q1")
    old = without({**answer, "plan": without(answer["plan"], lacks)}, lacks)
    ((_, outcome),) = session.handle_message(T.response("m", "me", "q1"), json.dumps(old).encode(), 1.0)
    assert isinstance(outcome, errors.WireError)
    assert __version__ in str(outcome)
    assert session.to_resend(0.0) == []


def test_devices_are_put_together_from_what_they_say(session):
    def device(name, *message):
        session.handle_message(*message, 0.0)
        return session.devices[name].to_dict(name)

    beat = messages.Heartbeat(3, 1, 0.25, 1 << 30, None, None, None, 1.0, 0)
    device("a", T.status("a"), encode_status(Status("online", 3)))
    told = device("a", T.caps("a"), messages.encode_caps(CAPS))
    assert (told["device"], told["status"], told["boot"], told["threads"]) == ("a", "online", 3, 2)
    assert told["heartbeat"] is None
    assert device("a", T.heartbeat("a"), messages.encode_heartbeat(beat))["heartbeat"]["cpu_other"] == 0.25
    assert device("a", T.status("a"), encode_status(Status("online", 4)))["heartbeat"] is None, "of an earlier start"
    starting = device("b", T.status("b"), encode_status(Status("starting", 2, "compiling kernels", 3, 23)))
    assert [starting[key] for key in ("doing", "done", "total")] == ["compiling kernels", 3, 23]
    assert status_text(starting) == "starting: compiling kernels 3 of 23"
    stopped = device("b", T.status("b"), encode_status(Status("offline", 2, reason="stopped")))
    assert (stopped["status"], stopped["reason"]) == ("offline", "stopped")


def test_a_device_whose_caps_cannot_be_read_is_listed_with_the_reason(session):
    session.handle_message(T.status("a"), encode_status(Status("online", 3)), 0.0)
    for caps, is_read in ((b'{"device": "a", "boot": 3, "threads": 1e400}', False), (messages.encode_caps(CAPS), True)):
        session.handle_message(T.caps("a"), caps, 0.0)
        told = session.devices["a"].to_dict("a")
        assert (told["status"], "caps_unread" in told, told.get("caps_boot") == 3) == ("online", not is_read, is_read)


def test_invented_devices_are_not_remembered_without_end(session, monkeypatch):
    monkeypatch.setattr(module, "MAX_DEVICES", 2)
    for name in ("a", "b", "c"):
        session.handle_message(T.status(name), encode_status(Status("online", 3)), 0.0)
    session.handle_message(T.status("a"), encode_status(Status("offline", 4)), 0.0)
    assert set(session.devices) == {"a", "b"}
    assert session.devices["a"].status == Status("offline", 4)
    assert session.counters["devices beyond"] == 1


@pytest.mark.parametrize(
    "spoilt", [{}, {"latency_ms": float("nan")}, {"model": "No Name"}, {"outcome": 3}, {"predicted_ms": "soon"}]
)
def test_the_sites_answers_are_remembered_and_what_is_no_answer_is_not(session, spoilt):
    good = {"time": 1e9, "model": "m", "outcome": "ok", "latency_ms": 5.0, "predicted_ms": None, "plan": "1.2"}
    for answers in ([good], [good, good | spoilt]):
        session.handle_message(T.event("answers"), json.dumps({"answers": answers}).encode(), 0.0)
    assert list(session.answers) == [good] * (1 if spoilt else 3)


TOPICS = [
    T.event("answers"),
    T.response("m", "me", "q1"),
    T.planner_status(),
    T.plan("m"),
    T.status("a"),
    T.caps("a"),
    T.heartbeat("a"),
]


NO_ANSWERS = st.sampled_from([b"{", b"[]", b'{"ok": false}', b'{"final": false, "index": 0}', b"[" * 100_000])


@given(st.lists(st.tuples(st.sampled_from([*TOPICS, "x/y"]), st.binary(max_size=60) | NO_ANSWERS), max_size=8))
def test_no_bytes_raise_or_end_a_request(arrivals):
    session = ClientSession("home", "me")
    session.add_request("m", "q1", {}, 1, 0.0)
    for topic, payload in arrivals:
        assert not any(isinstance(item, RequestEnded) for item in session.handle_message(topic, payload, 1.0))
    assert len(session.to_resend(0.0)) == 1
    assert isinstance(session.to_resend(0.0)[0], RequestPublish)


# -- answers ----------------------------------------------------------------------------------------------------------


def answer(result):
    return Answer({"id": "q", "model": "m", "ok": True, "result": result, "plan": {"id": "1.1"}, "tokens": 3}, 1.5)


def test_results_are_arrays_and_lists_in_the_form_of_the_request():
    one, two = answer({"embedding": [1.0, 2.0]}), answer({"results": [{"embedding": [1.0]}, {"embedding": [2.0]}]})
    assert (one.embedding.dtype, one.embedding.tolist()) == (np.float32, [1.0, 2.0])
    assert two.embeddings.tolist() == [[1.0], [2.0]]
    assert (one.id, one.model, one.plan, one.tokens, one.latency_ms) == ("q", "m", {"id": "1.1"}, 3, 1.5)
    entry, values = {"label": "cat", "score": 0.9}, np.arange(6, dtype="<f4").reshape(3, 2)
    assert answer({"labels": [entry]}).labels == [entry]
    assert answer({"results": [{"labels": [entry]}]}).labels == [[entry]]
    assert answer({"masks": [{"position": 1}]}).masks == [{"position": 1}]
    hidden = {"dtype": "f32", "shape": [3, 2], "base64": base64.b64encode(values.tobytes()).decode()}
    np.testing.assert_array_equal(answer(hidden).hidden, values)


@pytest.mark.parametrize(
    ("result", "what"),
    [
        ({"results": [{"embedding": [1.0]}, {"embedding": [2.0]}]}, "embedding"),
        ({"labels": []}, "embeddings"),
        ({"embedding": []}, "hidden"),
        *((None, what) for what in ("embedding", "labels", "masks", "hidden")),
    ],
)
def test_a_result_that_an_answer_does_not_have_is_an_error(result, what):
    with pytest.raises(errors.RequestError):
        getattr(answer(result), what)


def tree(cls):
    return [cls, *(d for child in cls.__subclasses__() for d in tree(child))]


@pytest.mark.parametrize("cls", [c for c in tree(errors.HeptiError) if c.__module__ == errors.__name__])
def test_every_error_comes_back_as_its_own_class(cls):
    error = error_from({"ok": False, "error": {"code": cls.code, "message": "why"}})
    assert type(error) is cls
    assert str(error) == "why"


@pytest.mark.parametrize("nonsense", [{}, {"error": "x"}, {"error": {"code": "failed"}}], ids=str)
def test_an_error_that_is_none_is_a_wire_error(nonsense):
    with pytest.raises(errors.WireError):
        error_from(nonsense)


# -- answers in parts: each token once and in order, and from the first where a text begins again ---------------------


def part(index, token, attempt=0):
    return {"index": index, "token": token, "text": str(token)} | ({"attempt": attempt} if attempt else {})


@pytest.mark.parametrize(
    ("parts", "ids", "shown"),
    [
        ([part(0, 5), part(1, 6)], [5, 6], [(0, 5), (1, 6)]),
        ([part(0, 5), part(0, 5), part(1, 6)], [5, 6], [(0, 5), (1, 6)]),  # one came twice
        ([part(0, 5), part(2, 7)], [5, 6, 7], [(0, 5), (1, 6), (2, 7)]),  # one was lost
        ([part(0, 5), part(0, 8, 1), part(1, 6), part(1, 9, 1)], [8, 9], [(0, 5), (0, 8), (1, 9)]),  # tried again
        ([part(0, 5), part(0, 8, 1)], [5], [(0, 5), (0, 8), (0, 5)]),  # and the first text was the better one
        ([], [5, 6], [(0, 5), (1, 6)]),
    ],
)
def test_each_token_is_shown_once(parts, ids, shown):
    stream = AnswerStream(lambda _: None)
    found = [one for each in parts for one in stream.take(each)]
    stream.set_result(SimpleNamespace(result={"ids": ids}))
    assert [(one["index"], one["token"]) for one in found + stream.rest()] == shown


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def picture():
    return Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))


def pixels(encoded):
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as opened:
        return np.asarray(opened.convert("RGB"))


def test_a_picture_in_any_form_is_the_same_picture(picture, tmp_path):
    file = tmp_path / "p.png"
    picture.save(file)
    data = file.read_bytes()
    forms = [picture, file, str(file), data, base64.b64encode(data).decode()]
    for form in forms:
        np.testing.assert_array_equal(pixels(encode_picture(form)), np.asarray(picture))


def test_base64_that_would_be_too_long_a_name_is_no_file_and_a_file_that_is_not_there_is_named(tmp_path):
    encoded = base64.b64encode(bytes(300)).decode()
    assert encode_picture(encoded) == encoded
    for missing in (tmp_path / "nothing.png", str(tmp_path / "nothing.png")):
        with pytest.raises(errors.RequestError):
            encode_picture(missing)


def test_a_body_has_only_what_was_given(picture):
    assert request_body(text="hello", want=None, devices=("a", "b"), options={"variant": "kv"}) == {
        "text": "hello",
        "devices": ["a", "b"],
        "options": {"variant": "kv"},
    }
    assert set(request_body(images=[picture, picture])) == {"images"}
    assert request_body(truncate=False) == {"truncate": False}
    assert request_body(audio=b"sound", language="en") == {"audio": "c291bmQ=", "language": "en"}
    with pytest.raises(errors.RequestError):
        request_body(audio="nothing.wav")


@pytest.mark.parametrize(("photographs", "kind"), [(False, "PNG"), (True, "JPEG")])
def test_random_pictures_are_noise_or_like_a_camera_s_and_seeded(photographs, kind):
    spec = spec_of_kind("vgg16")
    files = [base64.b64decode(random_input(spec, 1, seed, photographs)["image"]) for seed in (0, 0, 1)]
    assert files[0] == files[1] != files[2]
    picture = Image.open(io.BytesIO(files[0]))
    between = np.abs(np.diff(np.asarray(picture, np.float32), axis=1)).mean()  # of neighbours
    assert (picture.format, picture.size, bool(between < 20)) == (kind, (224, 224), photographs)


DAY = 86_400.0


@pytest.mark.parametrize(
    ("devices", "planner", "odd"),
    [
        ({}, {}, []),
        ({"a": 0.5, "b": -2.0}, {}, []),
        ({"a": 0.0, "b": 60 * DAY}, {"b": 60 * DAY}, ["b is 60 days ahead"]),
        ({"a": 0.0, "b": 0.0}, {"a": -40 * DAY, "b": -40 * DAY}, ["the planner is 40 days ahead"]),
        ({"a": 7200.0, "b": 7201.0}, {}, ["this machine is 2 hours behind"]),
        ({"a": -120.0}, None, ["a is 2 minutes behind"]),
        ({"a": None}, None, []),
    ],
)
def test_the_clock_that_differs_from_most_others_is_named(devices, planner, odd):
    now_s = 1e9
    found = [{"device": n, "heartbeat": s if s is None else {"clock_s": now_s + s}} for n, s in devices.items()]
    assert odd_clocks(found, planner, now_s) == [f"the clock of {text}" for text in odd]
