"""Who may read from whom directly under a plan, and the tokens by which each lets the other in."""

from __future__ import annotations

import hmac

from hepti_mqtt.plan import Plan
from hepti_mqtt.runtime.planner.membership import Membership
from hepti_mqtt.wire.peers import Peer


class Introductions:
    """Tokens for every (source, target) of a plan that are no secret of anybody else's.

    They follow from the planner's secret, so that a Prepare which is repeated says the same, and end with their epoch.
    """

    def __init__(self, secret: bytes | None, membership: Membership) -> None:
        self._secret, self._membership = secret, membership

    def of(self, plan: Plan, device: str) -> tuple[Peer, ...]:
        """Return what a device is to know of its peers under a plan."""
        if plan.route != "mesh":
            return ()
        found = []
        for other in plan.devices:
            endpoint = self._membership.member(other).endpoint
            if other == device or endpoint is None:
                continue
            peer = Peer(other, endpoint, self._token(plan, other, device), self._token(plan, device, other))
            if peer.token_in or peer.token_out:
                found.append(peer)
        return tuple(found)

    def _token(self, plan: Plan, source: str, target: str) -> str:
        """Return with what `target` comes to `source`, "" where the broker carries what goes that way."""
        if self._secret is None or (source, target) in plan.relayed:
            return ""
        said = "\0".join(map(str, (plan.model, *plan.epoch, source, target)))
        return hmac.digest(self._secret, said.encode(), "sha256").hex()
