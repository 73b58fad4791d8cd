"""Vectors of pictures and texts for programs that search photos: what they send, and what they read of the answers."""

import base64
import io
import json

import numpy as np
import pytest
from gateway_client import ROWS, Client, http_of
from PIL import Image


class Photos(Client):
    """Answers texts and pictures, each with one vector."""

    def models(self, timeout=5.0):
        return ["vit-b-32__openai", "other"]


def unit(row):
    return ROWS[row] / np.linalg.norm(ROWS[row])


@pytest.fixture
def client():
    return Photos()


@pytest.fixture
def http(client):
    return http_of(client, model=None)


def jpeg():
    file = io.BytesIO()
    Image.new("RGB", (31, 17)).save(file, "JPEG")
    return file.getvalue()


def entries(kind, name="ViT-B-32__openai", task="clip", **more):
    return json.dumps({task: {kind: {"modelName": name, **more}}})


def test_immich_searches_by_text_and_picture(http, client):
    assert http.get("/ping").text == "pong"
    image = ("blob", jpeg(), "application/octet-stream")  # a Blob of a FormData
    seen = http.post("/predict", files={"image": image}, data={"entries": entries("visual")}).json()
    assert (seen.keys(), seen["imageHeight"], seen["imageWidth"]) == ({"clip", "imageHeight", "imageWidth"}, 17, 31)
    np.testing.assert_allclose(json.loads(seen["clip"]), unit(0), rtol=1e-5)
    asked = {"entries": (None, entries("textual", options={"language": "en"})), "text": (None, "ein roter Hund")}
    said = http.post("/predict", files=asked).json()  # fields alone are a form with parts, too
    assert said.keys() == {"clip"}
    np.testing.assert_allclose(json.loads(said["clip"]), unit(len("ein roter Hund")), rtol=1e-5)
    assert [(one["model"], one.get("texts")) for one in client.asked] == [
        ("vit-b-32__openai", None), ("vit-b-32__openai", ["ein roter Hund"]),
    ]  # fmt: skip
    assert client.asked[1]["truncate"] is True


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"entries": entries("visual")}, 400),
        ({"entries": entries("visual"), "text": "a"}, 400),
        ({"entries": entries("textual", "ViT-L-14__openai"), "text": "a"}, 404),
        ({"entries": entries("detection", "buffalo_l", "facial-recognition"), "text": "a"}, 400),
        ({"entries": entries("textual", options={"size": 7}), "text": "a"}, 422),
        ({"entries": "[]", "text": "a"}, 422),
        ({"entries": "no JSON", "text": "a"}, 422),
        ({"entries": '{"clip": {"textual": {}}}', "text": "a"}, 422),
        ({"text": "a"}, 422),
        ({"entries": entries("textual"), "text": "a", "more": "b"}, 400),
        ({"entries": entries("textual"), "image": "a text"}, 400),
    ],
)
def test_immich_is_refused_what_is_not_computed(http, client, fields, status):
    answer = http.post("/predict", files={name: (None, value) for name, value in fields.items()})
    assert (answer.status_code, client.asked) == (status, [])


def test_a_file_that_is_no_picture(http, client):
    form = {"entries": (None, entries("visual")), "image": ("blob", b"no picture")}
    assert (http.post("/predict", files=form).status_code, client.asked) == (400, [])


def test_frigate_searches_by_meaning(http, client):
    """Texts first, then pictures, as its client for llama.cpp sends them."""
    assert "other" in {model["id"] for model in http.get("/v1/models").json()["data"]}
    marker = http.get("/props", params={"model": "other"}).json()["media_marker"]
    content = [{"prompt_string": "a red car"}, {"prompt_string": "a dog"}]
    picture = base64.b64encode(jpeg()).decode()
    content.append({"prompt_string": f"{marker}\n", "multimodal_data": [picture]})
    found = http.post("/embeddings", json={"model": "other", "content": content}).json()
    assert [one["index"] for one in found] == [0, 1, 2]
    rows = [np.array(one["embedding"]).mean(axis=0) for one in found]
    np.testing.assert_allclose(rows, [unit(len("a red car")), unit(len("a dog")), unit(0)], rtol=1e-5)
    assert client.asked[1]["image"] == jpeg()


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        [7],
        [{}],
        [{"prompt_string": "a", "other": 1}],
        [{"prompt_string": "<__media__>", "multimodal_data": ["no base64!"]}],
        [{"prompt_string": "a picture of <__media__>", "multimodal_data": ["aaaa"]}],
        [{"prompt_string": "<__media__>", "multimodal_data": ["aaaa", "aaaa"]}],
    ],
)
def test_frigate_is_refused_what_is_not_understood(http, client, content):
    answer = http.post("/embeddings", json={"model": "other", "content": content})
    assert (answer.status_code, client.asked) == (400, [])
