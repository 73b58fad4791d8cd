"""Incremental decoding of generated tokens: each token is decoded together with the few tokens before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from hepti_mqtt.checkpoint import Checkpoint

_CONTEXT: Final = 4  # tokens: a character has up to four bytes, and a byte may be a token
_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")
_OPEN: Final = "\ufffd"  # decoding of an incomplete character


def mark_start(text: str, marks: Sequence[str]) -> int:
    """Return the start of a suffix that may be the start of a mark, or the text's length."""
    longest = max(map(len, marks), default=1) - 1
    starts = range(max(len(text) - longest, 0), len(text))
    return next((at for at in starts if any(mark.startswith(text[at:]) for mark in marks)), len(text))


class WrittenText:
    """A growing text up to the first stop text; its pieces and its end, joined, equal the decoding of all tokens.

    A character cut by the last token is omitted. A piece excludes text that later tokens may change: an incomplete
    character, a run of byte tokens, which the tokenizer decodes as a whole, and the start of a stop text. The library's
    `DecodeStream` fails if such a run is invalid text. Without a tokenizer the text is empty.
    """

    def __init__(self, checkpoint: Checkpoint, stop: Sequence[str] = ()) -> None:
        self._tokenizer = checkpoint.tokenizer if checkpoint.has_tokenizer else None
        added = {} if self._tokenizer is None else self._tokenizer.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}
        self._stop = tuple(stop)
        self._restart()

    def _restart(self) -> None:
        self._count, self._last = 0, list[int]()  # decoded tokens
        self._window = list[int]()  # the last settled tokens, and the unsettled tokens
        self._settled = 0  # characters of the window's text
        self._held = ""  # settled text, not returned yet
        self._stopped = False

    def extend_to(self, tokens: Sequence[int]) -> str:
        """Return the new final part of a text; tokens: all tokens so far.

        Start again if the last few tokens differ from the previous call.
        """
        if list(tokens[max(self._count - _CONTEXT, 0) : self._count]) != self._last:
            self._restart()
        new = "".join(map(self._add, tokens[self._count :]))
        self._count, self._last = len(tokens), list(tokens[-_CONTEXT:])
        return self._show(new, self._stop)

    def stops(self, tokens: Sequence[int]) -> bool:
        """Return whether the text contains a stop text; tokens: all tokens so far."""
        self.extend_to(tokens)
        return self._stopped

    def end(self) -> tuple[str, bool]:
        """Return the held part, and whether the whole text contains a stop text."""
        return self._show(self._complete_text()[self._settled :], ()), self._stopped

    def _complete_text(self) -> str:
        """Return the text of the window without an incomplete last character.

        A decoder decodes all bytes of an incomplete run as unknown, so its last byte tokens are omitted first.
        """
        whole, kept = self._text(self._window), list(self._window)
        while kept and len(self._window) - len(kept) < _CONTEXT and self._text(kept).endswith(_OPEN):
            if not self._is_byte(kept.pop()):
                return whole.removesuffix(_OPEN)
        text = self._text(kept)
        return whole.removesuffix(_OPEN) if text.endswith(_OPEN) else text

    def _is_byte(self, token: int) -> bool:
        named = None if self._tokenizer is None else self._tokenizer.id_to_token(token)
        return named is not None and _BYTE.fullmatch(named) is not None

    def _show(self, new: str, marks: Sequence[str]) -> str:
        """Return the text up to a possible start of a mark, and hold the rest."""
        if self._stopped:
            return ""
        text = self._held + new
        if places := [at for one in self._stop if (at := text.find(one)) >= 0]:
            self._stopped, self._held = True, ""
            return text[: min(places)]
        end = mark_start(text, marks)
        self._held = text[end:]
        return text[:end]

    def _add(self, token: int) -> str:
        """Return the characters that a token settles."""
        named = None if self._tokenizer is None or token in self._special else self._tokenizer.id_to_token(token)
        if not named:
            return ""
        self._window.append(token)
        if _BYTE.fullmatch(named):
            return ""
        new = self._text(self._window).removesuffix(_OPEN)[self._settled :]
        del self._window[:-_CONTEXT]
        self._settled = len(self._text(self._window).removesuffix(_OPEN))
        return new

    def _text(self, tokens: Sequence[int]) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode(tokens, skip_special_tokens=True))
