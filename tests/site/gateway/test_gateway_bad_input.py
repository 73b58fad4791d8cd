"""Clients that break the rules, at a real gateway with keys over a broker of MQTT 3.1.1; others are served on."""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest
from site_processes import PATIENCE_S, ask_http, client_of, poll, site_of

FORM = "application/x-www-form-urlencoded"
PAGE = "https://example.org/a.png"
KEY = {"Authorization": "Bearer a-key", "Content-Type": "application/json"}
REQUEST = {"model": "tiny", "input": "a warm room"}
LARGE = 100 << 20
PIECE = b" " * (1 << 20)


site = site_of({"tiny": "tiny-bert"}, {"a": "100MiB"}, kind="amqtt")
hepti = client_of()


@pytest.fixture(scope="module")
def port(site, hepti):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEPTI_GATEWAY_KEYS", "a-key")
        port = site.serve("gateway", "--no-announce")
    poll(lambda: ask(port)[0] == 200, "the first answer")
    return port


def ask(port, body=REQUEST, path="/v1/embeddings", headers=KEY):
    status, answer = ask_http(port, path, body, headers)
    return status, json.loads(answer)


CASES = {
    "wrong key": (REQUEST, "/v1/embeddings", {**KEY, "Authorization": "Bearer b"}, 401, "unauthorized"),
    "unknown model": ({**REQUEST, "model": "other"}, "/v1/embeddings", KEY, 404, "model_not_found"),
    "broken JSON": (b'{"model": "tiny", "inp', "/v1/embeddings", KEY, 400, "bad_request"),
    "no Unicode": (b'{"model": "tiny", "input": "\xff"}', "/v1/embeddings", KEY, 400, "bad_request"),
    "deep JSON": (b'{"input": ' + b"[" * 100_000, "/v1/embeddings", KEY, 400, "bad_request"),
    "no form": (REQUEST, "/v1/audio/transcriptions", KEY, 415, "media_type"),
    "a form": (b"input=x", "/v1/embeddings", {**KEY, "Content-Type": FORM}, 415, "media_type"),
    "a picture's address": ({"input": [{"image": PAGE}]}, "/v1/classify", KEY, 400, "bad_request"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_clear_answer(port, case):
    body, path, headers, status, code = CASES[case]
    got, error = ask(port, body, path, headers)
    assert (got, error["error"]["code"]) == (status, code)
    assert ask(port)[0] == 200


@pytest.mark.parametrize("length", [f"Content-Length: {LARGE}", "Transfer-Encoding: chunked"])
def test_a_body_of_100_mb_is_refused_while_it_comes(port, length):
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client:
        head = ["POST /embed HTTP/1.1", "Host: x", "Authorization: Bearer a-key", length, "", ""]
        client.sendall("\r\n".join(head).encode())
        frame = b"%x\r\n%s\r\n" % (len(PIECE), PIECE) if "chunked" in length else PIECE
        for _ in range(LARGE // len(PIECE)):
            client.sendall(frame)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413")
    assert ask(port)[0] == 200


def test_all_states_are_those_that_mqtt_gives(hepti, port):
    texts = ["a warm room", "a door"]
    wanted = [hepti.infer("tiny", text=text, want="hidden", timeout_s=PATIENCE_S).hidden for text in texts]
    status, vectors = ask(port, {"inputs": texts}, "/embed_all")
    assert status == 200
    assert all(np.array_equal(np.array(a, np.float32), b) for a, b in zip(vectors, wanted, strict=True))


def test_a_second_gateway_on_the_port_ends_and_the_first_goes_on(site, port):
    process = site.start("second", "gateway", "--port", str(port))
    assert process.wait(PATIENCE_S) == 1
    assert site.running.pop("second") is process
    assert ask(port)[0] == 200
