"""Who may come to an endpoint, with which tokens, and what it may read there."""

from __future__ import annotations

import hmac
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hepti_mqtt.transport.mesh.filters import covers


@dataclass(frozen=True, slots=True)
class _Grant:
    token: bytes
    filters: tuple[str, ...]
    limit_bytes: int


class Grants:
    """Grants by user and key (a model's epoch): each has a token of its own, and all of a user's count together."""

    def __init__(self) -> None:
        self._by_user: dict[str, dict[Hashable, _Grant]] = {}

    def admit(self, user: str, key: Hashable, token: str, filters: Sequence[str], limit_bytes: int) -> None:
        """Add a grant, or put it in the place of the one with this key."""
        self._by_user.setdefault(user, {})[key] = _Grant(token.encode(), tuple(filters), limit_bytes)

    def expel(self, user: str, key: Hashable) -> None:
        """End a grant, if there is one."""
        grants = self._by_user.get(user, {})
        grants.pop(key, None)
        if not grants:
            self._by_user.pop(user, None)

    def holds(self, user: str) -> bool:
        """Return whether this user has any grant."""
        return user in self._by_user

    def knows(self, user: str, token: bytes) -> bool:
        """Return whether a live grant of this user has this token; time tells nothing of it."""
        found = [hmac.compare_digest(grant.token, token) for grant in self._by_user.get(user, {}).values()]
        return any(found)

    def allows(self, user: str, pattern: str) -> bool:
        """Return whether the live grants of this user cover a filter."""
        grants = self._by_user.get(user, {})
        return any(covers(allowed, pattern) for grant in grants.values() for allowed in grant.filters)

    def limit_bytes(self, user: str) -> int:
        """Return how much may wait for this user."""
        return max((grant.limit_bytes for grant in self._by_user.get(user, {}).values()), default=0)
