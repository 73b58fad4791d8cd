"""What real clients send, row by row, and what they get: accepted, refused by their own key, or in another shape."""

import gzip
import json
from concurrent.futures import Future

import pytest
from gateway_client import (
    CALL,
    CHAT,
    EMBED,
    GENERATE,
    HELLO,
    OLLAMA,
    RESPONSES,
    TEXT,
    TOOL,
    Described,
    Writer,
    events,
    http_of,
    post,
)

from hepti_mqtt.client import Answer
from hepti_mqtt.core.errors import ContextLengthError, RequestError

CALLED = [
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {
        "name": "open", "arguments": '{"door": 1}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": '{"success": true}'},
]  # fmt: skip

ACCEPTED = [
    *((CHAT, {key: None}, {}) for key in ("temperature", "tools", "seed", "stop", "audio", "prediction", "verbosity")),
    *((CHAT, {key: []}, {}) for key in ("tools", "stop", "functions")),
    (CHAT, {"n": 1, "store": False, "service_tier": "auto", "parallel_tool_calls": True, "modalities": ["text"]}, {}),
    (CHAT, {"logprobs": False, "top_logprobs": 0, "reasoning_effort": None, "logit_bias": {}}, {}),
    (CHAT, {"logprobs": True, "top_logprobs": 2.0}, {"logprobs": 2}),
    (CHAT, {"seed": -1}, {"seed": 2**32 - 1}),
    (CHAT, {"seed": 2**63 + 5}, {"seed": 5}),
    (CHAT, {"max_tokens": 128_000}, {"max_new_tokens": 128_000, "fit": True}),
    (CHAT, {"max_completion_tokens": 3000.0}, {"max_new_tokens": 3000}),
    (CHAT, {"max_tokens": -1}, {}),
    (CHAT, {"reasoning_effort": "none"}, {"thinking": False}),
    (CHAT, {"reasoning_effort": "low"}, {"thinking": True}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, {"thinking": False}),
    (CHAT, {"top_k": -1}, {}),
    (CHAT, {"messages": [*HELLO, *CALLED], "tools": [TOOL], "user": "01J", "max_tokens": 3000, "top_p": 1.0},
     {"messages": [*HELLO, *CALLED], "tools": [TOOL], "max_new_tokens": 3000, "top_p": 1.0}),
    (CHAT, {"tools": [TOOL], "tool_choice": "none"}, {}),
    (TEXT, {"echo": False, "suffix": None, "best_of": 1, "n": 1, "logprobs": None}, {"text": "hello"}),
    (TEXT, {"prompt": ["text"]}, {"text": "text"}),
    (EMBED, {"input_type": "search_query"}, {"prompt": "query"}),
    (EMBED, {"prompt_name": "passage"}, {"prompt": "passage"}),
    (EMBED, {"input_type": ["passage"]}, {"prompt": ["passage"]}),  # which the planner refuses
    (GENERATE, {"images": [], "suffix": "", "context": [], "template": "", "system": ""}, {"messages": HELLO}),
    (GENERATE, {"raw": True}, {"text": "hello", "fit": True}),
    (OLLAMA, {"think": False}, {"thinking": False}),
    (OLLAMA, {"think": "low"}, {"thinking": True}),
    (OLLAMA, {"think": None, "format": "", "keep_alive": "5m", "tools": None}, {}),
    (OLLAMA, {"messages": [{**HELLO[0], "images": [], "thinking": ""}]}, {"messages": HELLO}),
    (OLLAMA, {"options": {"top_k": 0, "seed": -1, "mirostat": 0, "tfs_z": 1, "typical_p": 1.0}}, {"seed": 2**32 - 1}),
    (OLLAMA, {"options": dict.fromkeys(
        ("num_ctx", "use_mlock", "use_mmap", "numa", "num_thread", "num_gpu", "main_gpu", "low_vram", "f16_kv",
         "vocab_only", "num_batch", "num_keep"), 1)}, {}),
    (OLLAMA, {"options": {"num_predict": 32_000, "repeat_penalty": 1.1}},
     {"max_new_tokens": 32_000, "repetition_penalty": 1.1, "fit": True}),
    (OLLAMA, {"options": {"num_predict": -2}}, {}),
    (RESPONSES, {"max_output_tokens": 7, "store": False, "truncation": "disabled"}, {"max_new_tokens": 7}),
]  # fmt: skip
SENT = {"deadline_ms", "fit", "messages", "text", "texts", "tools", "truncate"}


@pytest.mark.parametrize(("path", "body", "sent"), ACCEPTED, ids=str)
def test_what_is_accepted_reaches_the_planner(path, body, sent):
    planner = Writer()
    answer = post(path, planner, **body)
    assert answer.status_code == 200, answer.text
    asked = {key: value for key, value in planner.asked[-1].items() if value is not None and key != "model"}
    assert {key: asked.get(key) for key in sent} == sent
    assert asked.keys() - SENT <= sent.keys() | {"max_new_tokens"}


#: A path, the keys added to its body, and the key that the refusal names; Ollama's clients read a text.
REFUSED = [
    (GENERATE, {"images": "aGVsbG8="}, ""),
    (OLLAMA, {"messages": [{**HELLO[0], "images": "aGVsbG8="}]}, ""),
    (GENERATE, {"suffix": "x"}, ""),
    (GENERATE, {"context": [1]}, ""),
    (GENERATE, {"think": "much"}, ""),
    *(
        (OLLAMA, {"options": {key: value}}, "")
        for key, value in (("mirostat", 1), ("tfs_z", 0.5), ("repeat_last_n", 5))
    ),
    (OLLAMA, {"format": "xml"}, ""),
    (OLLAMA, {"foo": 1}, ""),
    *((CHAT, {"response_format": value}, "response_format") for value in ({"type": "xml"}, "json")),
    *((CHAT, {"tools": [TOOL], "tool_choice": value}, "tool_choice") for value in ("any", {"name": "open"})),
    *((CHAT, {"tools": [tool]}, "tools") for tool in ({}, {"function": {}}, {"function": {"name": 5}}, 5)),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": 3}, "logprobs"),
    (CHAT, {"stream": "yes"}, "stream"),
    (CHAT, {"messages": "x"}, "messages"),
    (CHAT, {"n": 2}, "n"),
    (CHAT, {"unheard_of": 1}, "unheard_of"),
    (CHAT, {"temperature": 3}, "temperature"),
    (CHAT, {"temperature": "1"}, "temperature"),
    *((path, {"temperature": [0.2, 0.4]}, "temperature") for path in (CHAT, TEXT, RESPONSES)),
    (OLLAMA, {"options": {"temperature": [0.2]}}, ""),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": "9"}, "max_tokens"),
    (CHAT, {"audio": {"voice": "x"}}, "audio"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"web_search_options": {"a": 1}}, "web_search_options"),
    (CHAT, {"chat_template_kwargs": {"other": 1}}, "other"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (TEXT, {"echo": True}, "echo"),
    (TEXT, {"best_of": 3}, "best_of"),
    (TEXT, {"suffix": "x"}, "suffix"),
    (TEXT, {"prompt": [1, 2]}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    *((EMBED, {"input": value}, "input") for value in (
        [], None, [{"text": "1"}], [[1]], [7], True, ["1"] * 2049,
    )),
    (EMBED, {"encoding_format": "int8"}, "encoding_format"),
    *((EMBED, {"dimensions": value}, "dimensions") for value in (0, 2.5)),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "1"}]}, "input"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), REFUSED, ids=str)
def test_what_would_change_the_answer_is_refused_by_its_key(path, body, param):
    planner = Writer()
    answer = post(path, planner, **body)
    assert (answer.status_code, planner.asked) == (400, [])
    error = answer.json()["error"]
    assert isinstance(error, str) if path.startswith("/api/") else error["param"] == param


def test_the_planners_refusal_names_the_clients_key():
    planner = Writer(error=RequestError("max_new_tokens must be an integer from 1 to 5", "max_new_tokens"))
    for path, key in ((CHAT, "max_completion_tokens"), (TEXT, "max_tokens"), (RESPONSES, "max_output_tokens")):
        error = post(path, planner, **{key: 9}).json()["error"]
        assert error["param"] == key
        assert error["message"].startswith(key)
    answer = post(CHAT, Writer(error=ContextLengthError("messages has 9 tokens", "messages")))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_one_choice_for_each_prompt():
    whole = post(TEXT, Writer(), prompt=["a", "b"]).json()
    assert [(one["index"], one["text"]) for one in whole["choices"]] == [(0, "well"), (1, "well")]
    assert whole["usage"]["prompt_tokens"] == 10
    texts = {0: "", 1: ""}
    for one in events(post(TEXT, Writer(), prompt=["a", "b"], stream=True)):
        texts[one["choices"][0]["index"]] += one["choices"][0]["text"]
    assert texts == {0: "well", 1: "well"}


def test_usage_and_models():
    http = http_of(Writer())
    assert post(CHAT, Writer()).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    *chunks, last = events(post(CHAT, Writer(), stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["usage"]["total_tokens"] == 7
    assert http.get("/v1/models/m").json()["id"] == "m"
    assert http.get("/v1/models/nobody").status_code == 404
    assert post(EMBED, Writer(), model="nobody").json()["error"]["code"] == "model_not_found"


def test_thoughts_are_apart_from_the_answer():
    planner = Writer("yes", thinking="hm")
    message = post(CHAT, planner).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    deltas = [event["choices"][0]["delta"] for event in events(post(CHAT, planner, stream=True))]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"
    assert post(OLLAMA, planner).json()["message"] == {"role": "assistant", "content": "yes", "thinking": "hm"}
    lines = events(post(OLLAMA, planner, stream=True))
    assert "".join(line["message"].get("thinking", "") for line in lines) == "hm"
    assert post(GENERATE, planner).json()["thinking"] == "hm"
    output = post(RESPONSES, planner).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert "reasoning_content" not in post(CHAT, Writer()).json()["choices"][0]["message"]


def test_a_response_and_its_events():
    tool = {"type": "function", **TOOL["function"]}
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "open"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "open", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
    ]
    planner = Writer(f"I do. {CALL}")
    body = {"input": turns, "instructions": "Be brief.", "tools": [tool]}
    whole = post(RESPONSES, planner, **body).json()
    assert [item["type"] for item in whole["output"]] == ["message", "function_call"]
    assert [one["role"] for one in planner.asked[-1]["messages"]] == ["system", "user", "assistant", "tool"]
    assert planner.asked[-1]["tools"] == [TOOL]
    parts = events(post(RESPONSES, planner, stream=True, **body))
    assert [one["sequence_number"] for one in parts] == list(range(len(parts)))
    shown = "".join(one["delta"] for one in parts if one["type"] == "response.output_text.delta")
    assert shown.strip() == "I do."
    assert parts[-1]["type"] == "response.completed"
    message, call = parts[-1]["response"]["output"]
    assert (message["type"], message["content"][0]["text"], call["type"]) == ("message", shown, "function_call")


def test_ollamas_own_client_finds_what_it_asks_for():
    http = http_of(Writer())
    assert tuple(map(int, http.get("/api/version").json()["version"].split("."))) >= (0, 6, 4)
    assert http.head("/").status_code == 200
    (listed, *_), running = http.get("/api/tags").json()["models"], http.get("/api/ps").json()["models"]
    assert {"digest", "modified_at", "size", "details"} <= listed.keys()
    assert running[0]["context_length"] == 2048
    shown = http.post("/api/show", json={"model": "m:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["llama.context_length"] == 2048
    assert len(http.post("/api/embeddings", json={"model": "m", "prompt": "4"}).json()["embedding"]) == 5
    vectors = http.post("/api/embed", json={"model": "m:latest", "input": "4"}).json()
    assert (len(vectors["embeddings"]), vectors["prompt_eval_count"], vectors["total_duration"] > 0) == (1, 3, True)
    assert [model["name"] for model in (listed, *_)] == [f"{name}:latest" for name in ("m", "labels", "ranker", "any")]
    for path, body in ((GENERATE, {"model": "m"}), (OLLAMA, {"model": "m", "messages": []})):
        for keep, reason in ((None, "load"), (-1, "load"), (0, "unload"), ("0s", "unload")):
            answer = http.post(path, json={**body, "keep_alive": keep}).json()
            assert (answer["done"], answer["done_reason"]) == (True, reason)
    final = post(GENERATE, Writer()).json()
    parts = [final[f"{part}_duration"] for part in ("total", "load", "prompt_eval", "eval")]
    assert all(isinstance(part, int) and part >= 0 for part in parts)
    assert http.post("/api/chat", content=b'{"model": "x"}').status_code == 404, "a body without a type is JSON"
    assert http.get("/api/nothing").json().keys() == {"error"}


def test_tei_hugging_face_cohere_and_jina():
    http = http_of(Described())
    ranker = http_of(Described(task="classification"), model="ranker")
    labels = http_of(Described(task="classification"), model="labels")
    vectors = http_of(Described(task="embedding"))
    assert len(vectors.post("/", json={"inputs": ["1", "2"]}).json()) == 2
    assert labels.post("/", json={"inputs": "1", "parameters": {"top_k": 1}}).json()[0]["label"] == "a"
    documents = {"query": "q", "documents": ["1", {"text": "3"}], "top_n": 9}
    jina = ranker.post("/rerank", json={**documents, "model": "ranker", "return_documents": True}).json()
    assert [one["document"] for one in jina["results"]] == [{"text": "3"}, {"text": "1"}]
    cohere = ranker.post("/v2/rerank", json={**documents, "model": "ranker", "max_tokens_per_doc": 4096}).json()
    assert [one.keys() for one in cohere["results"]] == [{"index", "relevance_score"}] * 2
    assert ranker.post("/v2/rerank", json={**documents, "max_tokens_per_doc": 7}).status_code == 400
    assert http.post("/embed", json={"inputs": "1", "dimensions": 2}).status_code == 200


def test_a_similarity_is_never_above_one(monkeypatch):
    """As by f32, if a text is compared with itself."""
    answer = Future()
    ranking = [{"index": 0, "score": 1.0000001}, {"index": 1, "score": 0.5}]
    answer.set_result(Answer({"result": {"ranking": ranking}, "tokens": 5}, 1.0))
    monkeypatch.setattr(Writer, "submit", lambda *_, **__: answer)
    body = {"inputs": {"source_sentence": "a", "sentences": ["a", "b"]}}
    assert http_of(Writer()).post("/similarity", json=body).json() == [1.0, 0.5]


def test_a_zipped_body_is_read_within_the_limit():
    http = http_of(Writer())
    head = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    body = json.dumps({"model": "m", "input": "1"}).encode()
    assert http.post(EMBED, content=gzip.compress(body), headers=head).status_code == 200
    assert http.post(EMBED, content=gzip.compress(body)[:-9], headers=head).status_code == 400
    assert http.post(EMBED, content=b"no gzip", headers=head).status_code == 400
    assert http.post(EMBED, content=gzip.compress(b" " * (40 << 20)), headers=head).status_code == 413
    assert http.post(EMBED, content=body, headers={**head, "Content-Encoding": "br"}).status_code == 415


PAGE = {"Origin": "https://chat.example"}


@pytest.mark.parametrize(
    ("headers", "options", "status"),
    [
        *(({"Host": host}, {}, 200) for host in ("192.168.1.7:8091", "[::1]:8091", "gateway", "hepti.local")),
        ({"Host": "attacker.example"}, {}, 403),
        ({"Host": "attacker.example"}, {"names": ["attacker.example"]}, 200),
        ({"Host": "attacker.example", "Authorization": "Bearer k"}, {"keys": ["k"]}, 200),
        ({"Origin": "http://localhost"}, {}, 200),
        (PAGE, {}, 403),
        (PAGE, {"origins": [PAGE["Origin"]]}, 200),
        ({"Origin": "null"}, {}, 403),
    ],
)
def test_a_gateway_without_keys_answers_no_foreign_page(headers, options, status):
    http = http_of(Writer(), **{"names": [], **options})
    assert http.get("/v1/models", headers=headers).status_code == status


def test_pages_of_a_named_origin_may_ask():
    http = http_of(Writer(), ["k"], origins=[PAGE["Origin"]])
    asked = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight, answer = (
        http.options(CHAT, headers=asked),
        http.get("/v1/models", headers={**PAGE, "Authorization": "Bearer k"}),
    )
    assert [one.status_code for one in (preflight, answer, http.get("/nothing/at/all"))] == [200, 200, 404]
    assert {one.headers["access-control-allow-origin"] for one in (preflight, answer)} == {PAGE["Origin"]}
