"""From the end of a recording to its text: Whisper on the hosts of a lab beside faster-whisper on one of them."""

from __future__ import annotations

import re
import sys
import wave
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.errors import BenchError
from benchmarks.files import find
from benchmarks.lab.beside import Asked, beside, in_turn, ratio, say
from benchmarks.lab.spec import load
from benchmarks.tables import table

LANGUAGE: Final = {"language": "en"}
ENCODES: Final = {**LANGUAGE, "window": 30, "max_new_tokens": 1}  # the encoder, and the first token
# As faster-whisper does it, but without times; beam 5 is its default.
WHISPER: Final = {"without_timestamps": True, "condition_on_previous_text": False, **LANGUAGE}


def main(
    model: str,
    audio: str,
    lab: str = "four-pi4",
    rate: float = 940.0,
    seconds: float = 10.0,
    rounds: int = 3,
    settle: int = 4,
) -> None:
    """Print medians and ratios; model: a directory as CTranslate2 has it. All texts must have the same words."""
    spec = replace(load(find("labs", Path(lab))), rate_mbit=rate)
    with TemporaryDirectory(prefix="hepti-speech-") as scratch:
        sound = Path(scratch) / "sound.wav"
        _cut(Path(audio), sound, seconds)
        with beside(spec, "benchmarks.outside.speech", "whisper", Path(model).resolve()) as both:
            whisper, hepti = both.outside, both.site
            say(whisper, do="read", model=str(Path(model).resolve()), audio=str(sound))
            say(hepti, do="meet", model="whisper", audio=str(sound))
            one = {"strategy": "single", "devices": both.names[:1]}
            asked = {
                "faster-whisper, beam 1": Asked(whisper, {**WHISPER, "beam_size": 1}),
                "faster-whisper, beam 5": Asked(whisper, {**WHISPER, "beam_size": 5}),
                "Hepti, one host, window of 30 s": Asked(hepti, {**LANGUAGE, **one, "window": 30}),
                "Hepti, all hosts, window of 30 s": Asked(hepti, {**LANGUAGE, "window": 30}),
                "Hepti, one host": Asked(hepti, {**LANGUAGE, **one}),
                "Hepti, all hosts": Asked(hepti, LANGUAGE),
                "encoder, faster-whisper": Asked(whisper, {"encodes": True}),
                "encoder and a token, Hepti, one host": Asked(hepti, {**ENCODES, **one}),
                "encoder and a token, Hepti, all hosts": Asked(hepti, ENCODES),
            }
            for process, keys in asked.values():
                say(process, do="ask", **{**keys, **({"want": "plan"} if process is hepti else {})})
            for _ in range(settle):
                for process, keys in asked.values():
                    if process is hepti and "devices" not in keys:
                        print(say(process, do="ask", **keys), file=sys.stderr)
            _check({name: answers[0]["text"] for name, answers in in_turn(asked, [{}]).items()})
            found = in_turn(asked, [{}] * rounds)
    rows = [
        (
            name,
            f"{median(answer['ms'] for answer in answers):.0f}",
            *(ratio(answers, found[other], "ms") for other in _beside(name)),
            answers[-1]["plan"],
            answers[-1]["text"],
        )
        for name, answers in found.items()
    ]
    print(f"{spec.name}, {rate:g} Mbit/s, {seconds:g} s of {Path(audio).name}, {rounds} rounds; medians\n")
    print("\n".join(table(("", "ms", "over beam 1", "over beam 5", "over one host", "plan", "text"), rows)))


def _beside(name: str) -> tuple[str, str, str]:
    """Return whose times a row is divided by."""
    if name.startswith("encoder"):
        return "encoder, faster-whisper", "encoder, faster-whisper", "encoder and a token, Hepti, one host"
    one = "Hepti, one host" + (", window of 30 s" if name.endswith("30 s") else "")
    return "faster-whisper, beam 1", "faster-whisper, beam 5", one


def _check(texts: dict[str, str]) -> None:
    """Raise BenchError unless all texts have the same words; commas and capitals are no words."""
    words = {
        name: re.sub(r"[^\w\s]", "", text).lower().split()
        for name, text in texts.items()
        if not name.startswith("encoder")
    }
    wanted = words["faster-whisper, beam 1"]
    if other := [name for name, found in words.items() if found != wanted]:
        raise BenchError(f"{other[0]} has other words than faster-whisper, so nothing is timed: {texts[other[0]]}")


def _cut(source: Path, target: Path, seconds: float) -> None:
    with wave.open(str(source)) as file, wave.open(str(target), "wb") as out:
        out.setparams(file.getparams())
        out.writeframes(file.readframes(int(seconds * file.getframerate())))
