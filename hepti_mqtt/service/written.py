"""The text of generated tokens as they come: each is read with the few before it, however long the text is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from hepti_mqtt.checkpoint import Checkpoint

_BEHIND: Final = 4  # tokens: a character has up to four bytes, and a byte may be a token
_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")
_OPEN: Final = "\ufffd"  # what an incomplete character is read as


class WrittenText:
    """A text that grows; its pieces and its end, joined, are what the tokenizer makes of all tokens together.

    A piece lacks what later tokens may change: an incomplete character, and a run of tokens that stand for bytes, which
    the tokenizer reads as a whole. The library's own `DecodeStream` fails where such a run is no text. Without a
    tokenizer the text is empty.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tokenizer = checkpoint.tokenizer if checkpoint.has_tokenizer else None
        added = {} if self._tokenizer is None else self._tokenizer.get_added_tokens_decoder()
        self._unseen = {i for i, token in added.items() if token.special}
        self._restart()

    def _restart(self) -> None:
        self._count, self._last = 0, list[int]()  # tokens that were read
        self._window = list[int]()  # of those, the last that are shown, and what is not shown yet
        self._shown = 0  # characters of the window's text

    def begins(self, tokens: Sequence[int]) -> bool:
        """Return whether tokens go on with those that were read; the last few are compared."""
        return list(tokens[max(self._count - _BEHIND, 0) : self._count]) == self._last

    def extend_to(self, tokens: Sequence[int]) -> str:
        """Take all tokens of the text so far; return what of it may be shown and was not shown before.

        A text that does not go on with what was read begins again.
        """
        if not self.begins(tokens):
            self._restart()
        piece = "".join(map(self._add, tokens[self._count :]))
        self._count, self._last = len(tokens), list(tokens[-_BEHIND:])
        return piece

    def end(self) -> str:
        """Return what was held back."""
        return self._text()[self._shown :]

    def _add(self, token: int) -> str:
        named = None if self._tokenizer is None or token in self._unseen else self._tokenizer.id_to_token(token)
        if not named:
            return ""
        self._window.append(token)
        if _BYTE.fullmatch(named):
            return ""
        piece = self._text().removesuffix(_OPEN)[self._shown :]
        del self._window[:-_BEHIND]
        self._shown = len(self._text().removesuffix(_OPEN))
        return piece

    def _text(self) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode(self._window, skip_special_tokens=True))


class StopTexts:
    """Whether one of some texts stands in a text that grows."""

    def __init__(self, checkpoint: Checkpoint, stop: Sequence[str]) -> None:
        self._written, self._stop, self._tail = WrittenText(checkpoint), stop, ""

    def __call__(self, tokens: Sequence[int]) -> bool:
        """Take all tokens of the text so far."""
        before = self._tail if self._written.begins(tokens) else ""
        text = before + self._written.extend_to(tokens)
        found = any(one in text for one in self._stop)
        self._tail = text if found else text[-max(map(len, self._stop)) :]
        return found


def cut_at(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first of some texts in it."""
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]


def whole_text(checkpoint: Checkpoint, tokens: Sequence[int]) -> str:
    """Return the text of generated tokens without those that steer a model; empty without a tokenizer."""
    written = WrittenText(checkpoint)
    return written.extend_to(tokens) + written.end()
