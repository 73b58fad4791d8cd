"""Separation of thoughts between `<think>` and `</think>` from the answer."""

from __future__ import annotations

from typing import Final, NamedTuple

from hepti_mqtt.service.detokenizer import mark_start

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class Parts(NamedTuple):
    """A piece of the thoughts, and a piece of the answer."""

    thinking: str
    text: str


class Thoughts:
    """Separate a growing text; inside: the prompt has already opened the thoughts."""

    def __init__(self, inside: bool) -> None:
        #: the next tag, "" in the answer; a text without OPEN at its start is an answer
        self._tag = CLOSE if inside else OPEN
        #: held text: white space, or a possible start of the tag
        self._held = ""
        #: strip white space at the start of a part
        self._begins = True

    def feed(self, text: str) -> Parts:
        """Add text; return the final pieces."""
        self._held += text
        thinking = ""
        if self._tag == OPEN:
            start = self._held.lstrip()
            if start.startswith(OPEN):
                self._tag, self._held = CLOSE, start[len(OPEN) :]
            elif OPEN.startswith(start):
                return Parts("", "")
            else:  # white space before an answer without thoughts belongs to the answer
                self._tag, self._begins = "", False
        if self._tag == CLOSE:
            before, tag, after = self._held.partition(CLOSE)
            # White space at the end may precede the tag.
            shown = (before if tag else before[: mark_start(before, (CLOSE,))]).rstrip()
            self._held = after if tag else before[len(shown) :]
            thinking = self._trimmed(shown)
            if tag:
                self._tag, self._begins = "", True
        if self._tag:
            return Parts(thinking, "")
        shown, self._held = self._held, ""
        return Parts(thinking, self._trimmed(shown))

    def end(self) -> Parts:
        """Return the held text."""
        rest, self._held = self._held, ""
        return Parts(self._trimmed(rest.rstrip()), "") if self._tag == CLOSE else Parts("", rest)

    def _trimmed(self, text: str) -> str:
        shown = text.lstrip() if self._begins else text
        self._begins = self._begins and not shown
        return shown


def divide(text: str, inside: bool) -> Parts:
    """Return the thoughts of a whole text, and the answer."""
    thoughts = Thoughts(inside)
    parts, rest = thoughts.feed(text), thoughts.end()
    return Parts(parts.thinking + rest.thinking, parts.text + rest.text)
