"""A real site behind a real gateway, asked by OpenAI's own client and by raw HTTP."""

from __future__ import annotations

import json
import urllib.request

import openai
import pytest
from service_support import encoded, noise
from site_processes import PATIENCE_S, ask_http, client_of, poll, running_site

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.core.errors import RequestError

TEMPLATE = "{% for one in messages %}{{ one.role + ' ' + one.content + ' ' }}{% endfor %}the"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gateway")
    kinds = {"tiny": "tiny-convnet", "ranker": "tiny-bert-ranker", "talker": "tiny-llama"}
    served = {name: make_model(kind, directory / name, seed=3) for name, kind in kinds.items()}
    (served["talker"] / "chat_template.jinja").write_text(TEMPLATE)
    yield from running_site(directory, served, {"a": "100MiB"})


hepti = client_of()


@pytest.fixture(scope="module")
def port(site, hepti):
    return site.serve("gateway")


def test_labels_are_those_that_mqtt_gives(hepti, port):
    picture = encoded(noise(30, 20))
    status, raw = ask_http(port, "/v1/classify", {"model": "tiny", "input": [{"image": picture}]})
    assert status == 200, raw
    assert json.loads(raw)["data"][0]["labels"] == hepti.infer("tiny", image=noise(30, 20), timeout_s=PATIENCE_S).labels


def test_a_ranking_is_the_one_that_mqtt_gives(hepti, port):
    documents = ["the door is cold", "a warm light in the room", "camera"]
    request = {"query": "a warm room", "documents": documents}
    ranking = hepti.infer("ranker", **request, timeout_s=PATIENCE_S).ranking
    status, raw = ask_http(port, "/v1/rerank", {"model": "ranker", **request})
    assert status == 200, raw
    results = json.loads(raw)["results"]
    assert [{"index": one["index"], "score": one["relevance_score"]} for one in results] == ranking
    assert [one["document"]["text"] for one in results] == [documents[one["index"]] for one in ranking]


def test_a_conversation_is_the_text_that_mqtt_gives_whole_and_as_it_comes(hepti, port):
    messages = [{"role": "user", "content": "the room"}]
    rules = {"temperature": 0.9, "top_p": 0.95, "seed": 4}
    ask = {**rules, "max_new_tokens": 12, "timeout_s": PATIENCE_S}
    mqtt_answer = hepti.infer("talker", messages=messages, **ask)
    plain = hepti.infer("talker", text="user the room the", **ask).result["text"]
    text = mqtt_answer.result["text"]
    stop = text[len(text) // 2 :][:3]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        options = {"model": "talker", **rules, "max_tokens": 12}
        whole = client.chat.completions.create(messages=messages, **options)
        (choice,), usage = whole.choices, whole.usage
        assert (choice.message.content, choice.finish_reason) == (text, mqtt_answer.result["finish"])
        counts = (mqtt_answer.tokens, len(mqtt_answer.result["ids"]))
        assert (usage.prompt_tokens, usage.completion_tokens) == counts
        stream = {"messages": messages, "stream": True, **options}
        parts = list(client.chat.completions.create(stream_options={"include_usage": True}, **stream))
        assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == text
        assert parts[-1].usage == usage
        cut = list(client.chat.completions.create(stop=stop, **stream))
        assert "".join(p.choices[0].delta.content or "" for p in cut) == text[: text.index(stop)]
        assert cut[-1].choices[0].finish_reason == "stop"
        assert client.completions.create(prompt="user the room the", **options).choices[0].text == plain
        for wrong in ({"n": 2}, {"messages": [{"role": "king", "content": "x"}], "stream": True}):
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(**{"messages": messages, **options, **wrong})


def test_the_dashboard_shows_requests_of_every_client(hepti, port):
    plan = hepti.infer("ranker", query="a room", documents=["a door"], timeout_s=PATIENCE_S).plan["id"]
    with pytest.raises(RequestError):
        hepti.infer("ranker", query="a room", documents=[], timeout_s=PATIENCE_S)

    def shown():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/events", timeout=PATIENCE_S) as events:
            event = json.loads(events.readline().removeprefix(b"data: "))
        answered = any(one["model"] == "ranker" and one["plan"] == plan for one in event["answers"])
        return answered and any(error["code"] == "bad_request" for error in event["errors"])

    poll(shown, "an answer and an error of another client")
