"""The gateway's routes over a client whose answers a test gives; the real site is in tests/site."""

import base64
import functools
import json
import operator
import re

import numpy as np
import pytest
from gateway_client import EMBED, ROWS, Client, Described, http_of, post
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from hepti_mqtt.core.errors import DeadlineError, HeptiError, NetworkError, OverloadedError, PlanError, RequestError
from hepti_mqtt.gateway import bodies
from hepti_mqtt.gateway import site as site_module
from hepti_mqtt.gateway.app import OPERATIONS, create_app
from hepti_mqtt.gateway.operations import JSON
from hepti_mqtt.gateway.site import TEXTS, Site

FORM = "multipart/form-data; boundary=x"


def test_base64_holds_the_bits_of_the_floats_in_the_order_of_the_texts():
    client = Client()
    http = http_of(client)
    texts = [str(i) for i in range(150)]
    floats = http.post(EMBED, json={"model": "m", "input": texts}).json()
    packed = http.post(EMBED, json={"model": "m", "input": texts, "encoding_format": "base64"}).json()
    rows = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in packed["data"]]
    assert np.array_equal(rows, ROWS[:150])
    assert np.array_equal(np.array([entry["embedding"] for entry in floats["data"]], np.float32), ROWS[:150])
    assert floats["usage"] == {"prompt_tokens": 450, "total_tokens": 450}
    assert max(len(request["texts"]) for request in client.asked) == TEXTS


@pytest.mark.parametrize(
    ("error", "status", "later"),
    [
        (RequestError("no"), 400, False),
        (OverloadedError("full"), 429, True),
        (PlanError("no device"), 503, True),
        (NetworkError("away"), 503, True),
        (DeadlineError("late"), 504, False),
        (HeptiError("broken"), 502, False),
    ],
)
def test_the_planners_errors_have_a_status(error, status, later):
    answer = http_of(Client(error)).post(EMBED, json={"model": "m", "input": "1"})
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
def test_a_key_is_asked_for_everywhere_but_by_health_checks(path, authorization, status):
    answer = http_of(Client(), ["first", "second"]).get(path, headers={"Authorization": authorization})
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("route", "body", "kind", "status"),
    [
        (f"POST {EMBED}", b" " * 2000, JSON, 413),
        (f"POST {EMBED}", iter([b" " * 600] * 3), JSON, 413),
        (f"POST {EMBED}", b"{'a'", JSON, 400),
        (f"POST {EMBED}", b"[1]", JSON, 400),
        (f"POST {EMBED}", b"input=1", "application/x-www-form-urlencoded", 415),
        ("GET /nothing", b"", JSON, 404),
        (f"GET {EMBED}", b"", JSON, 405),
        ("POST /v1/audio/transcriptions", b"{}", JSON, 415),
        *(
            ("POST /v1/audio/transcriptions", body, kind, 400)
            for body, kind in (
                *((b"", kind) for kind in ("multipart/form-data", FORM)),
                (b"--x\r\n\r\nno name\r\n--x--", FORM),
                (b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm', FORM),
                (b"--x\r\n" * 100 + b"--x--", FORM),
            )
        ),
    ],
)
def test_bodies_are_bounded_and_typed(route, body, kind, status, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 1000)
    answer = http_of(Client()).request(*route.split(), content=body, headers={"content-type": kind})
    assert answer.status_code == status


RANKING = {"model": "ranker", "query": "q", "documents": ["1"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("/v1/rerank", {**RANKING, **wrong}) for wrong in ({"query": 5}, {"query": None}, {"documents": None})),
        ("/v1/rerank", {**RANKING, "top_n": 0}),
        ("/v1/classify", {"model": "labels", "input": [{"image": "https://example.org/a.png"}]}),
        *(("/predict", {"model": None, "inputs": wrong}) for wrong in (["1"] * 3, [["1"], []], [[1, 2]], [])),
        *(("/infer", body) for body in ({}, {"text": "1", "image": "aa"}, {"text": 1}, {"text": "1", "more": 1})),
        ("/infer", {"image": "https://x/y.png"}),
        (EMBED, {"input": "\ud800"}),
        ("/embed", {"inputs": "1", "truncation_direction": "Left"}),
    ],
)
def test_what_is_not_understood_is_refused(path, body):
    assert post(path, Client(), **body).status_code == 400


def test_tei_normalises_where_it_says_so():
    http = http_of(Client())
    found = np.array(http.post("/embed", json={"inputs": ["1", "2"]}).json())
    assert np.allclose(np.linalg.norm(found, axis=1), 1)
    raw = np.array(http.post("/embed", json={"inputs": ["1"], "normalize": False}).json(), np.float32)
    assert np.array_equal(raw, ROWS[1:2])
    cut = http.post(EMBED, json={"model": "m", "input": "1", "dimensions": 3}).json()["data"][0]
    assert len(cut["embedding"]) == 3


def test_many_documents_are_ranked_as_one_list():
    client = Client()
    http = http_of(client, model="ranker")
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


def test_labels_of_texts_and_of_pictures():
    client = Client()
    http = http_of(client)
    best = http.post("/v1/classify", json={"model": "labels", "input": ["1", "2"]}).json()["data"]
    assert [entry["label"] for entry in best] == ["a", "a"]
    assert http.post("/v1/classify", json={"model": "labels", "input": [{"image": "AAAA"}]}).status_code == 200
    assert client.asked[-1]["images"] == ["AAAA"]
    predicted = http_of(client, model="labels").post("/predict", json={"inputs": [["1"], ["2"]]})
    assert predicted.json() == [[{"label": "a", "score": 0.75}, {"label": "b", "score": 0.25}]] * 2
    tei = http_of(client, model="labels")
    assert tei.post("/predict", json={"inputs": ["1", "2"]}).json() == predicted.json()[0], "TEI's pair, not two texts"
    assert client.asked[-1]["pairs"] == [["1", "2"]]
    assert len(tei.post("/predict", json={"inputs": [["1", "2"], ["3", "4"]], "raw_scores": True}).json()) == 2
    assert len(tei.post("/predict", json={"inputs": [["1"], ["2", "3"]]}).json()) == 2


def test_a_document_describes_every_route_and_leads_nowhere_else():
    http = http_of(Client(), ["key"])
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


def test_a_document_has_the_bounds_of_lists_and_what_tools_and_top_logprobs_need():
    described = http_of(Client()).get("/openapi.json").json()

    def body_of(path):
        schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return described["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    for path, key, most in (("/v1/completions", "prompt", 64), ("/v1/embeddings", "input", 2048)):
        schema = body_of(path)["properties"][key]
        assert (schema["minItems"], schema["maxItems"], schema["items"]) == (1, most, {"type": "string"})
    tool = body_of("/v1/chat/completions")["properties"]["tools"]["anyOf"][0]["items"]
    assert (tool["required"], tool["properties"]["function"]["required"]) == (["function"], ["name"])
    with_logprobs, without = body_of("/v1/chat/completions")["anyOf"]
    assert with_logprobs == {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}}
    assert without == {"properties": {"top_logprobs": {"enum": [None, 0]}}}


# bytes that look like a form's own, and every byte that there is
RECORDING = b"ID3\r\n--x\r\n\r\n--" + bytes(range(256)) + b"\r\n\r"


@pytest.mark.parametrize(("route", "task"), [("transcriptions", "transcribe"), ("translations", "translate")])
def test_a_recording_arrives_whole_and_its_text_comes_back(route, task, monkeypatch):
    monkeypatch.setattr(site_module, "find_spec", lambda _: None)  # without the extra the planner reads it
    client = Client()
    fields, file = {"model": "m", "language": "en"}, {"file": ("a.wav", RECORDING, "audio/wav")}
    assert http_of(client).post(f"/v1/audio/{route}", data=fields, files=file).json() == {"text": "Light on."}
    asked = client.asked[-1]
    assert (asked["audio"], asked["task"], asked["language"]) == (RECORDING, task, "en")


def test_the_dashboard_is_seen_without_a_key_but_asks_nothing_without_one():
    client = Client()
    http = http_of(client, ["key"])
    for path in ("/", "/page.css", "/page.js"):
        answer = http.get(path)
        policy = answer.headers["content-security-policy"]
        assert (answer.status_code, "unsafe" in policy) == (200, False)
        assert "default-src 'none'" in policy
    assert http.post("/infer", json={"model": "m", "text": "1"}).status_code == 401
    assert client.asked == []


@pytest.mark.parametrize(("keys", "message"), [((), "a 'secret'"), (("key",), "")])
def test_errors_of_the_last_hour_quote_no_request_to_who_has_no_key(keys, message):
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
def refusing():
    return http_of(Described(RequestError("no")))


@settings(max_examples=60, deadline=None)
@given(path=st.sampled_from(POSTS), body=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_no_body_makes_the_gateway_fail(refusing, path, body):
    answer = refusing.post(path, content=json.dumps(body), headers={"Content-Type": JSON})
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error if path.startswith("/api/") else error["message"]
