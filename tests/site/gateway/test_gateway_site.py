"""A real site behind a real gateway, asked by OpenAI's own client and by raw HTTP."""

from __future__ import annotations

import base64
import http.client
import io
import json
import urllib.request

import numpy as np
import pytest
from PIL import Image
from site_processes import PATIENCE_S, poll, running_site

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import RequestError

TEMPLATE = "{% for one in messages %}{{ one.role + ' ' + one.content + ' ' }}{% endfor %}the"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gateway")
    kinds = {"tiny": "tiny-convnet", "ranker": "tiny-bert-ranker", "talker": "tiny-llama"}
    served = {name: make_model(kind, directory / name, seed=3) for name, kind in kinds.items()}
    (served["talker"] / "chat_template.jinja").write_text(TEMPLATE)
    yield from running_site(directory, served, {"a": "100MiB"})


@pytest.fixture(scope="module")
def port(site):
    return site.serve("gateway")


def ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_labels_are_those_that_mqtt_gives(site, port):
    pixels = np.random.default_rng(1).integers(0, 256, (20, 30, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    picture = base64.b64encode(out.getvalue()).decode()
    status, raw = ask(port, "POST", "/v1/classify", {"model": "tiny", "input": [{"image": picture}]})
    assert status == 200, raw
    with Hepti.connect(site.url, site.name) as hepti:
        labels = hepti.infer("tiny", image=out.getvalue(), timeout_s=PATIENCE_S).labels
    assert json.loads(raw)["data"][0]["labels"] == labels


def test_a_ranking_is_the_one_that_mqtt_gives(site, port):
    documents = ["the door is cold", "a warm light in the room", "camera"]
    with Hepti.connect(site.url, site.name) as hepti:
        hepti.wait_ready("ranker", PATIENCE_S)
        ranking = hepti.infer("ranker", query="a warm room", documents=documents, timeout_s=PATIENCE_S).ranking
    body = {"model": "ranker", "query": "a warm room", "documents": documents}
    status, raw = ask(port, "POST", "/v1/rerank", body)
    assert status == 200, raw
    results = json.loads(raw)["results"]
    assert [{"index": one["index"], "score": one["relevance_score"]} for one in results] == ranking
    assert [one["document"]["text"] for one in results] == [documents[one["index"]] for one in ranking]


def test_a_conversation_is_the_text_that_mqtt_gives_whole_and_as_it_comes(site, port):
    messages = [{"role": "user", "content": "the room"}]
    with Hepti.connect(site.url, site.name) as hepti:
        hepti.wait_ready("talker", PATIENCE_S)
        ask = {"temperature": 0.9, "top_p": 0.95, "seed": 4, "max_new_tokens": 12, "timeout_s": PATIENCE_S}
        mqtt_answer = hepti.infer("talker", messages=messages, **ask)
        plain = hepti.infer("talker", text="user the room the", **ask).result["text"]
    text = mqtt_answer.result["text"]
    stop = text[len(text) // 2 :][:3]
    import openai

    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        options = {"model": "talker", "temperature": 0.9, "top_p": 0.95, "seed": 4, "max_tokens": 12}
        whole = client.chat.completions.create(messages=messages, **options)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (
            text,
            mqtt_answer.result["finish"],
        )
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
            mqtt_answer.tokens,
            len(mqtt_answer.result["ids"]),
        )
        usage = {"stream_options": {"include_usage": True}}
        parts = list(client.chat.completions.create(messages=messages, stream=True, **usage, **options))
        assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == text
        assert parts[-1].usage == whole.usage
        cut = list(client.chat.completions.create(messages=messages, stream=True, stop=stop, **options))
        assert "".join(p.choices[0].delta.content or "" for p in cut) == text[: text.index(stop)]
        assert cut[-1].choices[0].finish_reason == "stop"
        completed = client.completions.create(prompt="user the room the", **options)
        assert completed.choices[0].text == plain
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(messages=messages, n=2, **options)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(messages=[{"role": "king", "content": "x"}], stream=True, **options)


def test_the_dashboard_shows_requests_of_every_client(site, port):
    with Hepti.connect(site.url, site.name) as hepti:
        hepti.wait_ready("ranker", PATIENCE_S)
        plan = hepti.infer("ranker", query="a room", documents=["a door"], timeout_s=PATIENCE_S).plan["id"]
        with pytest.raises(RequestError):
            hepti.infer("ranker", query="a room", documents=[], timeout_s=PATIENCE_S)

    def shown():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/events", timeout=PATIENCE_S) as events:
            event = json.loads(events.readline().removeprefix(b"data: "))
        answered = any(one["model"] == "ranker" and one["plan"] == plan for one in event["answers"])
        return answered and any(error["code"] == "bad_request" for error in event["errors"])

    poll(shown, "an answer and an error of another client")
