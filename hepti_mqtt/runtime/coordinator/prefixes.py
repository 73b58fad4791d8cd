"""KV caches of ended requests that devices still hold: a text with the same beginning reuses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.ids import PlanVersion
from hepti_mqtt.core.recent import Recent
from hepti_mqtt.models.shapes import cache_rows

LEAST_ROWS: Final = 16  # a shorter prefix saves no time
MAX_KEPT: Final = 64  # sessions of a plan
MAX_HELD: Final = 512  # sessions of all models, including ended plan versions

Ids = NDArray[np.int32]
SessionId = tuple[PlanVersion, int]


class Prefix(NamedTuple):
    """A prefix of `rows` tokens in the KV cache of another session."""

    session: int
    rows: int
    moves: bool  #: the other request has ended, so its cache may be reused in place


@dataclass(frozen=True, slots=True, eq=False)
class HeldText:
    """The text in the KV cache of a session."""

    session: SessionId
    ids: Ids  #: token ids, with marks in place of pictures' tokens
    longest: int  #: most rows of a session
    model: str

    @property
    def capacity(self) -> int:
        """Return the rows that devices have allocated for it."""
        return cache_rows(len(self.ids), self.longest)


def common_rows(one: Ids, other: Ids) -> int:
    """Return the length of the common prefix of two texts."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


class HeldSessions:
    """The sessions of ended requests, least recently used first, while devices have room for their rows.

    Sessions of ended plan versions stay, because devices may continue them under a later version.
    """

    def __init__(self) -> None:
        self._held: Recent[SessionId, HeldText] = Recent(MAX_HELD)

    def __iter__(self) -> Iterator[HeldText]:
        return iter(self._held.values())

    def find(self, version: PlanVersion, ids: Sequence[int], used: Iterable[HeldText]) -> Prefix | None:
        """Return the longest prefix of a text in a session under a plan; used: texts of running requests.

        It excludes the last token, because the next run needs its row.
        """
        wanted = np.asarray(ids[:-1], np.int32)
        ended = [text for text in self._held.values() if text.session[0] == version]
        texts = [*((text, True) for text in ended), *((text, False) for text in used if text.session[0] == version)]
        prefixes = ((common_rows(wanted, text.ids), idle, text) for text, idle in texts)
        best = max(prefixes, default=None, key=itemgetter(0, 1))
        if best is None or best[0] < LEAST_ROWS:
            return None
        rows, idle, text = best
        return Prefix(text.session[1], rows, idle and len(text.ids) - rows <= rows)

    def keep(self, text: HeldText) -> None:
        """Keep the session of a request that has ended."""
        self._held[text.session] = text

    def make_room(self, version: PlanVersion, room_rows: int, source: int = 0) -> list[int]:
        """Remove and return the sessions under a plan that devices must drop to fit into `room_rows` and `MAX_KEPT`.

        source: a session to keep, because it is about to be copied.
        """
        texts = [text for text in self._held.values() if text.session[0] == version]
        rows, count = sum(text.capacity for text in texts), len(texts)
        dropped = list[int]()
        for text in texts:
            if rows <= room_rows and count <= MAX_KEPT:
                break
            if text.session[1] != source:
                rows, count = rows - text.capacity, count - 1
                del self._held[text.session]
                dropped.append(text.session[1])
        return dropped

    def get(self, session: SessionId) -> HeldText | None:
        """Return the text of a session, None if it is unknown."""
        return self._held.get(session)

    def restore(self, session: SessionId, version: PlanVersion, rows: int) -> None:
        """Move a text to a later plan version, under which devices hold its first rows."""
        text = self._held.pop(session)
        self._held[version, session[1]] = replace(text, session=(version, session[1]), ids=text.ids[:rows])

    def forget(self, session: SessionId) -> None:
        """Remove a session that devices have dropped, or that another request continues."""
        self._held.pop(session, None)
