"""Sessions that devices still hold when their requests have ended: a text that begins alike goes on from there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.models.shapes import cache_rows

LEAST_ROWS: Final = 16  # fewer rows are computed as fast as they are looked for
MAX_KEPT: Final = 64  # sessions of a plan
MAX_HELD: Final = 512  # of all models, those of ended plan versions included

Ids = NDArray[np.int32]
SessionId = tuple[PlanVersion, int]


class Prefix(NamedTuple):
    """The first `rows` rows of a session that another session begins with."""

    session: int
    rows: int
    moves: bool  #: the session's request has ended and its later rows are worth less, so it ends


@dataclass(frozen=True, slots=True, eq=False)
class HeldText:
    """The text that a session holds the rows of."""

    session: SessionId
    ids: Ids  #: of its tokens, with marks in place of pictures' tokens
    longest: int  #: rows that a session may have
    model: str

    @property
    def capacity(self) -> int:
        """Return the rows that devices have set aside for it."""
        return cache_rows(len(self.ids), self.longest)


def common_rows(one: Ids, other: Ids) -> int:
    """Return how many tokens two texts have in common from the first on."""
    most = min(len(one), len(other))
    different = one[:most] != other[:most]
    return int(different.argmax()) if different.any() else most


class HeldSessions:
    """The sessions of ended requests, least recently used first, while devices have room for their rows.

    Those of ended plan versions stay: devices keep the rows, and may continue them under a later version.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[SessionId, HeldText] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldText]:
        return iter(self._held.values())

    def find(self, version: PlanVersion, ids: Sequence[int], used: Iterable[HeldText]) -> Prefix | None:
        """Return the longest beginning of a text that a session under a plan holds; used: those of running requests.

        The last token's row is none of it: what follows the token is asked for.
        """
        wanted = np.asarray(ids[:-1], np.int32)
        ended = [text for text in self._held.values() if text.session[0] == version]
        texts = [*((text, True) for text in ended), *((text, False) for text in used if text.session[0] == version)]
        best = max(((common_rows(wanted, text.ids), idle, text) for text, idle in texts), default=None, key=_by_rows)
        if best is None or best[0] < LEAST_ROWS:
            return None
        rows, idle, text = best
        return Prefix(text.session[1], rows, idle and len(text.ids) - rows <= rows)

    def keep(self, text: HeldText) -> None:
        """Keep the session of a request that has ended."""
        self._held[text.session] = text
        self._held.move_to_end(text.session)
        if len(self._held) > MAX_HELD:
            self._held.popitem(last=False)

    def make_room(self, version: PlanVersion, room_rows: int, source: int = 0) -> list[int]:
        """Return which sessions under a plan devices must drop, so that all others have room in some rows.

        source: the session that is about to be copied. Those beyond `MAX_KEPT` go, too.
        """
        texts = [text for text in self._held.values() if text.session[0] == version]
        rows, most = sum(text.capacity for text in texts), len(texts)
        dropped = list[int]()
        for text in texts:
            if rows <= room_rows and most <= MAX_KEPT:
                break
            if text.session[1] != source:
                rows, most = rows - text.capacity, most - 1
                del self._held[text.session]
                dropped.append(text.session[1])
        return dropped

    def get(self, session: SessionId) -> HeldText | None:
        """Return the text of a session, None without one."""
        return self._held.get(session)

    def restore(self, session: SessionId, version: PlanVersion, rows: int) -> None:
        """Move a text to a later plan version, under which devices have its first rows."""
        text = self._held.pop(session)
        self._held[version, session[1]] = replace(text, session=(version, session[1]), ids=text.ids[:rows])

    def forget(self, session: SessionId) -> None:
        """Forget a session that devices have dropped, or that goes on with another request."""
        self._held.pop(session, None)


def _by_rows(found: tuple[int, bool, Any]) -> tuple[int, bool]:
    return found[:2]
