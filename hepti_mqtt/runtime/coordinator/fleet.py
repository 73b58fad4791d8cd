"""The devices of the site: what they publish, crash backoff, hang detection and the debounce of last wills."""

from __future__ import annotations

import hmac
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import exp, inf
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from hepti_mqtt import __version__
from hepti_mqtt.cost.loads import LoadRates, Mask
from hepti_mqtt.cost.profiles import Cluster, default_frame_cost
from hepti_mqtt.cost.reported import ReportedDevice, reported_cluster
from hepti_mqtt.ids import Start
from hepti_mqtt.plan import DevicePair, Plan
from hepti_mqtt.planner.estimates import SiteEstimates
from hepti_mqtt.protocol.keys import UNKEYED, Channel, Checked, FrameKey, Seal, agree, frame_key, public_key
from hepti_mqtt.protocol.messages import (
    CachedTiles,
    Caps,
    Endpoint,
    Heartbeat,
    Message,
    Peer,
    Status,
    encode,
    is_compatible,
)
from hepti_mqtt.runtime.coordinator.interface import (
    BrokerConnection,
    CoordinatorCommand,
    CoordinatorEvent,
    DeviceStatus,
    LogEvent,
    Tick,
)
from hepti_mqtt.runtime.coordinator.runs import Run

if TYPE_CHECKING:
    from hepti_mqtt.runtime.coordinator.models import PlanGroup, PlanGroups
    from hepti_mqtt.runtime.coordinator.plans import PlanRecord, ServedModel
    from hepti_mqtt.runtime.coordinator.rollout import Rollout, Standby
    from hepti_mqtt.runtime.coordinator.session import CoordinatorSession


# Who is there: devices from their retained status and caps and their heartbeats.


PROBED_PACKET_BYTES: Final = 4 << 20  # agents on MQTT 3.1.1 try no larger packet, so what passed there is no limit
RETURN_S: Final = 10.0  # so long a device that has left may come back before requests are refused for want of it
TYPICAL_ROWS: Final = 128  # of products by which a device's speed is known
FIRST_PROBES_S: Final = 2.5  # after a device is online, until its link was measured a few times
UNHEARD_S: Final = 60.0  # ... or one that only is not heard, while the broker has not published its will
RECONNECT_S: Final = 3.0  # in which the devices of a site meet a broker after the planner has
QUARANTINE_S: Final = 10.0  # a device that hangs is tried again then ...
QUARANTINE_MAX_S: Final = 300.0  # ... and after twice as long each time, at most
SETBACKS: Final = 3  # times that a device cost others a run or a plan ...
SETBACK_WINDOW_S: Final = 30.0  # ... in which it is put aside; a request survives as many losses
HEARTBEAT_TIMEOUT_S: Final = 6.0  # without a heartbeat for so long a device counts as lost, whatever its status says
SILENT_S: Final = 15.0  # a device that is starting says so every other second; after so long nobody waits for it ...
STARTING_S: Final = 900.0  # ... nor for one that has been starting for so long
RELAYED_S: Final = 600.0  # a pair that could not connect is not tried again for so long
LOSS_S: Final = 86400.0  # a device is taken to be lost once in so long, until losses are seen
UNWANTED: Final = "switched off for inference"
NO_START: Final = Start(0, 0)
MAX_MEMBERS: Final = 512  # devices that are remembered; of more, those that are not there are forgotten first


@dataclass(slots=True)
class Member:
    """One device as it has described itself.

    refused: why plans do not use it until it restarts. wanted: people let plans use it. starting_s: since when it is
    starting. left_s: when it was last lost; unheard: for want of heartbeats alone. last_message_s: of its last message
    about a run or a plan. quarantined_until_s: it hangs, and is used again then, or (mute) when it sends a message;
    quarantines: since it last completed a run. boot_before: of the start that plans used, when a new start appeared
    before the end of the old one. other_caps: the last ones of a start whose status has not come yet.
    unreachable_until_s: peers that it could not connect to. implausible: what it has said that cannot be. channel: for
    messages that nobody else can forge, None if the device or this planner has no key. setbacks: when it cost others a
    run or a plan; unreliable: it is put aside for that.
    """

    name: str
    start: Start = NO_START
    boot_before: int = 0
    online: bool = False
    online_s: float = -inf  #: when it last came online
    caps: Caps | None = None
    other_caps: Caps | None = None
    heartbeat: Heartbeat | None = None
    last_heartbeat_s: float = 0.0
    starting_s: float | None = None
    left_s: float = -inf
    unheard: bool = False
    refused: str = ""
    wanted: bool = True
    last_message_s: float = -inf
    quarantined_until_s: float | None = None
    quarantines: int = 0
    mute: bool = False
    unreachable_until_s: dict[str, float] = field(default_factory=dict)
    implausible: str = ""
    #: Why it went offline, in its own words; empty if it could not say.
    farewell: str = ""
    setbacks: deque[float] = field(default_factory=lambda: deque(maxlen=SETBACKS))
    unreliable: bool = False
    channel: Channel | None = None
    contradiction_reported: bool = False
    #: Tiles in its cache, by model; what it has not reported is not there.
    cached: dict[str, Mask] = field(default_factory=dict)
    #: By its speed, as long as it has not reported them.
    expected_rates: LoadRates = field(default_factory=LoadRates)
    #: 0: not measured.
    reported_rates: LoadRates = field(default_factory=lambda: LoadRates(0.0, 0.0))

    @property
    def boot(self) -> int:
        """Return the boot of the device's start, 0 before it has said one."""
        return self.start.boot

    @property
    def load_rates(self) -> LoadRates:
        """Return how fast it loads tiles with its whole processor."""
        return LoadRates(*(said or other for said, other in zip(self.reported_rates, self.expected_rates, strict=True)))

    def is_there(self, now: float) -> bool:
        """Return whether the known start is heard; while it is, none of a lower term follows it."""
        return (self.online or self.starting_s is not None) and now - self.last_heartbeat_s <= HEARTBEAT_TIMEOUT_S

    @property
    def usable(self) -> bool:
        """Return whether plans may use the device: online, wanted, and described by caps of the same start."""
        there = self.online and self.wanted and not self.refused and self.quarantined_until_s is None
        return there and self.caps is not None and self.caps.boot == self.boot

    def is_expected(self, now: float) -> bool:
        """Return whether it may be usable soon: it says so every other second, or has left a moment ago."""
        if not self.wanted:
            return False
        if self.starting_s is not None:
            return now - self.starting_s <= STARTING_S and now - self.last_heartbeat_s <= SILENT_S
        return not self.usable and not self.refused and now - self.left_s < (UNHEARD_S if self.unheard else RETURN_S)

    @property
    def endpoint(self) -> Endpoint | None:
        """Return where peers read from it directly, None where they cannot."""
        return None if self.caps is None else self.caps.endpoint

    def can_receive_from(self, source: Member, now: float) -> bool:
        """Return whether another device's frames may come to this one directly, as far as one knows."""
        if self.endpoint is None or source.endpoint is None or self.unreachable_until_s.get(source.name, -inf) > now:
            return False
        if bool(self.endpoint.fingerprint) is not bool(source.endpoint.fingerprint):
            return False  # one speaks TLS, the other does not
        return self.endpoint.loopback or not source.endpoint.loopback

    @property
    def kind(self) -> str:
        """Return what devices share that are taken to be equal until measurements show otherwise."""
        assert self.caps is not None
        return f"{self.caps.isa}, {self.caps.cores} cores, {self.caps.threads} threads"


class Fleet:
    """All devices of the site, and what is believed of them; `ids.Start` orders what was retained against the new.

    broker_bytes_per_s: rate of the broker's own link, None where nobody has said it. secret: the planner's, from which
    its keys and the tokens of peers follow; without it nobody is introduced to anybody. checked: what the tags of
    frames cover.
    """

    def __init__(
        self, broker_bytes_per_s: float | None = None, *, secret: bytes | None = None, checked: Checked = "header"
    ) -> None:
        self._broker_bytes_per_s, self.secret, self._checked = broker_bytes_per_s, secret, checked
        self.public_key = "" if secret is None else public_key(secret)
        self._numbers = count(1)  # of messages to devices
        self.members: dict[str, Member] = {}
        self.estimates = SiteEstimates()
        self._losses, self._watched_from_s = 0, inf
        self._met_s = -inf
        self._silent: set[str] = set()  # devices without a heartbeat since the broker was met again

    def make_room(self, name: str) -> bool:
        """Return whether a device is known, or can be: of too many one that is not there is forgotten for it."""
        if name in self.members or len(self.members) < MAX_MEMBERS:
            return True
        absent = [m for m in self.members.values() if not m.usable and m.wanted]
        if absent:
            gone = min(absent, key=lambda m: m.last_heartbeat_s).name
            del self.members[gone]
            self.estimates.forget_device(gone)
        return bool(absent)

    def member(self, name: str) -> Member:
        """Return a device; one that is new is remembered."""
        return self.members.setdefault(name, Member(name))

    def record_status(self, name: str, status: Status, now: float) -> str | None:
        """Take a status; return "joined", "left", "starting" or None.

        A late will of an earlier start changes nothing, nor does the beginning of a start that is online.
        """
        member = self.member(name)
        again = status.boot != member.boot
        if again and status.start < member.start and (status.state == "offline" or member.is_there(now)):
            return None
        if not again and member.online and status.state == "starting":
            return None
        was = member.usable
        if again:
            self._begin(member, status.start)
        if status.state == "online" and (again or not member.online):
            member.online_s = now
        member.start, member.online, member.last_heartbeat_s = status.start, status.state == "online", now
        member.farewell = status.reason if status.state == "offline" else ""
        member.unheard = False
        if not member.online and not member.unreliable:
            member.quarantined_until_s = None
        since = member.starting_s
        member.starting_s = None if status.state != "starting" else now if since is None else since
        if was and (again or not member.online):
            return "left"
        if member.starting_s is not None and since is None:
            return "starting"
        return "joined" if member.usable and not was else None

    def record_use(self, name: str, wanted: bool) -> str | None:
        """Take whether people want a device to be used; return "joined", "unwanted" or None."""
        member = self.member(name)
        was, member.wanted = member.usable, wanted
        return None if was == member.usable else "unwanted" if was else "joined"

    def _begin(self, member: Member, start: Start) -> None:
        """Take a new start of a device, with its caps if they came first."""
        if member.usable:
            member.boot_before = member.boot
        member.start, member.starting_s = start, None
        if not member.unreliable:
            member.quarantined_until_s = None
        member.cached.clear()  # another start may have another disk
        self._forget_unreachable(member)  # it may have another endpoint, and another way to those of others
        caps, member.other_caps = member.other_caps, None
        if caps is not None:
            self.record_caps(member.name, caps)

    def record_caps(self, name: str, caps: Caps) -> str | None:
        """Take caps; return "joined" if they make the device usable, "left" if they make it useless.

        Those of another start wait for its status: what they say may be forged.
        """
        member = self.member(name)
        if caps.boot != member.boot:
            member.other_caps = caps
            return None
        was = member.usable
        self._take_caps(member, caps)
        if was and not member.usable:
            return "left"
        return "joined" if member.usable and not was else None

    def _take_caps(self, member: Member, caps: Caps) -> None:
        """A device is as it says; one of an incompatible version is refused."""
        if not self._agree(member, caps):
            return
        known, member.caps = member.caps, caps
        if known is not None and (known.boot, known.version) != (caps.boot, caps.version):
            member.refused = ""
        if known is None or known.boot != caps.boot:  # it has measured itself again
            self.estimates.forget_device(member.name)
        at, profile = caps.endpoint, self._reported(member, 0).profile()
        member.expected_rates = LoadRates.expected(profile.speed(TYPICAL_ROWS))
        cost = None if at is None or at.loopback else default_frame_cost(profile)
        self.estimates.add_device(member.name, member.kind, cost)
        if not is_compatible(caps.version):
            self.refuse(member.name)

    def _agree(self, member: Member, caps: Caps) -> bool:
        """Agree with a device on a secret; return whether its caps are believed.

        A device that has shown its secret has neither another one nor another version before its next start.
        """
        known = member.caps if member.caps is not None and member.caps.boot == caps.boot else None
        is_same = known is not None and (known.public_key, known.version) == (caps.public_key, caps.version)
        if self.secret is None or is_same:
            return True
        if known is not None and member.channel is not None and member.channel.verified:
            return False
        secret = agree(self.secret, caps.public_key) if caps.public_key else None
        member.channel = None if secret is None else Channel(secret, self._numbers, at_planner=True)
        return True

    def seal(self, name: str, message: Message) -> bytes:
        """Return the payload of a message to a device."""
        payload, member = encode(message), self.members.get(name)
        return payload if member is None or member.channel is None else member.channel.seal(payload)

    def accepts(self, name: str, seal: Seal | None) -> bool:
        """Return whether a message may be of the device whose name it has."""
        member = self.members.get(name)
        return member is None or member.channel is None or member.channel.accepts(seal)

    def frame_key(self, plan: Plan) -> FrameKey:
        """Return the key of a plan's frames; it has one if all of its devices can hold a secret."""
        channels = (self.member(device).channel for device in plan.devices)
        if self.secret is None or any(channel is None for channel in channels):
            return UNKEYED
        return frame_key(self.secret, plan.model, plan.version, self._checked)

    def wrapped_key(self, plan: Plan, name: str) -> bytes:
        """Return the key of a plan's frames as one of its devices alone can read it."""
        key, channel = self.frame_key(plan).key, self.member(name).channel
        return key if channel is None else channel.wrapped(key, plan.model, plan.version)

    def record_heartbeat(
        self, name: str, heartbeat: Heartbeat, now: float, *, busy: bool = False, loading: bool = False
    ) -> str | None:
        """Take a heartbeat; a device that was only believed lost is back, one that has said that it leaves is not.

        One of another start counts if the known one is not there: it shows that this one is, whatever its term. busy:
        it has a part in a run. loading: it, or one that it works with, loads weights.
        """
        member = self.member(name)
        if heartbeat.boot != member.boot:
            if member.usable or member.is_there(now):
                return None
            self._begin(member, Start(0, heartbeat.boot))
            member.online = False
        if member.caps is not None and member.caps.boot == heartbeat.boot:
            self.estimates.record_heartbeat(name, heartbeat, now, busy=busy, loading=loading)
        member.heartbeat, member.last_heartbeat_s = heartbeat, now
        self._silent.discard(name)
        if member.quarantined_until_s is not None and now > member.quarantined_until_s:
            member.quarantined_until_s, member.unreliable = None, False
            return "joined" if member.usable else None
        if not member.online and not member.farewell and member.caps is not None:
            # Heartbeats have a connection of their own, so the first one may come before the status.
            member.online, member.unheard, member.online_s = True, False, now
            return "joined" if member.usable else None
        return None

    def record_message(self, name: str, now: float, *, served: bool = False) -> str | None:
        """A device said something of a run or a plan; return "joined" if it had been put aside. served: its part."""
        member = self.members.get(name)
        if member is None:
            return None
        member.last_message_s = now
        if served:
            member.quarantines = 0
        if not member.mute:
            return None
        was, member.quarantined_until_s = member.usable, None
        return "joined" if member.usable and not was else None

    def record_tiles(self, name: str, message: CachedTiles, served: ServedModel) -> None:
        """Take the tiles in a device's cache and its rates; ignore those of another manifest."""
        member = self.members.get(name)
        if member is None or served.tiles is None or message.manifest != served.manifest:
            return
        mask = served.tiles.unpack(message.tiles)
        if mask is not None:
            member.cached[served.name] = mask
        read, received = message.read_bytes_per_s, message.receive_bytes_per_s
        before = member.reported_rates
        member.reported_rates = LoadRates(read or before.read_bytes_per_s, received or before.receive_bytes_per_s)

    def cached(self, model: str) -> dict[str, Mask]:
        """Return the tiles of a model in the caches of devices, by position in its manifest."""
        return {name: member.cached[model] for name, member in self.members.items() if model in member.cached}

    def load_bytes_per_s(self, device: str) -> float:
        """Return how fast a device loads tiles that it does not have."""
        return min(self.members[device].load_rates.receive_bytes_per_s, self.estimates.link(device).down_bytes_per_s)

    def load_rates(self) -> dict[str, LoadRates]:
        """Return how fast devices load tiles."""
        return {name: member.load_rates for name, member in self.members.items()}

    def quarantine(self, name: str, now: float, mute: bool) -> None:
        """Use a device that hangs for no plan, each time longer; mute: until it speaks, at the most."""
        member = self.members[name]
        member.mute = mute
        member.quarantined_until_s = now + min(QUARANTINE_S * 2**member.quarantines, QUARANTINE_MAX_S)
        member.quarantines += 1

    def record_setback(self, name: str, now: float) -> bool:
        """A device has cost others a run or a plan; return whether it is put aside for that, also if it starts again.

        It stays where nobody else could serve.
        """
        member = self.members[name]
        member.setbacks.append(now)
        often = len(member.setbacks) == SETBACKS and now - member.setbacks[0] <= SETBACK_WINDOW_S
        if not often or not any(other.usable for other in self.members.values() if other is not member):
            return False
        member.setbacks.clear()
        self.quarantine(name, now, mute=False)
        member.unreliable = True
        return True

    def record_loss(self, name: str, now: float) -> int | None:
        """Record the loss of a device that plans used; return its boot if it may have crashed, else None."""
        member = self.members[name]
        member.left_s = now
        self._losses += 1
        boot, member.boot_before = member.boot_before or member.boot, 0
        return boot if member.quarantined_until_s is None and not member.farewell else None

    def loss_probability(self, seconds: float, now: float) -> float:
        """Return the probability that one device is lost within some seconds, by the losses that were seen."""
        self._watched_from_s = min(self._watched_from_s, now)
        watched_s = (now - self._watched_from_s) * len(self.members)
        return 1 - exp(-seconds * (self._losses + 1) / (watched_s + LOSS_S))

    def reset_silence(self, now: float) -> None:
        """Give every device the whole time to be heard again."""
        self._silent, self._met_s = set(self.members), now
        for member in self.members.values():
            member.last_heartbeat_s = now
            member.last_message_s = max(member.last_message_s, now)

    def all_back(self, names: Collection[str]) -> bool:
        """Return whether a heartbeat of each of these devices has come since the broker was met again."""
        return not self._silent.intersection(names)

    def mark_silent_offline(self, now: float) -> list[str]:
        """Return the usable devices whose heartbeats have stopped, and mark them offline."""
        lost = [m for m in self.members.values() if m.usable and now - m.last_heartbeat_s > HEARTBEAT_TIMEOUT_S]
        for member in lost:
            member.online, member.unheard = False, True
        return [m.name for m in lost]

    def record_unreachable(self, name: str, sources: Iterable[str], now: float) -> None:
        """Record that a device cannot connect to others; the broker relays their frames for a while."""
        known = [source for source in sources if source in self.members]
        self.member(name).unreachable_until_s.update(dict.fromkeys(known, now + RELAYED_S))

    def relayed_pairs(self, now: float) -> frozenset[DevicePair]:
        """Return the (source, target) of usable devices whose frames only the broker can carry."""
        usable = self.usable().values()
        return frozenset(
            (s.name, t.name) for s in usable for t in usable if s is not t and not t.can_receive_from(s, now)
        )

    def _forget_unreachable(self, member: Member) -> None:
        member.unreachable_until_s.clear()
        for other in self.members.values():
            other.unreachable_until_s.pop(member.name, None)

    def refuse(self, name: str) -> str:
        """Use a device of another version for no plan until it starts again; return why."""
        member = self.member(name)
        version = member.caps.version if member.caps is not None else "unknown"
        member.refused = (
            f"{name} runs an incompatible version ({version}): it compiles plans differently. Install the planner's "
            f"version ({__version__})."
        )
        return member.refused

    def unused_reasons(self) -> dict[str, str]:
        """Return why plans do not use devices that are online, as far as it was the planner that decided so."""
        why = {}
        for member in self.members.values():
            if not member.wanted:
                why[member.name] = UNWANTED
            elif member.refused:
                why[member.name] = member.refused
            elif member.caps is None and member.implausible:
                why[member.name] = member.implausible
            elif member.quarantined_until_s is not None:
                silent = "sent no message" if member.mute else "made no progress"
                how = "cost others too many runs or plans" if member.unreliable else f"{silent} while others waited"
                times = f" ({member.quarantines} times)" if member.quarantines > 1 else ""
                why[member.name] = f"{how}{times}; retried later"
        return {name: words for name, words in why.items() if self.members[name].online}

    def machines(self) -> dict[str, str]:
        """Return the address of each device that shares its address, and so its machine, with another device."""
        hosts = {name: member.endpoint.host for name, member in self.members.items() if member.endpoint is not None}
        counts = Counter(hosts.values())
        return {name: host for name, host in hosts.items() if counts[host] > 1}

    def expected(self, now: float) -> set[str]:
        """Return the devices that are starting, or were there a moment ago and may be about to."""
        return {m.name for m in self.members.values() if m.is_expected(now)}

    def describe_expected(self, now: float) -> str:
        """Return in words whom requests may wait for, "" if for nobody."""
        unmet = "devices that have not met the broker again yet" if now - self._met_s < RECONNECT_S else ""
        return ", ".join(sorted(self.expected(now))) or unmet

    def must_wait_for(self, names: Collection[str], now: float) -> bool:
        """Return whether there is no plan before others come: all of these devices, of none named the first one."""
        usable = set(self.usable())
        if now - self._met_s < RECONNECT_S:
            return not usable or not usable.issuperset(names)
        coming = self.expected(now)
        return bool(coming & (set(names) - usable)) if names else bool(coming) and not usable

    def is_measuring(self, now: float) -> bool:
        """Return whether a usable device that is not on the broker's machine measures its link for the first time."""
        young = (m.name for m in self.usable().values() if now - m.online_s < FIRST_PROBES_S)
        return any(map(self.estimates.has_link, young))

    def refusal_reasons(self) -> list[str]:
        """Return why devices that are there are not used."""
        there = [m for m in self.members.values() if m.online]
        unwanted = [f"{m.name} is {UNWANTED}" for m in there if not m.wanted]
        return unwanted + [m.refused for m in there if m.refused and m.wanted]

    def usable(self) -> dict[str, Member]:
        """Return the devices that plans may use."""
        return {m.name: m for m in self.members.values() if m.usable}

    def packet_limits(self) -> dict[str, int]:
        """Return the largest packet that gets through to each usable device that has met a limit."""
        limits = {m.name: m.caps.largest_packet_bytes for m in self.usable().values() if m.caps is not None}
        return {name: limit for name, limit in limits.items() if 0 < limit < PROBED_PACKET_BYTES}

    def cluster(self, reserved: Mapping[str, int]) -> Cluster:
        """Return profiles and links of the usable devices, less the bytes that other models hold on them."""
        found = [self._reported(m, reserved.get(m.name, 0)) for m in self.usable().values()]
        return reported_cluster(found, self._broker_bytes_per_s, mesh=self.secret is not None)

    def _reported(self, member: Member, reserved_bytes: int) -> ReportedDevice:
        """Return a device as it has described itself, with the means of what is believed of it."""
        caps, name, believed = member.caps, member.name, self.estimates
        assert caps is not None
        return ReportedDevice(
            name,
            caps.curves,
            max(caps.memory_budget_bytes - reserved_bytes, 0),
            believed.slowdown(name),
            believed.link(name),
            believed.peer_links(name),
            believed.frame_cost(name),
            caps.endpoint,
        )


def peers_of(plan: Plan, device: str, fleet: Fleet) -> tuple[Peer, ...]:
    """Return the peers of a device under a plan, with the tokens by which each lets the other in.

    Under every route they exchange tiles of weights; tensors go straight to them only under a plan of route `mesh`.
    Tokens follow from the planner's secret, the plan version and the pair, so a repeated Prepare carries the same.
    """

    secret = fleet.secret

    def token(source: str, target: str) -> str:  # "" where the broker relays what goes this way
        if secret is None or (source, target) in plan.relayed_pairs:
            return ""
        said = "\0".join(map(str, (plan.model, *plan.version, source, target)))
        return hmac.digest(secret, said.encode(), "sha256").hex()

    ends = ((d, fleet.member(d).endpoint) for d in plan.devices if d != device)
    found = (Peer(d, endpoint, token(d, device), token(device, d)) for d, endpoint in ends if endpoint is not None)
    return tuple(peer for peer in found if peer.token_in or peer.token_out)


# ----------------------------------------------------------------------------------------------------------------------
# Crash backoff: each repeated crash soon after a Prepare lowers the memory that plans may use on a device.
#
# A control group with less memory than the device reports kills the agent each time the same plan comes. One crash is
# no sign: a single device that is restarted must serve again at once. A device that returns with the same boot was
# only disconnected, and one that says why it goes offline has not crashed. Where no other device can serve, the limits
# are lifted: answers between two crashes are better than none.


CRASH_WINDOW_S: Final = 30.0  # a crash within this time of a Prepare may be due to the plan
REPEAT_WINDOW_S: Final = 300.0  # in which a second crash counts
BACKOFF_S: Final = 60.0  # the device gets less memory for this time, twice as long after each further crash
BACKOFF_MAX_S: Final = 3600.0
MEMORY_FACTOR: Final = 0.75  # of the memory that the plan needed


@dataclass(slots=True)
class _Crash:
    most_bytes: int
    rest_s: float
    until_s: float
    forgotten_s: float


@dataclass(frozen=True, slots=True)
class _Departure:
    boot: int
    needed_bytes: int


class CrashBackoff:
    """The devices that died under young plans of one model; time is an argument."""

    def __init__(self) -> None:
        self._gone: dict[str, _Departure] = {}
        self._falls: dict[str, _Crash] = {}

    def record_departure(self, device: str, boot: int, needed_bytes: int, given_s: float, now: float) -> None:
        """Record that a device has left; its last exchange about a plan of `needed_bytes` was at `given_s`."""
        if now - given_s <= CRASH_WINDOW_S:
            self._gone[device] = _Departure(boot, needed_bytes)

    def record_return(self, device: str, boot: int, now: float) -> None:
        """Record that a device is back; with a new boot it had crashed."""
        gone = self._gone.pop(device, None)
        if gone is not None and gone.boot != boot:
            self._record_crash(device, gone.needed_bytes, now)

    def _record_crash(self, device: str, needed_bytes: int, now: float) -> None:
        before = self._falls.get(device)
        if before is None:
            self._falls[device] = _Crash(0, BACKOFF_S / 2, now, now + REPEAT_WINDOW_S)
            return
        rest_s = min(2 * before.rest_s, BACKOFF_MAX_S)
        self._falls[device] = _Crash(
            int(MEMORY_FACTOR * needed_bytes), rest_s, now + rest_s, now + rest_s + REPEAT_WINDOW_S
        )

    def memory_limits(self, now: float) -> dict[str, int]:
        """Return the memory that plans may need now, of the devices that get less."""
        return {device: fall.most_bytes for device, fall in self._falls.items() if now < fall.until_s}

    def lift(self, devices: Collection[str], now: float) -> list[str]:
        """Lift the limits of these devices before their time; return the devices that had one."""
        limited = sorted(self.memory_limits(now).keys() & set(devices))
        for device in limited:
            self._falls[device].most_bytes, self._falls[device].until_s = 0, now
        return limited

    def lift_expired(self, now: float) -> list[str]:
        """Return once each device that may use all its memory again; after a longer time forget its crashes."""
        over = [device for device, fall in self._falls.items() if now >= fall.forgotten_s]
        for device in over:
            del self._falls[device]
        out = [device for device, fall in self._falls.items() if now >= fall.until_s and fall.most_bytes]
        for device in out:
            self._falls[device].most_bytes = 0
        return out


# ----------------------------------------------------------------------------------------------------------------------
# Hang detection: probe the devices that hold up a run, and quarantine those that do not answer.
#
# Heartbeats come from another thread than messages about runs and plans, which the computing thread sends; so only
# silence of the latter counts. After a lost tensor all devices still answer; such a run is retried later.


PROBE_TIMEOUT_S: Final = (
    0.5  # for an answer to a probe, or as long as the run was to take, or others would load weights
)
PROBE_TIMEOUT_MAX_S: Final = 5.0
PREPARE_SILENCE_S: Final = 6.0  # without a word, though asked for it twice
PROGRESS_S: Final = 20.0  # with words, and without progress
LOAD_MAX_S: Final = 300.0  # with progress, and as long as its weights take over a link of ...
SLOWEST_LOAD_BYTES_PER_S: Final = 1e5
STALLED_S: Final = 0.5  # a tick that comes so late says that this process, or the broker, was held up, not others


class HungDevice(NamedTuple):
    """A device to quarantine, and why; is_silent: until it sends a message."""

    device: str
    reason: str
    is_silent: bool = True


class HangDetector:
    """Watches the runs and preparations of all groups; probes devices by the rollout's Prepare."""

    def __init__(self, groups: PlanGroups, fleet: Fleet, rollout: Rollout, standby: Standby) -> None:
        self._groups, self._fleet, self._rollout, self._standby = groups, fleet, rollout, standby
        self._ticked_s = self._heard_s = float("inf")

    def tick(self, now: float, heard_s: float) -> tuple[list[CoordinatorCommand], list[HungDevice]]:
        """Return probes of late devices, and the devices that did not answer while others can serve.

        heard_s: when the broker was last heard. Devices are not silent while it is.
        """
        was_held_up, heard_before_s = now - self._ticked_s > STALLED_S, self._heard_s
        self._ticked_s, self._heard_s = now, heard_s
        out: list[CoordinatorCommand] = []
        silent: dict[str, HungDevice] = {}
        for group in self._groups:
            late: dict[str, HungDevice] = {}
            for run in group.runs.values():
                if now <= run.times.probe_at_s:
                    continue
                if run.probed_s is None:
                    out += self._probe_run(group, run, now)
                    continue
                # A broker that has acknowledged the probe is quiet until the next heartbeat where little is under way.
                pause_s = QUIET_S if heard_before_s > run.probed_s else STALLED_S
                if was_held_up or heard_s - heard_before_s > pause_s:
                    out += self._probe_run(group, run, now)
                elif heard_s > run.probed_s < now - self._patience_s(group, run):
                    how = "does not answer while a run is overdue"
                    late |= {device: HungDevice(device, how) for device in self._silent_devices(run)}
            record = group.plans.preparing
            if record is not None and record.state == "preparing":
                late |= self._unprepared(record, heard_s)
            # Nobody else can serve where pins name the devices.
            named = group.plans.pins.devices or ()
            silent |= {device: word for device, word in late.items() if device not in named}
        can_serve = set(self._fleet.usable()) - set(silent)
        return out, list(silent.values()) if can_serve else []

    def _patience_s(self, group: PlanGroup, run: Run) -> float:
        """Return how long the devices of a late run have to say something: others first load what they do not hold.

        No longer than until the run is retried, which would ask the same devices again.
        """
        assert run.probed_s is not None
        record = group.plans.active
        load_s = 0.0
        if record is not None and not self._standby.is_held(group):
            needed = {device: record.needed_bytes(device) for device in run.plan.devices}
            load_s = max(nbytes / self._fleet.load_bytes_per_s(device) for device, nbytes in needed.items())
        most_s = min(PROBE_TIMEOUT_MAX_S, max(run.times.deadline_s - run.probed_s, PROBE_TIMEOUT_S))
        return min(max(run.times.expected_s, PROBE_TIMEOUT_S, load_s), most_s)

    def _probe_run(self, group: PlanGroup, run: Run, now: float) -> list[CoordinatorCommand]:
        run.probed_s = now
        late = [d for d in run.plan.devices if d not in run.answers.reports]
        text = f"A run of {run.plan.model} is late; probing {', '.join(late)}"
        return [LogEvent("doubt", text), *self._rollout.probe(group, run.plan, late)]

    def _silent_devices(self, run: Run) -> list[str]:
        assert run.probed_s is not None
        usable = self._fleet.usable()
        late = [usable[d] for d in run.plan.devices if d not in run.answers.reports and d in usable]
        return [m.name for m in late if m.last_message_s < run.probed_s]

    def _unprepared(self, record: PlanRecord, now: float) -> dict[str, HungDevice]:
        usable = self._fleet.usable()
        late = {}
        for device in record.unready_devices & set(usable):
            begun_s = record.device_progress_s.get(device, record.begun_s)
            if now - max(usable[device].last_message_s, record.begun_s) > PREPARE_SILENCE_S:
                late[device] = HungDevice(device, "does not answer while it prepares a plan")
            elif now - begun_s > PROGRESS_S:
                late[device] = HungDevice(device, "prepares a plan without progress", is_silent=False)
            elif now - record.begun_s > LOAD_MAX_S + record.needed_bytes(device) / SLOWEST_LOAD_BYTES_PER_S:
                late[device] = HungDevice(device, "takes too long to prepare a plan", is_silent=False)
        return late


# ----------------------------------------------------------------------------------------------------------------------
# Debounce of last wills: a broker that shuts down publishes every device's will although the devices are alive.


DEBOUNCE_S: Final = 0.2  # between a broker's last words and the end of our own connection, at the most
WILL_RECONNECT_S: Final = 3.0  # in which devices meet a broker again that has retained that they are gone ...
WILL_RECONNECT_MAX_S: Final = 6.0  # ... and if it was away for longer: they try again every 5 s


class LastWillDebounce:
    """Hands events to a session, wills of devices with a delay.

    A device that publishes "online" meanwhile was never away. Wills from before the end of our own connection are
    dropped: the broker publishes them again if they hold. An `offline` with a reason is the device's own, so no will.
    """

    def __init__(self, session: CoordinatorSession) -> None:
        self._session = session
        self._held: dict[str, tuple[float, DeviceStatus]] = {}
        self._back_by_s, self._away_s = -inf, inf

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorCommand]:
        """Take one event and return the commands that follow from it, and from wills whose delay is over."""
        out: list[CoordinatorCommand] = []
        if isinstance(event, DeviceStatus):
            self._held.pop(event.device, None)
            if event.status.state == "offline" and not event.status.reason:
                self._held[event.device] = (max(now + DEBOUNCE_S, self._back_by_s), event)
                return []
        elif isinstance(event, BrokerConnection):
            if event.is_new:
                self._held.clear()
            if event.online:
                self._back_by_s = now + min(max(now - self._away_s, WILL_RECONNECT_S), WILL_RECONNECT_MAX_S)
            self._away_s = inf if event.online else min(self._away_s, now)
        elif isinstance(event, Tick):
            for will in [will for due_s, will in self._held.values() if due_s <= now]:
                del self._held[will.device]
                out += self._session.handle(will, now)
        return out + self._session.handle(event, now)


# ----------------------------------------------------------------------------------------------------------------------
# A broker that is silent: frozen, or cut off. Its devices cannot be heard then, and nobody is to blame for it.


QUIET_S: Final = 1.5  # without a byte of the broker: then it is asked
FROZEN_S: Final = 1.5  # without an answer: then it counts as away


class BrokerWatch:
    """Finds out that a connected broker is silent, long before the connection is given up; time is an argument."""

    def __init__(self) -> None:
        self._asked_s = inf
        self._silent = False

    def look(self, heard_s: float, now: float) -> Literal["ask", "away", "back"] | None:
        """Return what to do: ask the broker for a sign of life, or treat it as away, or as back."""
        if now - heard_s < QUIET_S:
            was, self._asked_s, self._silent = self._silent, inf, False
            return "back" if was else None
        if self._asked_s == inf:
            self._asked_s = now
            return "ask"
        if not self._silent and now - self._asked_s >= FROZEN_S:
            self._silent = True
            return "away"
        return None
