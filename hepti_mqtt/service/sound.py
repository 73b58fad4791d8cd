"""Convert recordings to samples at 16 kHz; formats other than WAV need the extra `speech` (PyAV).

The header is checked before the conversion, so that the length limits the work.
"""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hepti_mqtt.core.errors import RequestError
from hepti_mqtt.models.mel import RATE
from hepti_mqtt.service.encoded import read_base64

Floats = npt.NDArray[np.float32]

MIN_RATE, MAX_RATE = 4_000, 192_000  # samples per second
MAX_CHANNELS: Final = 8
MAX_VALUES: Final = 24_000_000  # of all channels; exceeds the largest request


class Pcm(NamedTuple):
    """Samples of a recording: interleaved channels in a sample format, at a rate."""

    data: bytes | memoryview
    format: str
    rate: int
    channels: int


def _int24(data: bytes | memoryview) -> Floats:
    three = np.frombuffer(data, np.uint8).reshape(-1, 3)
    wide = np.zeros((len(three), 4), np.uint8)
    wide[:, 1:] = three
    return (wide.view("<i4")[:, 0].astype(np.float32)) / np.float32(2**31)


def _int(dtype: str, bits: int) -> Callable[[bytes | memoryview], Floats]:
    return lambda data: np.frombuffer(data, dtype).astype(np.float32) / np.float32(2 ** (bits - 1))


# Sample format -> bytes per sample, and the conversion to numbers from -1 to 1.
FORMATS: Final[Mapping[str, tuple[int, Callable[[bytes | memoryview], Floats]]]] = {
    "u8": (1, lambda data: (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / np.float32(128)),
    "s16": (2, _int("<i2", 16)),
    "s24": (3, _int24),
    "s32": (4, _int("<i4", 32)),
    "f32": (4, lambda data: np.frombuffer(data, "<f4").astype(np.float32)),
    "f64": (8, lambda data: np.frombuffer(data, "<f8").astype(np.float32)),
}
_WAV: Final[Mapping[tuple[int, int], str]] = {  # format tag and bits of a sample
    (1, 8): "u8",
    (1, 16): "s16",
    (1, 24): "s24",
    (1, 32): "s32",
    (3, 32): "f32",
    (3, 64): "f64",
}
_TAGS: Final = {2: "Microsoft ADPCM", 6: "A-law", 7: "mu-law", 17: "IMA ADPCM", 49: "GSM", 85: "MP3"}
_UNKNOWN_SIZE: Final = 0x7FFF0000  # and above: sizes written by programs that write to a pipe
_EXTENSIBLE: Final = 0xFFFE


def read(name: str, value: Any, longest_s: float) -> Floats:
    """Return the samples of a recording in base64, mono at 16 kHz; raises RequestError if it is invalid or too long.

    name: for errors. longest_s: limit in seconds.
    """
    return read_file(name, read_base64(name, value, "recording"), longest_s)


def read_file(name: str, file: bytes, longest_s: float) -> Floats:
    """Return the samples of a file, mono at 16 kHz; raises as `read` does."""
    return samples_of(name, pcm_of(name, file), longest_s)


def pcm_of(name: str, file: bytes) -> Pcm:
    """Return the samples of a file; raises RequestError for an unsupported format."""
    if not file:
        raise RequestError(f"{name} is empty; send a WAV file")
    if file[:4] == b"RIFF" and file[8:12] == b"WAVE":
        return _wav(name, file)
    return _other(name, file)


def _wav(name: str, file: bytes) -> Pcm:
    """Return the samples of a WAV file; data with the unknown size of a stream ends with the file."""
    at, form = 12, None
    while at + 8 <= len(file):
        kind, size = file[at : at + 4], int.from_bytes(file[at + 4 : at + 8], "little")
        if kind == b"fmt " and size >= 16:
            form = file[at + 8 : at + 8 + size]
        elif kind == b"data":
            if form is None or len(form) < 16:
                break
            tag, channels = (int.from_bytes(form[i : i + 2], "little") for i in (0, 2))
            rate, bits = int.from_bytes(form[4:8], "little"), int.from_bytes(form[14:16], "little")
            if tag == _EXTENSIBLE and len(form) >= 26:
                tag = int.from_bytes(form[24:26], "little")
            if (tag, bits) not in _WAV:
                what = _TAGS.get(tag, f"format {tag}")
                raise RequestError(
                    f"{name} is WAV with {bits}-bit {what}, which is not supported; send PCM of 8 to 32 bits, or float"
                )
            there = len(file) - at - 8
            if there < size < _UNKNOWN_SIZE:
                raise RequestError(f"{name} is cut off: it has {there} of {size} bytes of sound; send all of it")
            return Pcm(memoryview(file)[at + 8 : at + 8 + size], _WAV[tag, bits], rate, channels)
        at += 8 + size + size % 2
    raise RequestError(f"{name} is a WAV file without samples; record it again")


# First bytes of a file -> FFmpeg's reader. FFmpeg must not choose a reader, because some readers open other files.
_READERS: Final = (
    (b"ID3", "mp3"),
    (b"OggS", "ogg"),
    (b"\x1aE\xdf\xa3", "matroska"),
    (b"fLaC", "flac"),
    (b"FORM", "aiff"),
)


def _reader(file: bytes) -> str | None:
    if file[4:8] == b"ftyp":
        return "mov"
    if file[:1] == b"\xff" and file[1:2] >= b"\xe0":  # MPEG frames: AAC if the layer is 0
        return "aac" if file[1] & 6 == 0 else "mp3"
    return next((reader for head, reader in _READERS if file.startswith(head)), None)


def _other(name: str, file: bytes) -> Pcm:
    """Return the samples of a file in another format: MP3, Ogg, M4A, AAC, WebM, FLAC, AIFF."""
    reader = _reader(file)
    if reader is None:
        raise RequestError(f"{name} is no recording in a supported format; send WAV, MP3, Ogg, M4A, AAC, WebM or FLAC")
    try:
        import av
    except ImportError:
        raise RequestError(
            f"{name} is no WAV file; send WAV (ffmpeg -i FILE out.wav), or install Hepti with the extra speech in "
            "the planner's environment: pip install '.[speech]' in the checkout"
        ) from None
    try:
        with av.open(io.BytesIO(file), mode="r", format=reader) as opened:
            stream = opened.streams.audio[0]
            rate, channels = stream.rate, stream.channels
            pieces, values = list[npt.NDArray[Any]](), 0
            resampler = av.AudioResampler(format="flt", layout=stream.layout, rate=rate)
            for frame in opened.decode(stream):
                for same in resampler.resample(frame):
                    pieces.append(same.to_ndarray().reshape(-1))
                    values += pieces[-1].size
                if values > MAX_VALUES:
                    raise RequestError(f"{name} has more than {MAX_VALUES} samples; send a part of it")
            return Pcm(np.concatenate(pieces).astype("<f4").tobytes(), "f32", rate, channels)
    except RequestError:
        raise
    except (av.FFmpegError, ValueError, IndexError, TypeError) as error:
        raise RequestError(f"{name} is no sound that can be read ({type(error).__name__}); send WAV") from error


def samples_of(name: str, pcm: Pcm, longest_s: float) -> Floats:
    """Return samples [n] as mono at 16 kHz; raises RequestError if they are invalid or too long."""
    width, convert = FORMATS[pcm.format]
    if not MIN_RATE <= pcm.rate <= MAX_RATE or not 1 <= pcm.channels <= MAX_CHANNELS:
        raise RequestError(
            f"{name} has {pcm.rate} samples per second in {pcm.channels} channels; {MIN_RATE} to {MAX_RATE} in 1 to "
            f"{MAX_CHANNELS} are supported"
        )
    count = len(pcm.data) // (width * pcm.channels)
    if not count:
        raise RequestError(f"{name} has no samples; record it again")
    if count > longest_s * pcm.rate or count * pcm.channels > MAX_VALUES:
        raise RequestError(
            f"{name} lasts {count / pcm.rate:.1f} s, and the limit is {longest_s:g} s; send it in parts, cut in pauses"
        )
    values = convert(memoryview(pcm.data)[: count * width * pcm.channels]).reshape(count, pcm.channels)
    if not np.isfinite(values).all():
        raise RequestError(f"{name} has samples that are not numbers (NaN or infinity); record it again")
    mono = values[:, 0] if pcm.channels == 1 else values.mean(axis=1, dtype=np.float32)
    return np.asarray(np.clip(resampled(mono, pcm.rate), -1, 1), np.float32)


def wav_of(samples: Floats) -> bytes:
    """Return samples at 16 kHz as a WAV file of 16 bits."""
    return wav_file(np.asarray(np.rint(samples * 32767), "<i2").tobytes())


def wav_file(pcm: bytes | bytearray, rate: int = RATE, width: int = 2, channels: int = 1) -> bytes:
    """Return a WAV file of PCM; width: bytes of a sample."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(pcm)
    return buffer.getvalue()


# ----------------------------------------------------------------------------------------------------------------------
# Polyphase resampling: a new sample is the sum of the old samples near its time, weighted by a windowed sinc.


_LOBES: Final = 24  # zero crossings of the sinc on each side
_BETA: Final = 9.0  # of Kaiser's window: -90 dB beyond the edge
_EDGE: Final = 0.94  # of the lower of both rates' limits
_BLOCK: Final = 8192  # samples per block, for rates with more than `_MOST` filters
_GROUP, _MOST = 64, 1000  # minimum of new samples per matrix, and maximum of filters for the matrix method


def resampled(samples: Floats, rate: int) -> Floats:
    """Return samples [n] of `rate` at 16 kHz."""
    if rate == RATE:
        return samples
    common = math.gcd(rate, RATE)
    up, down = RATE // common, rate // common
    bank = _filters(up, rate)  # [up, taps]
    taps = bank.shape[1]
    count, reach = -(-len(samples) * up // down), taps // 2
    if up > _MOST:
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(samples, (reach, reach + 1)), taps)
        at = np.arange(count, dtype=np.int64) * down
        blocks = (at[i : i + _BLOCK] for i in range(0, count, _BLOCK))
        return np.concatenate([np.einsum("nt,nt->n", windows[block // up], bank[block % up]) for block in blocks])
    # The filters repeat after `up` new samples, so groups of new samples are products with one band matrix.
    turns = -(-_GROUP // up)
    at, wide = np.arange(turns * up) * down, turns * down + taps
    band = np.zeros((wide, len(at)), np.float32)
    band[at[:, None] // up + np.arange(taps), np.arange(len(at))[:, None]] = bank[at % up]
    groups = -(-count // len(at))
    padded = np.pad(samples, (reach, groups * turns * down + wide - len(samples)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, wide)[:: turns * down][:groups]
    return np.asarray((np.ascontiguousarray(windows) @ band).reshape(-1)[:count])


def _filters(up: int, rate: int) -> Floats:
    """Return the weights of the samples around the times i / up after a sample, [up, taps]."""
    cutoff = _EDGE * min(1.0, RATE / rate)  # of half the old rate
    reach = math.ceil(_LOBES / cutoff)  # samples on each side
    gaps = np.arange(up)[:, None] / up - np.arange(-reach, reach + 1)  # in old samples
    window = np.i0(_BETA * np.sqrt(np.maximum(0, 1 - (gaps / (reach + 1)) ** 2))) / np.i0(_BETA)
    return np.asarray(cutoff * np.sinc(cutoff * gaps) * window, np.float32)
