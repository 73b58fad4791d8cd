"""Whisper's language codes with their names, and aliases of other programs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

_WORDS: Final = """
en english zh chinese de german es spanish ru russian ko korean fr french ja japanese pt portuguese tr turkish pl
polish ca catalan nl dutch ar arabic sv swedish it italian id indonesian hi hindi fi finnish vi vietnamese he hebrew
uk ukrainian el greek ms malay cs czech ro romanian da danish hu hungarian ta tamil no norwegian th thai ur urdu hr
croatian bg bulgarian lt lithuanian la latin mi maori ml malayalam cy welsh sk slovak te telugu fa persian lv
latvian bn bengali sr serbian az azerbaijani sl slovenian kn kannada et estonian mk macedonian br breton eu basque
is icelandic hy armenian ne nepali mn mongolian bs bosnian kk kazakh sq albanian sw swahili gl galician mr marathi
pa punjabi si sinhala km khmer sn shona yo yoruba so somali af afrikaans oc occitan ka georgian be belarusian tg
tajik sd sindhi gu gujarati am amharic yi yiddish lo lao uz uzbek fo faroese ht haitian_creole ps pashto tk turkmen
nn nynorsk mt maltese sa sanskrit lb luxembourgish my myanmar bo tibetan tl tagalog mg malagasy as assamese tt tatar
haw hawaiian ln lingala ha hausa ba bashkir jw javanese su sundanese yue cantonese
"""
_TABLE: Final = _WORDS.split()
NAMES: Final = {code: name.replace("_", " ") for code, name in zip(_TABLE[::2], _TABLE[1::2], strict=True)}
_CODES: Final = {name: code for code, name in NAMES.items()}
#: codes of newer or older standards
_ALIASES: Final = {"nb": "no", "iw": "he", "in": "id", "ji": "yi", "jv": "jw", "fil": "tl", "cmn": "zh", "mo": "ro"}
ANY: Final = "auto"


def language_code(value: str, supported: Collection[str]) -> str | None:
    """Return Whisper's code of a language, by code, name, or code with a region; None if it is not in `supported`."""
    words = value.strip().lower().replace("_", "-")
    base = words.partition("-")[0]
    candidates = (words, _CODES.get(words), base, _ALIASES.get(base))
    return next((code for code in candidates if code in supported), None)
