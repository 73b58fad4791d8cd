"""Who is there: devices from their retained status and caps and their heartbeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, log
from statistics import median
from typing import Final

from hepti_mqtt.cluster import (
    FAST_BYTES_PER_S,
    Cluster,
    DeviceProfile,
    FrameCost,
    Link,
    PeerLink,
    cluster_of,
    frame_cost,
    frames_foreseen,
    peer_links_of,
    profile_from_caps,
    unseen,
)
from hepti_mqtt.errors import WireError
from hepti_mqtt.plan import Pair
from hepti_mqtt.wire.described import Caps, Heartbeat, Status
from hepti_mqtt.wire.peers import Endpoint

TRIED_BYTES: Final = 4 << 20  # agents on MQTT 3.1.1 try no larger packet, so what passed there is no limit
CALM_S: Final = 15.0  # after weights were loaded; as long as drift rests
SLOWDOWNS: Final = 5  # heartbeats, of which the median counts
NOISE: Final = 0.1  # a device that is slower or faster by less is as measured
# Nor is one believed to be faster than this part of what it measured: a host that was stopped or cooled down while it
# waited is, for a short op, and all wait for it where it then gets more. One that always is measures itself again.
FASTEST: Final = 0.9
RETURN_S: Final = 10.0  # so long a device that has left may come back before requests are refused for want of it
MET_S: Final = 3.0  # in which the devices of a site meet a broker after the planner has
ASIDE_S: Final = 10.0  # a device that hangs is tried again then ...
ASIDE_MOST_S: Final = 300.0  # ... and after twice as long each time, at most
MISSED_S: Final = 6.0  # without a heartbeat for so long a device counts as lost, whatever its status says
SILENT_S: Final = 15.0  # a device that is starting says so every other second; after so long nobody waits for it ...
STARTING_S: Final = 900.0  # ... nor for one that has been starting for so long
MIDDLING_BYTES: Final = 1 << 16  # of a frame whose cost drift is watched on
RELAYED_S: Final = 600.0  # a pair that could not connect is not tried again for so long
MEMBERS: Final = 512  # devices that are remembered; of more, those that are not there are forgotten first


@dataclass(slots=True)
class Member:
    """One device as it has described itself; `seen_s` is when its last heartbeat came.

    calm: its last heartbeat of a time when nobody loaded weights, and slowdowns those of its last few. A device that
    loads computes slowly and has a full link, which says nothing of how it will be. refused: why plans do not use it,
    until it starts anew. starting_s: since when it says that it is starting, None if it does not. left_s: when it was
    last lost. spoke_s: when it last said something of a run or a plan; heartbeats come from another thread.
    aside_until_s: it hangs, and is tried again then, or (mute) when it speaks. asides: how often, since it last did its
    part. boot_before: of the start that plans used, once a new one has shown itself before the end of the old.
    """

    name: str
    boot: int = 0
    boot_before: int = 0
    online: bool = False
    caps: Caps | None = None
    calm: Heartbeat | None = None
    slowdowns: deque[float] = field(default_factory=lambda: deque(maxlen=SLOWDOWNS))
    heartbeat: Heartbeat | None = None
    seen_s: float = 0.0
    starting_s: float | None = None
    left_s: float = -inf
    refused: str = ""
    spoke_s: float = -inf
    aside_until_s: float | None = None
    asides: int = 0
    mute: bool = False
    unheard: dict[str, float] = field(
        default_factory=dict
    )  # peers that it could not connect to, until when that counts
    doubted: bool = False  # somebody was told of what it says that cannot be

    @property
    def usable(self) -> bool:
        """Return whether plans may use the device: online, not refused, and described by caps of the same boot."""
        there = self.online and not self.refused and self.aside_until_s is None
        return there and self.caps is not None and self.caps.boot == self.boot

    def coming(self, now: float) -> bool:
        """Return whether it may be usable soon: it says so every other second, or has left a moment ago."""
        if self.starting_s is not None:
            return now - self.starting_s <= STARTING_S and now - self.seen_s <= SILENT_S
        return not self.usable and not self.refused and now - self.left_s < RETURN_S

    @property
    def endpoint(self) -> Endpoint | None:
        """Return where peers read from it directly, None where they cannot."""
        return None if self.caps is None else self.caps.endpoint

    def hears(self, source: Member, now: float) -> bool:
        """Return whether another device's frames may come to this one directly, as far as one knows."""
        if self.endpoint is None or source.endpoint is None or self.unheard.get(source.name, -inf) > now:
            return False
        if bool(self.endpoint.fingerprint) is not bool(source.endpoint.fingerprint):
            return False  # one speaks TLS, the other does not
        return self.endpoint.loopback or not source.endpoint.loopback

    def profile(self, memory_bytes: float, usual: float = 1.0) -> DeviceProfile:
        """Return the device's measured profile; usual: of `slowdown`. Raises WireError if its caps cannot be read."""
        assert self.caps is not None
        try:
            return profile_from_caps(
                self.name, self.caps.curves, memory_bytes, self.slowdown(usual), self._frame_cost()
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise WireError(f"caps of {self.name} cannot be read ({exc!r}); update the agent") from exc

    def link(self) -> Link:
        """Return the device's measured link to the broker, with defaults until it has measured one."""
        base = Link()
        # The better of what was told in calm and of late: what is loaded makes a link look slower, and so does a device
        # that has only just started, which may be the last calm for a long time.
        told = [hb for hb in (self.calm, self.heartbeat) if hb is not None]
        round_trip_s = min((hb.round_trip_s for hb in told if hb.round_trip_s), default=2 * base.latency_s)
        rates = (hb.bandwidth_bytes_per_s for hb in told if hb.bandwidth_bytes_per_s)
        rate = max(rates, default=base.up_bytes_per_s)
        return Link(round_trip_s / 2, rate, rate)

    def peer_links(self) -> dict[str, PeerLink]:
        """Return the measured ways from this device straight to others, each the better of calm and of late."""
        told = [hb.peers for hb in (self.calm, self.heartbeat) if hb is not None]
        found = {}
        for peer in {name for peers in told for name in peers}:
            reports = [peers[peer] for peers in told if peer in peers]
            rate = max((r.bytes_per_s for r in reports if r.bytes_per_s), default=None)
            found[peer] = PeerLink(min(r.round_trip_s for r in reports) / 2, rate)
        return found

    def slowdown(self, usual: float = 1.0) -> float:
        """Return the median of late: a second of somebody else's load is none to divide a model by.

        Nor is what comes and goes by itself: what differs little from what is usual on the site is that, or equal
        devices would get unequal shares.
        """
        found = max(median(self.slowdowns), FASTEST) if self.slowdowns else 1.0
        return found if abs(log(found / usual)) > NOISE else usual

    def _frame_cost(self) -> FrameCost | None:
        """Return what frames to and from peers cost in calm, or else of late; None where none were seen."""
        told = (frame_cost(hb.peer_frame_s, hb.peer_byte_s) for hb in (self.calm, self.heartbeat) if hb is not None)
        return next((cost for cost in told if cost is not None), None)

    def observed(self, usual: float, planned: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return what drift is watched on: the values that a plan made now is made with, measured or assumed.

        planned: the values of a plan; what is worse than these is told as they are.
        """
        then = planned or {}
        name, found = f"bandwidth of {self.name}", {f"slowdown of {self.name}": self.slowdown(usual)}
        if self.endpoint is not None and not self.endpoint.loopback:
            profile = self.profile(0)
            cost = profile.seen or unseen(profile)
            found[f"cost of frames of {self.name}"] = cost.frame_s + MIDDLING_BYTES * cost.byte_s
        rate = min(self.link().up_bytes_per_s, FAST_BYTES_PER_S)
        return {name: max(rate, then.get(name, rate)), **{k: min(v, then.get(k, v)) for k, v in found.items()}}


class Membership:
    """All devices of the site; a boot counter orders what was retained against what is new.

    broker_bytes_per_s: rate of the broker's own link, None where nobody has said it. mesh: whether devices can be
    introduced to each other.
    """

    def __init__(self, broker_bytes_per_s: float | None = None, *, mesh: bool = False) -> None:
        self._broker_bytes_per_s, self._mesh = broker_bytes_per_s, mesh
        self.members: dict[str, Member] = {}
        self._calm_from_s = -inf
        self._met_s = -inf
        self._silent: set[str] = set()  # devices without a heartbeat since the broker was met again

    def room(self, name: str) -> bool:
        """Return whether a device is known, or can be: of too many one that is not there is forgotten for it."""
        if name in self.members or len(self.members) < MEMBERS:
            return True
        absent = [m for m in self.members.values() if not m.usable]
        if absent:
            del self.members[min(absent, key=lambda m: m.seen_s).name]
        return bool(absent)

    def member(self, name: str) -> Member:
        """Return a device; one that is new is remembered."""
        return self.members.setdefault(name, Member(name))

    def status(self, name: str, status: Status, now: float) -> str | None:
        """Take a status; return "joined", "left", "starting" or None.

        A late will of an earlier boot changes nothing.
        """
        member = self.member(name)
        if status.boot < member.boot:
            return None
        was, again = member.usable, status.boot > member.boot
        if was and again:
            member.boot_before = member.boot
        member.boot, member.online, member.seen_s = status.boot, status.state == "online", now
        if again or not member.online:
            member.aside_until_s = None
        since = None if again else member.starting_s
        member.starting_s = None if status.state != "starting" else now if since is None else since
        if again:  # it may have another endpoint, and another way to those of others
            self._forget_unheard(member)
        if was and (again or not member.online):
            return "left"
        if member.starting_s is not None and since is None:
            return "starting"
        return "joined" if member.usable and not was else None

    def caps(self, name: str, caps: Caps) -> str | None:
        """Take caps; return "joined" if they make the device usable, "left" if they are those of a new start."""
        member = self.member(name)
        if caps.boot < member.boot:
            return None
        if member.caps is not None and member.caps.boot != caps.boot:
            member.refused = ""
        was, member.caps = member.usable, caps
        if was and not member.usable:
            member.online = False  # its status of the same boot follows
            return "left"
        return "joined" if member.usable and not was else None

    def heartbeat(self, name: str, heartbeat: Heartbeat, now: float) -> str | None:
        """Take a heartbeat; a device that was only believed lost is back."""
        member = self.member(name)
        if heartbeat.boot < member.boot:
            return None
        if member.heartbeat is not None and member.heartbeat.boot != heartbeat.boot:
            member.calm = None
            member.slowdowns.clear()
        if now >= self._calm_from_s:
            member.calm = heartbeat
            member.slowdowns.append(heartbeat.slowdown)
        member.heartbeat, member.seen_s = heartbeat, now
        self._silent.discard(name)
        if member.aside_until_s is not None and now > member.aside_until_s:
            member.aside_until_s = None
            return "joined" if member.usable else None
        if heartbeat.boot == member.boot and not member.online and member.caps is not None:
            member.online = True
            return "joined" if member.usable else None
        return None

    def spoke(self, name: str, now: float, *, served: bool = False) -> str | None:
        """A device said something of a run or a plan; return "joined" if it had been put aside. served: its part."""
        member = self.members.get(name)
        if member is None:
            return None
        member.spoke_s = now
        if served:
            member.asides = 0
        was = member.usable
        if member.mute:
            member.aside_until_s = None
        return "joined" if member.usable and not was else None

    def put_aside(self, name: str, now: float, mute: bool) -> None:
        """Use a device that hangs for no plan, each time longer; mute: until it speaks, at the most."""
        member = self.members[name]
        member.mute = mute
        member.aside_until_s = now + min(ASIDE_S * 2**member.asides, ASIDE_MOST_S)
        member.asides += 1

    def left(self, name: str, now: float) -> int | None:
        """A device that plans used is lost; return the boot counter that it had, None if it was put aside."""
        member = self.members[name]
        member.left_s = now
        boot, member.boot_before = member.boot_before or member.boot, 0
        return boot if member.aside_until_s is None else None

    def loading(self, now: float) -> None:
        """Take it that devices load weights: what they tell until CALM_S after says nothing of how they will be."""
        self._calm_from_s = now + CALM_S

    def seen(self, now: float) -> None:
        """Give every device the whole time to be heard again."""
        self._silent, self._met_s = set(self.members), now
        for member in self.members.values():
            member.seen_s = now

    def back(self, names: Collection[str]) -> bool:
        """Return whether a heartbeat of each of these devices has come since the broker was met again."""
        return not self._silent.intersection(names)

    def overdue(self, now: float) -> list[str]:
        """Return the usable devices whose heartbeats have stopped, and mark them offline."""
        lost = [m for m in self.members.values() if m.usable and now - m.seen_s > MISSED_S]
        for member in lost:
            member.online = False
        return [m.name for m in lost]

    def unheard(self, name: str, sources: Iterable[str], now: float) -> None:
        """Take it that a device cannot connect to others, which are not asked to send to it directly for a while."""
        known = [source for source in sources if source in self.members]
        self.member(name).unheard.update(dict.fromkeys(known, now + RELAYED_S))

    def relayed(self, now: float) -> frozenset[Pair]:
        """Return the (source, target) of usable devices whose frames only the broker can carry."""
        usable = self.usable().values()
        return frozenset((s.name, t.name) for s in usable for t in usable if s is not t and not t.hears(s, now))

    def _forget_unheard(self, member: Member) -> None:
        member.unheard.clear()
        for other in self.members.values():
            other.unheard.pop(member.name, None)

    def refuse(self, name: str) -> str:
        """Use a device that derives other Programs for no plan until it starts anew; return what there is to say."""
        member = self.member(name)
        version = member.caps.version if member.caps is not None else "unknown"
        member.refused = f"{name} derives other Programs from a plan; it runs version {version}"
        return member.refused

    def unused(self) -> dict[str, str]:
        """Return why plans do not use devices that are online, as far as it was the planner that decided so."""
        why = {}
        for member in self.members.values():
            if member.refused:
                why[member.name] = f"{member.refused}; install the planner's version there"
            elif member.aside_until_s is not None:
                silent = "said nothing" if member.mute else "got no further"
                times = f", for the {member.asides}. time" if member.asides > 1 else ""
                why[member.name] = f"it {silent} while others waited for it{times}; it is tried again later"
        return {name: words for name, words in why.items() if self.members[name].online}

    def coming(self, now: float) -> set[str]:
        """Return the devices that are starting, or were there a moment ago and may be about to."""
        return {m.name for m in self.members.values() if m.coming(now)}

    def may_come(self, now: float) -> str:
        """Return in words whom requests may wait for, "" if for nobody."""
        unmet = "devices that have not met the broker again yet" if now - self._met_s < MET_S else ""
        return ", ".join(sorted(self.coming(now))) or unmet

    def awaited(self, names: Collection[str], now: float) -> bool:
        """Return whether there is no plan before others come: all of these devices, of none named the first one."""
        usable = set(self.usable())
        if now - self._met_s < MET_S:
            return not usable or not usable.issuperset(names)
        coming = self.coming(now)
        return bool(coming & (set(names) - usable)) if names else bool(coming) and not usable

    def refused(self) -> list[str]:
        """Return why devices that are there are not used."""
        return [m.refused for m in self.members.values() if m.refused and m.online]

    def usable(self) -> dict[str, Member]:
        """Return the devices that plans may use."""
        return {m.name: m for m in self.members.values() if m.usable}

    def observed(self) -> dict[str, float]:
        """Return what drift is watched on, of every usable device."""
        usable, usual = self.usable().values(), self._usual_slowdown()
        return {key: value for member in usable for key, value in member.observed(usual).items()}

    def telling(self, used: Collection[str], planned: Mapping[str, float]) -> dict[str, float]:
        """Return what is observed, but nothing worse than planned of devices that a plan does not use: it stays."""
        usable, usual = self.usable().values(), self._usual_slowdown()
        seen = (member.observed(usual, None if member.name in used else planned) for member in usable)
        return {key: value for of_one in seen for key, value in of_one.items()}

    def _usual_slowdown(self) -> float:
        return median([m.slowdown() for m in self.usable().values()] or [1.0])

    def packet_bytes(self) -> int | None:
        """Return the largest packet that gets through to every usable device, None if no limit was met."""
        limits = [m.caps.largest_packet_bytes for m in self.usable().values() if m.caps is not None]
        met = [limit for limit in limits if 0 < limit < TRIED_BYTES]
        return min(met, default=None)

    def cluster(self, reserved: Mapping[str, int]) -> Cluster:
        """Return profiles and links of the usable devices, less the bytes that other models hold on them."""
        usable, usual = self.usable(), self._usual_slowdown()
        devices = {
            n: m.profile(max(m.caps.memory_budget_bytes - reserved.get(n, 0), 0), usual)
            for n, m in usable.items()
            if m.caps is not None
        }
        cluster = cluster_of(devices, {n: m.link() for n, m in usable.items()}, self._broker_bytes_per_s)
        if not self._mesh:
            return cluster
        endpoints = {n: m.endpoint for n, m in usable.items() if m.endpoint is not None}
        return replace(
            cluster,
            devices=frames_foreseen(devices, [n for n, endpoint in endpoints.items() if not endpoint.loopback]),
            endpoints=frozenset(endpoints),
            peer_links=peer_links_of({n: m.peer_links() for n, m in usable.items()}),
        )
