"""A program: read the worst request of a kind, and print what became of it, the seconds, and the most MB in use.

The characters that were tokenised are printed too: they are the work of a text, whatever the machine.

Arguments: the kind, and a directory for the model. Its own process, since what was in use at the most is a process's.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image
from programs import memory_bytes
from tokenizers import Tokenizer

from hepti_mqtt.checkpoint import Checkpoint, make, make_model
from hepti_mqtt.runtime.coordinator.requests import Pins, Request
from hepti_mqtt.service.decoder import RawRequest
from hepti_mqtt.service.forecast import Forecasts
from hepti_mqtt.service.handler import OpenModel, RequestHandler
from hepti_mqtt.service.requests import MAX_ITEMS, MAX_PIXELS, MAX_REQUEST_BYTES
from hepti_mqtt.service.texts import MAX_CHARACTERS

ROOM = 1000  # bytes for the rest of the JSON


def body(**request: object) -> bytes:
    return json.dumps({"id": "worst", **request}, ensure_ascii=False).encode()


def picture(pixels: int, mode: str, form: str, **options: object) -> str:
    side = int(pixels**0.5)
    image = Image.frombytes(
        mode, (side, side), np.random.default_rng(0).bytes(16) * (side * side * len(mode) // 16 + 1)
    )
    file = io.BytesIO()
    image.save(file, form, **options)
    return base64.b64encode(file.getvalue()).decode()


def tokens() -> bytes:
    """Sequences as long as they are read, of which every character is a token: nothing is worse to tokenise."""
    words = "word" * 500 + " " + "," * (MAX_CHARACTERS // 64)
    return body(texts=[words[: MAX_CHARACTERS // 64]] * 64, truncate=True)


WORST: dict[str, tuple[str, Callable[[], bytes]]] = {
    "megabytes-of-words": ("text", lambda: body(text="warm sensor " * (MAX_REQUEST_BYTES // 12 - 20), truncate=True)),
    "one-word": ("text", lambda: body(text="x" * (MAX_REQUEST_BYTES - ROOM), truncate=True)),
    "commas": ("text", lambda: body(text="," * (MAX_ITEMS - 10), truncate=True)),
    "tokens": ("text", tokens),
    "wide-characters": ("text", lambda: body(text="\U0001f600 a" * (MAX_REQUEST_BYTES // 6 - ROOM), truncate=True)),
    "objects": ("text", lambda: b'{"id": "worst", "text": [' + b"{}," * (MAX_ITEMS // 2 - 9) + b"0]}"),
    "ids": ("text", lambda: body(ids=[7] * (MAX_ITEMS - 10), truncate=True)),
    "png": ("image", lambda: body(image=picture(MAX_PIXELS, "RGB", "PNG"))),
    "transparent": ("image", lambda: body(image=picture(MAX_PIXELS, "P", "PNG", transparency=bytes(256)))),
    "progressive": ("image", lambda: body(image=picture(MAX_PIXELS, "RGB", "JPEG", progressive=True, quality=20))),
    "webp": ("image", lambda: body(image=picture(MAX_PIXELS // 2, "RGBA", "WEBP"))),
}  # fmt: skip


def opened(directory: Path, reads: str) -> Checkpoint:
    """Return a model with few weights that reads as long texts as common ones do."""
    kind = "tiny-bert" if reads == "text" else "tiny-vit-classifier"
    if reads == "text":
        recipe = make.KINDS[kind]
        kind = "worst"
        make.KINDS[kind] = replace(recipe, config={**recipe.config, "max_position_embeddings": 512})
    return Checkpoint.open(make_model(kind, directory), "worst")


class Counted:
    """A tokenizer, and how many characters it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name: str) -> object:
        if name.startswith("encode_batch"):
            return lambda texts, **how: self.encode(getattr(self.tokenizer, name), texts, how)
        return getattr(self.tokenizer, name)

    def encode(self, encode: Callable[..., object], texts: list[str], how: dict[str, object]) -> object:
        self.characters += sum(map(len, texts))
        return encode(texts, **how)


def main() -> None:
    reads, build = WORST[sys.argv[1]]
    payload = build()
    with opened(Path(sys.argv[2]), reads) as checkpoint:
        models = {"worst": OpenModel("worst", checkpoint, Pins())}
        desk = RequestHandler("home", models, Forecasts("home", {"worst": checkpoint.spec}))
        usual = body(text="warm") if reads == "text" else body(image=picture(100, "RGB", "PNG"))
        assert isinstance(desk.read_request(RawRequest("worst", "me", usual), 0.0), Request)
        Path("/proc/self/clear_refs").write_text("5")  # forget what was in use at the most
        before, begun = memory_bytes()[0], time.perf_counter()
        counted = None
        if reads == "text":
            counted = Counted(checkpoint.tokenizer)
            checkpoint.texts = replace(checkpoint.texts, tokenizer=counted)
        outcome = desk.read_request(RawRequest("worst", "me", payload), 0.0)
        seconds, mb = time.perf_counter() - begun, (memory_bytes()[1] - before) >> 20
        read = isinstance(outcome, Request)
        said = f"job of {outcome.batches[0].shape.size} tokens" if read else outcome.payload.decode()
        result = {"said": said, "seconds": seconds, "mb": mb, "bytes": len(payload)}
        print(json.dumps(result | {"tokenised": counted.characters if counted else 0}))


if __name__ == "__main__":
    main()
