"""What programs for cameras and homes send with pictures, and what the planner is asked: shapes of their sources."""

import base64

import pytest
from gateway_client import Client, post

FIRST, SECOND = (base64.b64encode(f"{name} picture".encode()).decode() for name in ("first", "second"))
PROMPT = "Describe what happens."
SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
FRIGATE = {"temperature": 0.5, "repeat_penalty": 1.05, "presence_penalty": 0.3}


def url(picture, **more):
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture}", **more}}


def text(words):
    return {"type": "text", "text": words}


def image(picture):
    return {"type": "image", "image": picture}


# Each: the path, the body, the content of the last message as the planner gets it, and other keys of its request.
CASES = {
    "Frigate, OpenAI: the prompt, then each frame after its caption": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [
            text(PROMPT), text("Frame 1"), url(FIRST, detail="low"), text("Frame 2"), url(SECOND, detail="low")
        ]}]},
        [text(PROMPT), text("Frame 1"), url(FIRST, detail="low"), text("Frame 2"), url(SECOND, detail="low")],
        {},
    ),
    "Frigate, Ollama: marks where frames belong": (
        "/api/chat",
        {
            "messages": [{
                "role": "user", "content": f"{PROMPT}\nFrame 1\n[img]\nFrame 2\n[img]", "images": [FIRST, SECOND],
            }],
            "options": FRIGATE, "think": False, "stream": False, "format": SCHEMA,
        },
        [text(f"{PROMPT}\nFrame 1\n"), image(FIRST), text("\nFrame 2\n"), image(SECOND)],
        {"presence_penalty": 0.3, "repetition_penalty": 1.05, "temperature": 0.5, "thinking": False},
    ),
    "Home Assistant, Ollama: an AI task with a camera's picture": (
        "/api/chat",
        {
            "messages": [
                {"role": "system", "content": "You are a home."},
                {"role": "user", "content": PROMPT, "images": [FIRST]},
            ],
            "stream": True, "keep_alive": -1, "options": {"num_ctx": 8192}, "think": False, "format": SCHEMA,
            "tools": [],
        },
        [image(FIRST), text(PROMPT)],
        {"thinking": False},
    ),
    "Home Assistant, OpenAI: an AI task with a camera's picture": (
        "/v1/responses",
        {
            "input": [
                {"type": "message", "role": "developer", "content": "You are a home."},
                {"type": "message", "role": "user", "content": [
                    {"type": "input_text", "text": PROMPT},
                    {"type": "input_image", "image_url": f"data:image/jpeg;base64,{FIRST}", "detail": "auto"},
                ]},
            ],
            "max_output_tokens": 3000, "store": False, "stream": False, "user": "01J",
        },
        [text(PROMPT), url(FIRST, detail="auto")],
        {"max_new_tokens": 3000},
    ),
}  # fmt: skip


def asked(path, body):
    """Return the request to the planner for a body that a program sends."""
    client = Client()
    answer = post(path, client, model="any", **body)
    assert answer.status_code == 200, answer.text
    return client.asked[-1]


@pytest.mark.parametrize("case", CASES)
def test_the_planner_is_asked_what_a_program_for_cameras_sends(case):
    path, body, content, others = CASES[case]
    request = asked(path, body)
    assert request["messages"][-1]["content"] == content
    assert others.items() <= request.items()
    assert (request.get("response_format") is not None) == ("format" in body)


@pytest.mark.parametrize(
    ("text_of", "images", "content"),
    [
        ("[img] a [img]", [FIRST], [image(FIRST), text(" a [img]")]),
        ("a [img] b", [FIRST, SECOND], [image(SECOND), text("a "), image(FIRST), text(" b")]),
        ("[img]", [FIRST], [image(FIRST)]),
        ("a", [FIRST, SECOND], [image(FIRST), image(SECOND), text("a")]),
    ],
)
def test_marks_of_ollama_are_the_places_of_pictures(text_of, images, content):
    body = {"messages": [{"role": "user", "content": text_of, "images": images}], "stream": False}
    assert asked("/api/chat", body)["messages"][-1]["content"] == content
