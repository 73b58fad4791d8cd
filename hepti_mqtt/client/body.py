"""A request's JSON from what Python users have at hand."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypedDict, Union

from PIL import Image

from hepti_mqtt.core.errors import RequestError

Picture = Union[str, bytes, "PathLike[str]", Image.Image]
Recording = Union[str, bytes, "PathLike[str]"]
_LONGEST_PATH: Final = 1024


def encode_picture(picture: Picture) -> str:
    """Return a picture as base64, from a path, a file's bytes, a Pillow image, or base64.

    Raises RequestError if the file cannot be read.
    """
    if isinstance(picture, Image.Image):
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        return base64.b64encode(buffer.getvalue()).decode()
    return encode_file(picture, "picture")


def encode_file(file: Recording, what: str) -> str:
    """Return a file as base64, from a path, its bytes, or base64; what: it is, for errors.

    Raises RequestError if it cannot be read.
    """
    if isinstance(file, bytes | bytearray):
        return base64.b64encode(file).decode()
    if isinstance(file, str) and (len(file) > _LONGEST_PATH or not os.path.isfile(file)):
        if Path(file[-_LONGEST_PATH:]).suffix:  # base64 has no dot
            raise RequestError(f"there is no {what} {file[-80:]!r}")
        return file
    try:
        return base64.b64encode(Path(file).read_bytes()).decode()
    except OSError as error:
        raise RequestError(f"cannot read the {what} {file}: {error.strerror or error}") from error


def request_body(
    *,
    image: Picture | None = None,
    images: Sequence[Picture] | None = None,
    audio: Recording | None = None,
    devices: Sequence[str] | None = None,
    options: Mapping[str, str] | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return the JSON object of a request, without values of None."""
    body: dict[str, Any] = {
        **others,
        "image": None if image is None else encode_picture(image),
        "images": None if images is None else [encode_picture(i) for i in images],
        "audio": None if audio is None else encode_file(audio, "recording"),
        "devices": None if devices is None else list(devices),
        "options": None if options is None else dict(options),
    }
    return {key: value for key, value in body.items() if value is not None}


class RequestKeys(TypedDict, total=False):
    """The keys of a request; docs/reference/requests.md says what each means, and which belong together.

    Inputs: text, texts, ids (with token_types), text and text_pair, pairs, query and documents, question and context,
    text or texts with candidate_labels, messages (with tools and tool_choice), image, images (each a path, a file's
    bytes, a Pillow image or base64), audio (a path, a file's bytes or base64) with language, task ("translate": into
    English), window (seconds), timestamps, prompt, temperature and seed.
    want="hidden": final hidden states instead of the task's result; want="plan": computes nothing; the answer comes
    when the plan is active and has the predicted cost. strategy ("auto" to free it), options, devices, wire, accuracy,
    weights, route, objective pin the planner's choice for this request alone. report: the answer waits for the devices'
    counters.
    """

    text: str | None
    texts: Sequence[str] | None
    ids: Sequence[int] | Sequence[Sequence[int]] | None
    messages: Sequence[Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    token_types: Sequence[int] | Sequence[Sequence[int]] | None
    text_pair: str | None
    pairs: Sequence[Sequence[str]] | None
    query: str | None
    documents: Sequence[str] | None
    question: str | None
    context: str | None
    candidate_labels: Sequence[str] | None
    image: Picture | None
    images: Sequence[Picture] | None
    audio: Recording | None
    language: str | Sequence[str] | None
    task: str | None
    window: float | None
    timestamps: bool | str | None
    temperature: float | Sequence[float] | None
    seed: int | None
    truncate: bool | None
    empty: str | None
    want: str | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    stop: str | Sequence[str] | None
    speculate: bool | None
    prompt: str | Sequence[str | int] | None
    dimensions: int | None
    raw_scores: bool | None
    return_documents: bool | None
    aggregation: str | None
    no_answer: bool | None
    max_answer_tokens: int | None
    multi_label: bool | None
    hypothesis_template: str | None
    max_new_tokens: int | None
    fit: bool | None
    thinking: bool | None
    deadline_ms: float | None
    strategy: str | None
    options: Mapping[str, str] | None
    devices: Sequence[str] | None
    wire: str | None
    accuracy: float | None
    weights: str | None
    route: str | None
    objective: str | None
    report: bool | None
