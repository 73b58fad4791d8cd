"""Recordings become the frames that the reference's preprocessor makes; what is no sound is refused; and silence."""

import base64
import io
import struct
import wave
from fractions import Fraction

import numpy as np
import pytest

from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.models.mel import RATE, log_mel
from hepti_mqtt.service import sound
from hepti_mqtt.service.silence import has_pause, is_silent


def tone(hz, seconds, rate=16_000):
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def wav(samples, rate=16_000, width=2, channels=1):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        scaled = np.rint(np.repeat(samples, channels) * (2 ** (8 * width - 1) - 1)).astype("<i4")
        raw = scaled.view(np.uint8).reshape(-1, 4)[:, :width]
        file.writeframes((raw + np.uint8(128) if width == 1 else raw).tobytes())
    return buffer.getvalue()


def riff(form, data):
    return b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data


def form(tag, bits, rate=16_000, channels=1):
    frame = channels * bits // 8
    return struct.pack("<HHIIHH", tag, channels, rate, rate * frame, frame, bits)


def heard(file):
    return sound.read("audio", base64.b64encode(file).decode(), 30.0)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_of_every_width(width, channels):
    samples = heard(wav(tone(440, 0.3), width=width, channels=channels))
    np.testing.assert_allclose(samples, tone(440, 0.3), atol=2.0 ** (2 - 8 * width) + 1e-6)


def test_floats_and_a_length_that_a_stream_could_not_know():
    data = tone(440, 0.2).tobytes()
    np.testing.assert_array_equal(heard(riff(form(3, 32), data)), tone(440, 0.2))
    endless = riff(form(3, 32), data).replace(struct.pack("<I", len(data)), struct.pack("<I", 0xFFFFFFFF))
    np.testing.assert_array_equal(heard(endless), tone(440, 0.2))


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 44_101, 48_000])
def test_other_rates_keep_what_16_khz_can_hold(rate):
    """What is higher is left out, not folded down."""
    above = tone(9000, 1.0, rate) if rate > 20_000 else 0
    samples = heard(wav(tone(1000, 1.0, rate) + above, rate=rate))
    assert len(samples) == 16_000
    np.testing.assert_allclose(samples[200:-200], tone(1000, 1.0)[200:-200], atol=2e-3)


@pytest.mark.parametrize(
    "file",
    [
        *(b"", b"not sound at all", wav(tone(440, 0.0)), wav(tone(440, 31.0))),
        *(b"#EXTM3U\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"),  # they could open others
        wav(tone(440, 1.0))[:-1000],
        riff(form(7, 8, 8000), b"\x55" * 800),  # mu-law
        riff(form(1, 8, 4000), bytes(3600 * 4000)),
        riff(form(3, 32), np.full(160, np.nan, "<f4").tobytes()),
        *(riff(form(1, 16, **wrong), b"\0" * 320) for wrong in ({"rate": 1}, {"channels": 40})),
        riff(form(1, 16), b"")[:36],
        b"RIFF\0\0\0\0WAVE" + b"\xff" * 64,
    ],
    ids=range(14),
)
def test_what_is_no_sound_is_refused(file):
    with pytest.raises(RequestError):
        heard(file)


def test_frames_are_those_of_the_reference():
    """Golden numbers of transformers' WhisperFeatureExtractor (5.24.0) for this signal and the silence after it."""
    time = np.arange(16_000) / 16_000
    signal = (0.5 * np.sin(2 * np.pi * (300 + 2000 * time) * time)).astype(np.float32)
    frames = log_mel(np.pad(signal, (0, 16_000)), 80)
    assert frames.shape == (200, 80)
    values = frames[[0, 0, 50, 50, 99, 99, 100, 150], [0, 12, 40, 79, 60, 5, 30, 10]]
    golden = (1.06782, 0.98929, -0.51637, -0.58907, 0.1164, -0.23715, 0.29337, -0.58907)
    np.testing.assert_allclose(values, golden, atol=1e-4)


CODECS = {"mp3": ("mp3", "libmp3lame"), "ogg": ("ogg", "libopus"), "m4a": ("mp4", "aac"), "webm": ("webm", "libopus"),
          "flac": ("flac", "flac")}  # fmt: skip


@pytest.mark.parametrize("kind", CODECS)
def test_recordings_of_other_formats(kind):
    av = pytest.importorskip("av")
    samples, rate = speech(2, 0.3), 48_000
    container, codec = CODECS[kind]
    wide = np.repeat(samples, 3)
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.rint(wide * 32767).astype(np.int16)[None], "s16", "mono")
        frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), 0
        converter = av.AudioResampler(stream.format, "mono", rate, frame_size=stream.frame_size or 1024)
        for part in [*converter.resample(frame), *converter.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    read = sound.read_file("file", file.getvalue(), 30.0)
    assert abs(len(read) / RATE - 2) < 0.2
    assert not is_silent(read)
    with pytest.raises(RequestError):
        sound.read_file("file", file.getvalue()[:40], 30.0)


# Whether somebody speaks in a recording.

RNG = np.random.default_rng(5)


def speech(seconds, level=0.1):
    """Return syllables: a tone that swells four times a second."""
    time = np.arange(round(seconds * RATE)) / RATE
    return (level * np.sin(2 * np.pi * 180 * time) * np.sin(np.pi * 4 * time) ** 2).astype(np.float32)


def noise(seconds, level):
    return (level * RNG.standard_normal(round(seconds * RATE))).astype(np.float32)


QUIET = {
    "zeros": np.zeros(RATE, np.float32),
    "nothing": np.zeros(0, np.float32),
    "dither": RNG.integers(-1, 2, 2 * RATE).astype(np.float32) / 32768,
    "an offset": np.full(RATE, 0.3, np.float32),
    "0.05 s": speech(0.05),
    "a quiet room": noise(3, 0.003),
}
LOUD = {
    "speech": speech(1),
    "speech from afar": speech(2, 0.01) + noise(2, 0.0003),
    "a word in a quiet room": np.concatenate([noise(2, 0.001), speech(0.5, 0.02), noise(2, 0.001)]),
    "a loud room": noise(2, 0.05),
}


@pytest.mark.parametrize("name", [*QUIET, *LOUD])
def test_silence(name):
    assert is_silent({**QUIET, **LOUD}[name]) is (name in QUIET)


def test_a_pause_is_one_between_words():
    still = noise(3, 0.0005)
    assert has_pause(np.concatenate([speech(2), still, speech(2)]))
    assert not has_pause(speech(4))
    assert not has_pause(np.concatenate([still, speech(2), still]))
    assert not has_pause(np.zeros(0, np.float32))
