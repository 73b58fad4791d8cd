"""The text of generated tokens as they come: each is read with the few before it, however long the text is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from hepti_mqtt.checkpoint import Checkpoint

_BEHIND: Final = 4  # tokens: a character has up to four bytes, and a byte may be a token
_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")
_OPEN: Final = "\ufffd"  # what an incomplete character is read as


def mark_start(text: str, marks: Sequence[str]) -> int:
    """Return where the end of a text begins that may be the beginning of a mark; the text's length without one."""
    longest = max(map(len, marks), default=1) - 1
    starts = range(max(len(text) - longest, 0), len(text))
    return next((at for at in starts if any(mark.startswith(text[at:]) for mark in marks)), len(text))


class WrittenText:
    """A text that grows, up to the first of some texts in it; its pieces and its end, joined, are what all tokens give.

    A character that the last token cuts is in none of them. A piece lacks what later tokens may change: an incomplete
    character, a run of tokens that stand for bytes, which the tokenizer reads as a whole, and the beginning of a text
    to stop at. The library's own `DecodeStream` fails where such a run is no text. Without a tokenizer the text is
    empty.
    """

    def __init__(self, checkpoint: Checkpoint, stop: Sequence[str] = ()) -> None:
        self._tokenizer = checkpoint.tokenizer if checkpoint.has_tokenizer else None
        added = {} if self._tokenizer is None else self._tokenizer.get_added_tokens_decoder()
        self._unseen = {i for i, token in added.items() if token.special}
        self._stop = tuple(stop)
        self._restart()

    def _restart(self) -> None:
        self._count, self._last = 0, list[int]()  # tokens that were read
        self._window = list[int]()  # of those, the last that are settled, and what is not yet
        self._settled = 0  # characters of the window's text
        self._held = ""  # settled, and not shown
        self._stopped = False

    def extend_to(self, tokens: Sequence[int]) -> str:
        """Take all tokens of the text so far; return what of it may be shown and was not shown before.

        A text that does not go on with what was read begins again; the last few tokens are compared.
        """
        if list(tokens[max(self._count - _BEHIND, 0) : self._count]) != self._last:
            self._restart()
        new = "".join(map(self._add, tokens[self._count :]))
        self._count, self._last = len(tokens), list(tokens[-_BEHIND:])
        return self._show(new, self._stop)

    def stops(self, tokens: Sequence[int]) -> bool:
        """Take all tokens of the text so far; return whether one of the texts to stop at is in it."""
        self.extend_to(tokens)
        return self._stopped

    def end(self) -> tuple[str, bool]:
        """Return what was held back, and whether one of the texts to stop at is in the whole text."""
        return self._show(self._complete_text()[self._settled :], ()), self._stopped

    def _complete_text(self) -> str:
        """Return the text of the window without a character that its last tokens have only the first bytes of.

        A decoder reads all bytes of such a run of byte tokens as unknown, so the last ones are left out before.
        """
        whole, kept = self._text(self._window), list(self._window)
        while kept and len(self._window) - len(kept) < _BEHIND and self._text(kept).endswith(_OPEN):
            if not self._is_byte(kept.pop()):
                return whole.removesuffix(_OPEN)
        text = self._text(kept)
        return whole.removesuffix(_OPEN) if text.endswith(_OPEN) else text

    def _is_byte(self, token: int) -> bool:
        named = None if self._tokenizer is None else self._tokenizer.id_to_token(token)
        return named is not None and _BYTE.fullmatch(named) is not None

    def _show(self, new: str, marks: Sequence[str]) -> str:
        """Return what may be shown, because it is the beginning of no mark."""
        if self._stopped:
            return ""
        text = self._held + new
        if found := [at for one in self._stop if (at := text.find(one)) >= 0]:
            self._stopped, self._held = True, ""
            return text[: min(found)]
        end = mark_start(text, marks)
        self._held = text[end:]
        return text[:end]

    def _add(self, token: int) -> str:
        """Return the characters that a token settles."""
        named = None if self._tokenizer is None or token in self._unseen else self._tokenizer.id_to_token(token)
        if not named:
            return ""
        self._window.append(token)
        if _BYTE.fullmatch(named):
            return ""
        new = self._text(self._window).removesuffix(_OPEN)[self._settled :]
        del self._window[:-_BEHIND]
        self._settled = len(self._text(self._window).removesuffix(_OPEN))
        return new

    def _text(self, tokens: Sequence[int]) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode(tokens, skip_special_tokens=True))
