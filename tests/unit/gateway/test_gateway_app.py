"""The gateway's routes over a client whose answers a test gives; the real site is in tests/site."""

from __future__ import annotations

import base64
import functools
import json
import operator
import re
from typing import Any

import numpy as np
import pytest
from gateway_client import ROWS, Client, Described
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from hepti_mqtt.core.errors import DeadlineError, HeptiError, NetworkError, OverloadedError, PlanError, RequestError
from hepti_mqtt.gateway import bodies
from hepti_mqtt.gateway import site as site_module
from hepti_mqtt.gateway.app import OPERATIONS, create_app
from hepti_mqtt.gateway.operations import JSON
from hepti_mqtt.gateway.site import TEXTS, Site

ANSWERS = {(one.method, one.path): one.answers for one in OPERATIONS if one.path != "/predict" or one.reads == JSON}


def documented(answer: Any) -> None:
    """Check that an answer has the shape that the document says."""
    schemas = ANSWERS.get((answer.request.method, answer.url.path))
    if answer.status_code == 200 and schemas is not None:
        answer.read()
        kind = answer.headers["content-type"].partition(";")[0]
        TypeAdapter(schemas[kind]).validate_python(answer.json() if kind == JSON else answer.text)


def served(client: Client, *keys: str, model: str = "m") -> TestClient:
    http = TestClient(create_app(Site(client, 5.0, model), keys))
    http.event_hooks = {"response": [documented]}
    return http


def test_base64_holds_the_bits_of_the_floats_in_the_order_of_the_texts() -> None:
    client = Client()
    http = served(client)
    texts = [str(i) for i in range(150)]
    floats = http.post("/v1/embeddings", json={"model": "m", "input": texts}).json()
    packed = http.post("/v1/embeddings", json={"model": "m", "input": texts, "encoding_format": "base64"}).json()
    rows = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in packed["data"]]
    assert np.array_equal(rows, ROWS[:150])
    assert np.array_equal(np.array([entry["embedding"] for entry in floats["data"]], np.float32), ROWS[:150])
    assert floats["usage"] == {"prompt_tokens": 450, "total_tokens": 450}
    assert max(len(request["texts"]) for request in client.asked) == TEXTS


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "m", "input": [7]}, 400, "bad_request"),
        ({"model": "m", "input": "1", "dimensions": 6}, 400, "bad_request"),
        ({"model": "m", "input": "1", "encoding_format": "int8"}, 400, "bad_request"),
        ({"model": "m", "input": True}, 400, "bad_request"),
        ({"model": "m", "input": "\ud800"}, 400, "bad_request"),
        ({"model": "m", "input": "1", "dimensions": 2.5}, 400, "bad_request"),
        ({"model": "other", "input": "1"}, 404, "model_not_found"),
        ({"model": "m", "input": ["1"] * 2049}, 400, "bad_request"),
    ],
)
def test_what_is_not_understood_is_refused(body: dict[str, Any], status: int, code: str) -> None:
    client = Client()
    kind = {"Content-Type": "application/json"}
    answer = served(client).post("/v1/embeddings", content=json.dumps(body), headers=kind)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("error", "status", "later"),
    [
        (OverloadedError("full"), 429, True),
        (PlanError("no device"), 503, True),
        (NetworkError("away"), 503, True),
        (DeadlineError("late"), 504, False),
        (HeptiError("broken"), 502, False),
    ],
)
def test_the_planners_errors_have_a_status(error: HeptiError, status: int, later: bool) -> None:
    answer = served(Client(error)).post("/v1/embeddings", json={"model": "m", "input": "1"})
    assert answer.status_code == status
    assert ("retry-after" in answer.headers) is later
    assert (answer.headers.get("x-should-retry") == "false") is (status == 504), "it would begin the same work again"
    assert answer.json()["error"]["message"] == str(error)


@pytest.mark.parametrize(
    ("path", "authorization", "status"),
    [
        ("/v1/models", "", 401),
        ("/v1/models", "Bearer third", 401),
        ("/v1/models", "Basic second", 401),
        ("/v1/models", "Bearer second", 200),
        ("/metrics", "", 401),
        ("/health", "", 200),
    ],
)
def test_a_key_is_asked_for_everywhere_but_by_health_checks(path: str, authorization: str, status: int) -> None:
    answer = served(Client(), "first", "second").get(path, headers={"Authorization": authorization})
    assert answer.status_code == status


def parts() -> Any:
    yield from [b" " * 60] * 3


@pytest.mark.parametrize(
    ("method", "path", "body", "kind", "status"),
    [
        ("POST", "/v1/embeddings", b" " * 200, JSON, 413),
        ("POST", "/v1/embeddings", parts(), JSON, 413),
        ("POST", "/v1/embeddings", b"{'a'", JSON, 400),
        ("POST", "/v1/embeddings", b"[1]", JSON, 400),
        ("POST", "/v1/embeddings", b"input=1", "application/x-www-form-urlencoded", 415),
        ("GET", "/nothing", b"", JSON, 404),
        ("GET", "/v1/embeddings", b"", JSON, 405),
    ],
)
def test_bodies_are_bounded_and_typed(method, path, body, kind, status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 100)
    answer = served(Client()).request(method, path, content=body, headers={"content-type": kind})
    assert answer.status_code == status


def test_tei_normalises_where_it_says_so() -> None:
    http = served(Client())
    found = np.array(http.post("/embed", json={"inputs": ["1", "2"]}).json())
    assert np.allclose(np.linalg.norm(found, axis=1), 1)
    raw = np.array(http.post("/embed", json={"inputs": ["1"], "normalize": False}).json(), np.float32)
    assert np.array_equal(raw, ROWS[1:2])
    assert http.post("/embed", json={"inputs": "1", "truncation_direction": "Left"}).status_code == 400
    cut = http.post("/v1/embeddings", json={"model": "m", "input": "1", "dimensions": 3}).json()["data"][0]
    assert len(cut["embedding"]) == 3


def test_many_documents_are_ranked_as_one_list() -> None:
    client = Client()
    http = served(client, model="ranker")
    documents = [str(i * 37 % 100) for i in range(100)]
    body = {"model": "ranker", "query": "q", "documents": documents, "top_n": 3}
    found = http.post("/v1/rerank", json=body).json()
    assert [one["document"]["text"] for one in found["results"]] == ["99", "98", "97"]
    assert [documents[one["index"]] for one in found["results"]] == ["99", "98", "97"]
    assert [len(asked["documents"]) for asked in client.asked] == [TEXTS, 100 - TEXTS]
    objects = [{"text": text} for text in documents]
    again = http.post("/v1/rerank", json={**body, "documents": objects, "return_documents": False}).json()
    assert again["results"] == [{k: one[k] for k in ("index", "relevance_score")} for one in found["results"]]
    tei = http.post("/rerank", json={"query": "q", "texts": ["1", "3"], "return_text": True}).json()
    assert [one["text"] for one in tei] == ["3", "1"]
    assert tei[0]["score"] == pytest.approx(1 / (1 + np.exp(-3)))
    raw = http.post("/rerank", json={"query": "q", "texts": ["1", "3"], "raw_scores": True}).json()
    assert raw == [{"index": 1, "score": 3.0}, {"index": 0, "score": 1.0}]
    inputs = {"source_sentence": "q", "sentences": ["2", "5", "4"]}
    assert http.post("/similarity", json={"inputs": inputs}).json() == [2.0, 5.0, 4.0]
    for wrong in ({"query": 5, "documents": ["1"]}, {"documents": ["1"]}, {"query": "q"}, {**body, "top_n": 0}):
        assert http.post("/v1/rerank", json=wrong).status_code == 400


def test_labels_of_texts_and_of_pictures() -> None:
    client = Client()
    http = served(client)
    best = http.post("/v1/classify", json={"model": "labels", "input": ["1", "2"]}).json()["data"]
    assert [entry["label"] for entry in best] == ["a", "a"]
    assert http.post("/v1/classify", json={"model": "labels", "input": [{"image": "AAAA"}]}).status_code == 200
    assert client.asked[-1]["images"] == ["AAAA"]
    fetched = http.post("/v1/classify", json={"model": "labels", "input": [{"image": "https://example.org/a.png"}]})
    assert fetched.status_code == 400
    predicted = served(client, model="labels").post("/predict", json={"inputs": [["1"], ["2"]]})
    assert predicted.json() == [[{"label": "a", "score": 0.75}, {"label": "b", "score": 0.25}]] * 2
    tei = served(client, model="labels")
    assert tei.post("/predict", json={"inputs": ["1", "2"]}).json() == predicted.json()[0], "TEI's pair, not two texts"
    assert client.asked[-1]["pairs"] == [["1", "2"]]
    assert len(tei.post("/predict", json={"inputs": [["1", "2"], ["3", "4"]], "raw_scores": True}).json()) == 2
    assert len(tei.post("/predict", json={"inputs": [["1"], ["2", "3"]]}).json()) == 2
    for wrong in (["1", "2", "3"], [["1"], []], [[1, 2]], []):
        assert tei.post("/predict", json={"inputs": wrong}).status_code == 400


def test_a_document_describes_every_route_and_leads_nowhere_else() -> None:
    http = served(Client(), "key")
    described = http.get("/openapi.json").json()
    operations = [(path, method) for path, item in described["paths"].items() for method in item]
    routes = {(one.path, one.method.lower()) for one in OPERATIONS}
    assert routes == {*operations} - {(path, "get") for path in ("/metrics", "/events", "/openapi.json")}
    names = [item[method]["operationId"] for item in described["paths"].values() for method in item]
    assert len({*names}) == len(names)
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(described)):
        functools.reduce(operator.getitem, reference.split("/"), described)
    assert not re.search(r'"(ge|gt|le|lt)":', json.dumps(described)), "bounds in the words of JSON Schema"
    assert described["paths"]["/embed"]["post"]["security"]
    assert not described["paths"]["/health"]["get"]["security"]


# bytes that look like a form's own, and every byte that there is
RECORDING = b"ID3\r\n--x\r\n\r\n--" + bytes(range(256)) + b"\r\n\r"


@pytest.mark.parametrize(("route", "task"), [("transcriptions", "transcribe"), ("translations", "translate")])
def test_a_recording_arrives_whole_and_its_text_comes_back(route: str, task: str, monkeypatch) -> None:
    monkeypatch.setattr(site_module, "find_spec", lambda _: None)  # without the extra the planner reads it
    client = Client()
    fields, file = {"model": "m", "language": "en"}, {"file": ("a.wav", RECORDING, "audio/wav")}
    assert served(client).post(f"/v1/audio/{route}", data=fields, files=file).json() == {"text": "Light on."}
    asked = client.asked[-1]
    assert (asked["audio"], asked["task"], asked["language"]) == (RECORDING, task, "en")


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"", 400),
        ("multipart/form-data; boundary=x", b"", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nno name\r\n--x--", 400),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm', 400),
        ("multipart/form-data; boundary=x", b"--x\r\n" * 100 + b"--x--", 400),
    ],
)
def test_what_is_no_form_is_refused(kind: str, body: bytes, status: int) -> None:
    answer = served(Client()).post("/v1/audio/transcriptions", content=body, headers={"Content-Type": kind})
    assert answer.status_code == status


def test_the_dashboard_is_seen_without_a_key_but_asks_nothing_without_one() -> None:
    client = Client()
    http = served(client, "key")
    for path in ("/", "/page.css", "/page.js"):
        answer = http.get(path)
        policy = answer.headers["content-security-policy"]
        assert (answer.status_code, "unsafe" in policy) == (200, False)
        assert "default-src 'none'" in policy
    assert http.post("/infer", json={"model": "m", "text": "1"}).status_code == 401
    assert client.asked == []


@pytest.mark.parametrize(("keys", "message"), [((), "a 'secret'"), (("key",), "")])
def test_errors_of_the_last_hour_quote_no_request_to_who_has_no_key(keys: tuple[str, ...], message: str) -> None:
    site, ending = Site(Client(RequestError("a 'secret'")), 5.0, "m"), iter([True, False])
    http = TestClient(create_app(site, keys, lambda: next(ending, True)))  # ends when one event is sent
    next(ending)
    authorized = {"Authorization": "Bearer key"}
    assert http.post("/infer", json={"model": "m", "text": "1"}, headers=authorized).status_code == 400
    events = http.get("/events")
    assert events.headers["content-type"].startswith("text/event-stream")
    seen = json.loads(events.text.removeprefix("data: "))
    assert [(e["code"], e["message"]) for e in seen["errors"]] == [("bad_request", message)]
    assert (seen["waiting"], seen["site"], seen["trouble"]) == ({}, "home", "no planner")
    assert seen["locked"] is bool(keys)


@pytest.mark.parametrize(
    "body", [{}, {"text": "1", "image": "aa"}, {"text": 1}, {"image": "https://x/y.png"}, {"text": "1", "more": 1}]
)
def test_a_request_of_the_page_is_one_text_or_one_picture(body: dict[str, Any]) -> None:
    assert served(Client()).post("/infer", json={"model": "m", **body}).status_code == 400


KEYS = (
    *("model", "input", "inputs", "encoding_format", "dimensions", "query", "documents", "texts", "top_n", "top_k"),
    *("truncate", "normalize", "raw_scores", "truncation_direction", "prompt_name", "text", "image", "other"),
)
WORDS = st.sampled_from(["m", "labels", "ranker", "1", "", "Right", "base64", "https://x"]) | st.text(max_size=4)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
)
POSTS = sorted(one.path for one in OPERATIONS if one.method == "POST" and one.reads == JSON)


@pytest.fixture(scope="module")
def refusing() -> TestClient:
    return served(Described(RequestError("no")))


@settings(max_examples=60, deadline=None)
@given(path=st.sampled_from(POSTS), body=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_no_body_makes_the_gateway_fail(refusing: TestClient, path: str, body: dict[str, Any]) -> None:
    answer = refusing.post(path, content=json.dumps(body), headers={"Content-Type": JSON})
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error if path.startswith("/api/") else error["message"]
