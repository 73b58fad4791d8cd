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

from hepti_mqtt.errors import DeadlineError, HeptiError, NetworkError, OverloadedError, PlanError, RequestError
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
        ({"model": "m", "input": [[1, 2]]}, 400, "bad_request"),
        ({"model": "m", "input": [7]}, 400, "bad_request"),
        ({"model": "m", "input": []}, 400, "bad_request"),
        ({"model": "m", "input": "1", "dimensions": 6}, 400, "bad_request"),
        ({"model": "m", "input": "1", "encoding_format": "int8"}, 400, "bad_request"),
        ({"model": "m", "input": "1", "unheard_of": 1}, 400, "bad_request"),
        ({"model": "m", "input": True}, 400, "bad_request"),
        ({"model": "m", "input": "\ud800"}, 400, "bad_request"),
        ({"model": "m", "input": "1", "dimensions": 2.5}, 400, "bad_request"),
        ({"model": "m"}, 400, "bad_request"),
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


def test_a_key_is_asked_for_everywhere_but_by_health_checks() -> None:
    http = served(Client(), "first", "second")
    assert http.get("/v1/models").status_code == 401
    assert http.get("/v1/models", headers={"Authorization": "Bearer third"}).status_code == 401
    assert http.get("/v1/models", headers={"Authorization": "Basic second"}).status_code == 401
    assert http.get("/metrics").status_code == 401
    assert http.get("/v1/models", headers={"Authorization": "Bearer second"}).status_code == 200
    assert http.get("/health").status_code == 200


def test_bodies_are_bounded_and_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 100)
    http = served(Client())

    def parts() -> Any:
        yield from [b" " * 60] * 3

    assert http.post("/v1/embeddings", json={"model": "m", "input": "1" * 200}).status_code == 413
    json_type = {"content-type": "application/json"}
    assert http.post("/v1/embeddings", content=parts(), headers=json_type).status_code == 413
    assert http.post("/v1/embeddings", content=b"{'a'", headers=json_type).status_code == 400
    assert http.post("/v1/embeddings", content=b"[1]", headers=json_type).status_code == 400
    assert http.post("/v1/embeddings", data={"input": "1"}).status_code == 415
    assert http.get("/nothing").status_code == 404
    assert http.get("/v1/embeddings").status_code == 405


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


@pytest.mark.parametrize(("body", "status"), [({}, 400), ({"text": "a", "image": "eA=="}, 400), ({"text": "a"}, 200)])
def test_the_document_allows_the_bodies_that_infer_answers(body: dict[str, str], status: int) -> None:
    http = served(Client())
    choices = http.get("/openapi.json").json()["components"]["schemas"]["InferBody"]["oneOf"]
    allowed = [all(isinstance(body.get(key), str) for key in choice["required"]) for choice in choices]
    assert (http.post("/infer", json=body).status_code, allowed.count(True) == 1) == (status, status == 200)


def test_all_states_of_each_text() -> None:
    found = served(Client()).post("/embed_all", json={"inputs": ["a text", "another"]}).json()
    assert np.array_equal(np.array(found[1], np.float32), ROWS[: len(found[1])])
    assert len(found) == 2


def test_ollama_takes_its_own_tag_and_says_durations() -> None:
    http = served(Described())
    found = http.post("/api/embed", json={"model": "m:latest", "input": "4"}).json()
    assert np.array_equal(np.array(found["embeddings"], np.float32), ROWS[4:5])
    assert (found["prompt_eval_count"], found["total_duration"] > 0) == (3, True)
    assert [entry["name"] for entry in http.get("/api/tags").json()["models"]] == [
        f"{name}:latest" for name in ("m", "labels", "ranker", "any")
    ]


def test_metrics_count_by_route_and_status() -> None:
    http = served(Client())
    http.post("/v1/embeddings", json={"model": "m", "input": "1"})
    http.post("/v1/embeddings", json={"model": "x", "input": "1"})
    lines = http.get("/metrics").text.splitlines()
    assert 'hepti_gateway_requests_total{route="/v1/embeddings",status="200"} 1.0' in lines
    assert 'hepti_gateway_requests_total{route="/v1/embeddings",status="404"} 1.0' in lines


# bytes that look like a form's own, and every byte that there is
RECORDING = b"ID3\r\n--x\r\n\r\n--" + bytes(range(256)) + b"\r\n\r"


@pytest.mark.parametrize("route", ["transcriptions", "translations"])
def test_a_recording_arrives_whole_and_its_text_comes_back(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "find_spec", lambda _: None)  # without the extra the planner reads it
    client = Client()
    http = served(client)
    fields, file = {"model": "m"}, {"file": ("a.wav", RECORDING, "audio/wav")}
    task = {"transcriptions": "transcribe", "translations": "translate"}[route]
    assert http.post(f"/v1/audio/{route}", data=fields, files=file).json() == {"text": "Light on."}
    assert (client.asked[-1]["audio"], client.asked[-1]["task"]) == (RECORDING, task)
    text = http.post(f"/v1/audio/{route}", data={**fields, "response_format": "text", "language": "en"}, files=file)
    assert text.text == "Light on.\n"
    assert client.asked[-1]["language"] == "en"
    more = {"response_format": "verbose_json", "temperature": "0", "prompt": "", "timestamp_granularities[]": "segment"}
    whole = http.post(f"/v1/audio/{route}", data={**fields, **more}, files=file).json()
    assert (whole["task"], whole["duration"], whole["segments"][0]["text"]) == (task, 1.5, "Light on.")


@pytest.mark.parametrize(
    ("fields", "files", "status"),
    [
        ({"model": "m"}, {"other": ("a", b"x")}, 400),
        ({"model": "m", "response_format": "docx"}, {"file": ("a", b"x")}, 400),
        ({"model": "m", "temperature": "hot"}, {"file": ("a", b"x")}, 400),
        ({"model": "m", "stream": "true"}, {"file": ("a", b"x")}, 400),
        ({"model": "m", "timestamp_granularities[]": "word"}, {"file": ("a", b"x")}, 400),
        ({"model": "nobody"}, {"file": ("a", b"x")}, 404),
    ],
)
def test_a_form_that_is_not_understood_is_refused(fields, files, status) -> None:
    client = Client()
    answer = served(client).post("/v1/audio/transcriptions", data=fields, files=files)
    assert (answer.status_code, client.asked) == (status, [])


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


def seen_by(client: Client, *keys: str) -> dict[str, Any]:
    """Return the first event of the dashboard, of a process that ends once it is sent."""
    ending = iter([False])
    app = create_app(Site(client, 5.0, "m"), keys, lambda: next(ending, True))
    answer = TestClient(app).get("/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    return dict(json.loads(answer.text.removeprefix("data: ")))


def test_the_dashboard_is_seen_without_a_key_but_asks_nothing_without_one() -> None:
    client = Client(RequestError("it says 'secret'"))
    http = served(client, "key")
    for path in ("/", "/page.css", "/page.js"):
        answer = http.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    assert http.post("/infer", json={"model": "m", "text": "1"}).status_code == 401
    assert client.asked == []
    seen = seen_by(client, "key")
    assert (seen["locked"], seen["site"], seen["trouble"]) == (True, "home", "no planner")


@pytest.mark.parametrize(("keys", "message"), [((), "a 'secret'"), (("key",), "")])
def test_errors_of_the_last_hour_quote_no_request_to_who_has_no_key(keys: tuple[str, ...], message: str) -> None:
    client = Client(RequestError("a 'secret'"))
    site, ending = Site(client, 5.0, "m"), iter([True, False])
    http = TestClient(create_app(site, keys, lambda: next(ending, True)))
    next(ending)
    authorized = {"Authorization": "Bearer key"}
    assert http.post("/infer", json={"model": "m", "text": "1"}, headers=authorized).status_code == 400
    seen = json.loads(http.get("/events").text.removeprefix("data: "))
    assert [(e["code"], e["message"]) for e in seen["errors"]] == [("bad_request", message)]
    assert seen["waiting"] == {}


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


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(POSTS), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_no_body_makes_the_gateway_fail(path: str, body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    answer = served(Described(RequestError("no"))).post(path, content=json.dumps(body), headers=headers)
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error if path.startswith("/api/") else error["message"]
