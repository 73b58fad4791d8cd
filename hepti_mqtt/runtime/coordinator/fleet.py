"""The devices of the site: membership, crash backoff, hang detection, debounce of last wills, and broker silence."""

from __future__ import annotations

import hmac
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import exp, inf
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from hepti_mqtt import __version__
from hepti_mqtt.core.ids import Start
from hepti_mqtt.core.plan import DevicePair, Plan
from hepti_mqtt.core.profiles import Cluster, default_frame_cost
from hepti_mqtt.cost.loads import LoadRates, Mask
from hepti_mqtt.cost.reported import ReportedDevice, reported_cluster
from hepti_mqtt.planner.estimates import SiteEstimates
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.keys import UNKEYED, Channel, Checked, FrameKey, Seal, agree, frame_key, public_key
from hepti_mqtt.runtime.coordinator.interface import (
    BrokerState,
    CoordinatorCommand,
    CoordinatorEvent,
    DeviceStatus,
    LogEvent,
    Tick,
)
from hepti_mqtt.runtime.coordinator.runs import Run

if TYPE_CHECKING:
    from hepti_mqtt.runtime.coordinator.plan_groups import PlanGroup, PlanGroups
    from hepti_mqtt.runtime.coordinator.plans import PlanRecord, ServedModel
    from hepti_mqtt.runtime.coordinator.rollout import Rollout, Standby
    from hepti_mqtt.runtime.coordinator.session import CoordinatorSession


# Membership: devices by their retained status, caps and heartbeats.


PROBED_PACKET_BYTES: Final = 4 << 20  # the largest packet that agents on MQTT 3.1.1 probe, so it is not a limit
RETURN_S: Final = 10.0  # requests wait this long for a device that has left
TYPICAL_ROWS: Final = 128  # rows of the products that a device's speed is measured by
FIRST_PROBES_S: Final = 2.5  # first link measurements of a device after it comes online
SILENT_RETURN_S: Final = 60.0  # like `RETURN_S`, if heartbeats stopped without a last will
RECONNECT_S: Final = 3.0  # devices reconnect to a broker within this time after the planner
QUARANTINE_S: Final = 10.0  # first quarantine of a device that hangs; doubled each time
QUARANTINE_MAX_S: Final = 300.0
SETBACKS: Final = 3  # runs or plans that fail because of a device, before its quarantine
SETBACK_WINDOW_S: Final = 30.0  # in which setbacks count; a request survives as many losses
HEARTBEAT_TIMEOUT_S: Final = 6.0  # a device without heartbeats is lost, whatever its status says
SILENT_S: Final = 15.0  # requests wait this long for a starting device that is silent; it reports every 2 s
STARTING_S: Final = 900.0  # requests wait this long for a starting device
RELAYED_S: Final = 600.0  # the broker relays for this long between devices that could not connect
LOSS_S: Final = 86400.0  # prior interval between losses of a device
UNWANTED: Final = "switched off for inference"
NO_START: Final = Start(0, 0)
MAX_MEMBERS: Final = 512  # remembered devices; beyond them, unusable ones are forgotten first


@dataclass(slots=True)
class Member:
    """One device."""

    name: str
    start: Start = NO_START
    boot_before: int = 0  #: boot of the start that plans used, if a new start appeared before the old one ended
    online: bool = False
    online_s: float = -inf  #: when it last came online
    caps: messages.Caps | None = None
    other_caps: messages.Caps | None = None  #: caps of a start without a status so far
    heartbeat: messages.Heartbeat | None = None
    last_heartbeat_s: float = 0.0
    starting_s: float | None = None  #: begin of its startup, None if it is not starting
    left_s: float = -inf  #: when it was last lost
    heartbeats_stopped: bool = False  #: it is offline only because heartbeats stopped
    refused: str = ""  #: why plans do not use it until it restarts
    wanted: bool = True  #: people let plans use it
    last_message_s: float = -inf  #: time of its last message about a run or a plan
    quarantined_until_s: float | None = None  #: plans do not use it until then, because it hangs or is unreliable
    quarantines: int = 0  #: number since it last completed a run
    mute: bool = False  #: its next message ends the quarantine
    unreachable_until_s: dict[str, float] = field(default_factory=dict)  #: peers that it could not connect to
    implausible: str = ""  #: its last implausible report
    farewell: str = ""  #: reason in its offline status; empty in a last will
    setbacks: deque[float] = field(default_factory=lambda: deque(maxlen=SETBACKS))  #: times of failures that it caused
    unreliable: bool = False  #: quarantined because of setbacks
    channel: Channel | None = None  #: authenticates messages; None if the device or the planner has no key
    contradiction_reported: bool = False
    cached: dict[str, Mask] = field(default_factory=dict)  #: reported tiles in its cache, by model
    expected_rates: LoadRates = field(default_factory=LoadRates)  #: estimated from its speed
    reported_rates: LoadRates = field(default_factory=lambda: LoadRates(0.0, 0.0))  #: 0: not measured

    @property
    def boot(self) -> int:
        """Return the boot of the device's start, 0 before its first status."""
        return self.start.boot

    @property
    def load_rates(self) -> LoadRates:
        """Return the rates at which it loads tiles with its whole processor."""
        return LoadRates(*(own or other for own, other in zip(self.reported_rates, self.expected_rates, strict=True)))

    def is_there(self, now: float) -> bool:
        """Return whether the current start sends heartbeats; if so, ignore starts of a lower term."""
        return (self.online or self.starting_s is not None) and now - self.last_heartbeat_s <= HEARTBEAT_TIMEOUT_S

    @property
    def usable(self) -> bool:
        """Return whether plans may use the device: online, wanted, and described by caps of the same start."""
        may_serve = self.online and self.wanted and not self.refused and self.quarantined_until_s is None
        return may_serve and self.caps is not None and self.caps.boot == self.boot

    def is_expected(self, now: float) -> bool:
        """Return whether it may be usable soon: it is starting, or has just left."""
        if not self.wanted:
            return False
        if self.starting_s is not None:
            return now - self.starting_s <= STARTING_S and now - self.last_heartbeat_s <= SILENT_S
        wait_s = SILENT_RETURN_S if self.heartbeats_stopped else RETURN_S
        return not self.usable and not self.refused and now - self.left_s < wait_s

    @property
    def endpoint(self) -> messages.Endpoint | None:
        """Return the endpoint at which peers read from it, None if they cannot."""
        return None if self.caps is None else self.caps.endpoint

    def can_receive_from(self, source: Member, now: float) -> bool:
        """Return whether the device may receive frames directly from another one."""
        if self.endpoint is None or source.endpoint is None or self.unreachable_until_s.get(source.name, -inf) > now:
            return False
        if bool(self.endpoint.fingerprint) is not bool(source.endpoint.fingerprint):
            return False  # one speaks TLS, the other does not
        return self.endpoint.loopback or not source.endpoint.loopback

    @property
    def kind(self) -> str:
        """Return the key by which devices are assumed equal until measurements show otherwise."""
        assert self.caps is not None
        return f"{self.caps.isa}, {self.caps.cores} cores, {self.caps.threads} threads"


class Fleet:
    """All devices of the site, and the estimates of them.

    broker_bytes_per_s: rate of the broker's link, None if it is not configured. secret: the planner's secret, from
    which keys and the tokens of peers are derived; without it there is no mesh. checked: what frame tags cover.
    """

    def __init__(
        self, broker_bytes_per_s: float | None = None, *, secret: bytes | None = None, checked: Checked = "header"
    ) -> None:
        self._broker_bytes_per_s, self.secret, self._checked = broker_bytes_per_s, secret, checked
        self.public_key = "" if secret is None else public_key(secret)
        self._numbers = count(1)  # sequence numbers of messages to devices
        self.members: dict[str, Member] = {}
        self.estimates = SiteEstimates()
        self._losses, self._watched_from_s = 0, inf
        self._met_s = -inf  # when the planner last reconnected to the broker
        self._silent: set[str] = set()  # devices without a heartbeat since the last reconnection to the broker

    def make_room(self, name: str) -> bool:
        """Return whether a device has a place; if all are taken, forget an unusable device for it."""
        if name in self.members or len(self.members) < MAX_MEMBERS:
            return True
        absent = [m for m in self.members.values() if not m.usable and m.wanted]
        if absent:
            oldest = min(absent, key=lambda m: m.last_heartbeat_s).name
            del self.members[oldest]
            self.estimates.forget_device(oldest)
        return bool(absent)

    def member(self, name: str) -> Member:
        """Return a device, added if it is new."""
        return self.members.setdefault(name, Member(name))

    def record_status(self, name: str, status: messages.Status, now: float) -> str | None:
        """Take a status; return "joined", "left", "starting" or None.

        Ignore a late will of an earlier start, and "starting" from a start that is online.
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
        member.heartbeats_stopped = False
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
        """Record whether people let plans use a device; return "joined", "unwanted" or None."""
        member = self.member(name)
        was, member.wanted = member.usable, wanted
        return None if was == member.usable else "unwanted" if was else "joined"

    def _begin(self, member: Member, start: Start) -> None:
        """Begin a new start of a device, with its caps if they came before its status."""
        if member.usable:
            member.boot_before = member.boot
        member.start, member.starting_s = start, None
        if not member.unreliable:
            member.quarantined_until_s = None
        member.cached.clear()  # another start may have another disk
        self._forget_unreachable(member)  # another start may have another endpoint, and reach other endpoints
        caps, member.other_caps = member.other_caps, None
        if caps is not None:
            self.record_caps(member.name, caps)

    def record_caps(self, name: str, caps: messages.Caps) -> str | None:
        """Take caps; return "joined" if the device becomes usable, "left" if it becomes unusable.

        Caps of another start may be forged, so they wait for its status.
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

    def _take_caps(self, member: Member, caps: messages.Caps) -> None:
        """Take the caps of the current start; refuse a device of an incompatible version."""
        if not self._agree(member, caps):
            return
        before, member.caps = member.caps, caps
        if before is not None and (before.boot, before.version) != (caps.boot, caps.version):
            member.refused = ""
        if before is None or before.boot != caps.boot:  # a new start has measured itself again
            self.estimates.forget_device(member.name)
        endpoint, profile = caps.endpoint, self._reported(member, 0).profile()
        member.expected_rates = LoadRates.expected(profile.speed(TYPICAL_ROWS))
        cost = None if endpoint is None or endpoint.loopback else default_frame_cost(profile)
        self.estimates.add_device(member.name, member.kind, cost)
        if not messages.is_compatible(caps.version):
            self.refuse(member.name)

    def _agree(self, member: Member, caps: messages.Caps) -> bool:
        """Agree with a device on a secret; return whether its caps are accepted.

        A verified device cannot change its key or version before its next start.
        """
        before = member.caps if member.caps is not None and member.caps.boot == caps.boot else None
        is_same = before is not None and (before.public_key, before.version) == (caps.public_key, caps.version)
        if self.secret is None or is_same:
            return True
        if before is not None and member.channel is not None and member.channel.verified:
            return False
        secret = agree(self.secret, caps.public_key) if caps.public_key else None
        member.channel = None if secret is None else Channel(secret, self._numbers, at_planner=True)
        return True

    def seal(self, name: str, message: messages.Message) -> bytes:
        """Return the payload of a message to a device."""
        payload, member = messages.encode(message), self.members.get(name)
        return payload if member is None or member.channel is None else member.channel.seal(payload)

    def accepts(self, name: str, seal: Seal | None) -> bool:
        """Return whether a message is authentic; always True for a device without a key."""
        member = self.members.get(name)
        return member is None or member.channel is None or member.channel.accepts(seal)

    def frame_key(self, plan: Plan) -> FrameKey:
        """Return the key of a plan's frames; `UNKEYED` unless all of its devices have keys."""
        channels = (self.member(device).channel for device in plan.devices)
        if self.secret is None or any(channel is None for channel in channels):
            return UNKEYED
        return frame_key(self.secret, plan.model, plan.version, self._checked)

    def wrapped_key(self, plan: Plan, name: str) -> bytes:
        """Return the key of a plan's frames, encrypted for one of its devices."""
        key, channel = self.frame_key(plan).key, self.member(name).channel
        return key if channel is None else channel.wrapped(key, plan.model, plan.version)

    def record_heartbeat(
        self, name: str, heartbeat: messages.Heartbeat, now: float, *, busy: bool = False, loading: bool = False
    ) -> str | None:
        """Take a heartbeat; return "joined" if the device becomes usable: its heartbeats stopped, but it did not leave.

        A heartbeat of another start counts, whatever its term, if the current one is silent. busy: the device takes
        part in a run. loading: a device of the site loads weights.
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
            # Heartbeats have their own connection, so the first one may come before the status.
            member.online, member.heartbeats_stopped, member.online_s = True, False, now
            return "joined" if member.usable else None
        return None

    def record_message(self, name: str, now: float, *, served: bool = False) -> str | None:
        """Record a message about a run or a plan; return "joined" if it ends the quarantine. served: a run is done."""
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

    def record_tiles(self, name: str, message: messages.CachedTiles, served: ServedModel) -> None:
        """Take the tiles in a device's cache and its rates; ignore them if the manifest differs."""
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
        """Return the rate at which a device loads tiles that are not in its cache."""
        return min(self.members[device].load_rates.receive_bytes_per_s, self.estimates.link(device).down_bytes_per_s)

    def load_rates(self) -> dict[str, LoadRates]:
        """Return the rates at which devices load tiles."""
        return {name: member.load_rates for name, member in self.members.items()}

    def quarantine(self, name: str, now: float, mute: bool) -> None:
        """Quarantine a device, each time longer; mute: at most until its next message."""
        member = self.members[name]
        member.mute = mute
        member.quarantined_until_s = now + min(QUARANTINE_S * 2**member.quarantines, QUARANTINE_MAX_S)
        member.quarantines += 1

    def record_setback(self, name: str, now: float) -> bool:
        """Record that a run or a plan failed because of a device; return whether it is quarantined for that.

        The quarantine outlasts a restart. A device stays usable if no other one is.
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
        """Return the probability that a device is lost within some seconds, from the recorded losses."""
        self._watched_from_s = min(self._watched_from_s, now)
        watched_s = (now - self._watched_from_s) * len(self.members)
        return 1 - exp(-seconds * (self._losses + 1) / (watched_s + LOSS_S))

    def reset_silence(self, now: float) -> None:
        """Restart every device's heartbeat timeout."""
        self._silent, self._met_s = set(self.members), now
        for member in self.members.values():
            member.last_heartbeat_s = now
            member.last_message_s = max(member.last_message_s, now)

    def all_back(self, names: Collection[str]) -> bool:
        """Return whether each of these devices sent a heartbeat since the last reconnection to the broker."""
        return not self._silent.intersection(names)

    def mark_silent_offline(self, now: float) -> list[str]:
        """Return the usable devices whose heartbeats have stopped, and mark them offline."""
        lost = [m for m in self.members.values() if m.usable and now - m.last_heartbeat_s > HEARTBEAT_TIMEOUT_S]
        for member in lost:
            member.online, member.heartbeats_stopped = False, True
        return [m.name for m in lost]

    def record_unreachable(self, name: str, sources: Iterable[str], now: float) -> None:
        """Record that a member cannot connect to others; the broker relays their frames for a while."""
        if name in self.members:
            members = [source for source in sources if source in self.members]
            self.members[name].unreachable_until_s.update(dict.fromkeys(members, now + RELAYED_S))

    def relayed_pairs(self, now: float) -> frozenset[DevicePair]:
        """Return the (source, target) pairs of usable devices whose frames the broker must relay."""
        usable = self.usable().values()
        return frozenset(
            (s.name, t.name) for s in usable for t in usable if s is not t and not t.can_receive_from(s, now)
        )

    def _forget_unreachable(self, member: Member) -> None:
        member.unreachable_until_s.clear()
        for other in self.members.values():
            other.unreachable_until_s.pop(member.name, None)

    def refuse(self, name: str) -> str:
        """Refuse a device of an incompatible version until it restarts; return the reason."""
        member = self.member(name)
        version = member.caps.version if member.caps is not None else "unknown"
        member.refused = (
            f"{name} runs an incompatible version ({version}): it compiles plans differently. Install the planner's "
            f"version ({__version__})."
        )
        return member.refused

    def unused_reasons(self) -> dict[str, str]:
        """Return why the planner does not use devices that are online."""
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
                how = "too many runs or plans failed on it" if member.unreliable else f"{silent} while others waited"
                times = f" ({member.quarantines} times)" if member.quarantines > 1 else ""
                why[member.name] = f"{how}{times}; retried later"
        return {name: text for name, text in why.items() if self.members[name].online}

    def machines(self) -> dict[str, str]:
        """Return the address of each device that runs on the same machine as another device."""
        hosts = {name: member.endpoint.host for name, member in self.members.items() if member.endpoint is not None}
        counts = Counter(hosts.values())
        return {name: host for name, host in hosts.items() if counts[host] > 1}

    def expected(self, now: float) -> set[str]:
        """Return the devices that may be usable soon: they are starting, or have just left."""
        return {m.name for m in self.members.values() if m.is_expected(now)}

    def describe_expected(self, now: float) -> str:
        """Return the devices that requests may wait for, in words; "" if there are none."""
        unmet = "devices that have not reconnected to the broker" if now - self._met_s < RECONNECT_S else ""
        return ", ".join(sorted(self.expected(now))) or unmet

    def must_wait_for(self, names: Collection[str], now: float) -> bool:
        """Return whether a search must wait for devices: for all of these, or without names for a first device."""
        usable = set(self.usable())
        if now - self._met_s < RECONNECT_S:
            return not usable or not usable.issuperset(names)
        coming = self.expected(now)
        return bool(coming & (set(names) - usable)) if names else bool(coming) and not usable

    def is_measuring(self, now: float) -> bool:
        """Return whether a usable device on another machine than the broker is still making its first link probes."""
        young = (m.name for m in self.usable().values() if now - m.online_s < FIRST_PROBES_S)
        return any(map(self.estimates.has_link, young))

    def refusal_reasons(self) -> list[str]:
        """Return why online devices are switched off or refused."""
        online = [m for m in self.members.values() if m.online]
        unwanted = [f"{m.name} is {UNWANTED}" for m in online if not m.wanted]
        return unwanted + [m.refused for m in online if m.refused and m.wanted]

    def usable(self) -> dict[str, Member]:
        """Return the devices that plans may use."""
        return {m.name: m for m in self.members.values() if m.usable}

    def packet_limits(self) -> dict[str, int]:
        """Return the largest packet that reaches each usable device with a limit below the probed size."""
        limits = {m.name: m.caps.largest_packet_bytes for m in self.usable().values() if m.caps is not None}
        return {name: limit for name, limit in limits.items() if 0 < limit < PROBED_PACKET_BYTES}

    def cluster(self, reserved: Mapping[str, int]) -> Cluster:
        """Return profiles and links of the usable devices, without the memory reserved on them."""
        devices = [self._reported(m, reserved.get(m.name, 0)) for m in self.usable().values()]
        return reported_cluster(devices, self._broker_bytes_per_s, mesh=self.secret is not None)

    def _reported(self, member: Member, reserved_bytes: int) -> ReportedDevice:
        """Return a device by its caps and the means of its estimates."""
        caps, name, estimates = member.caps, member.name, self.estimates
        assert caps is not None
        return ReportedDevice(
            name,
            caps.curves,
            max(caps.memory_budget_bytes - reserved_bytes, 0),
            estimates.slowdown(name),
            estimates.link(name),
            estimates.peer_links(name),
            estimates.frame_cost(name),
            caps.endpoint,
        )


def peers_of(plan: Plan, device: str, fleet: Fleet) -> tuple[messages.Peer, ...]:
    """Return the peers of a device under a plan, with the tokens that admit each to the other.

    Peers exchange tiles of weights under every route, and tensors only under route `mesh`. Tokens are derived from the
    planner's secret, the plan version and the pair, so a repeated Prepare carries the same tokens.
    """

    secret = fleet.secret

    def token(source: str, target: str) -> str:  # "" if the broker relays in this direction
        if secret is None or (source, target) in plan.relayed_pairs:
            return ""
        text = "\0".join(map(str, (plan.model, *plan.version, source, target)))
        return hmac.digest(secret, text.encode(), "sha256").hex()

    ends = ((d, fleet.member(d).endpoint) for d in plan.devices if d != device)
    peers = (
        messages.Peer(d, endpoint, token(d, device), token(device, d)) for d, endpoint in ends if endpoint is not None
    )
    return tuple(peer for peer in peers if peer.token_in or peer.token_out)


# ----------------------------------------------------------------------------------------------------------------------
# Crash backoff: repeated crashes soon after a Prepare lower the memory that plans may use on a device.
#
# If a control group grants less memory than the device reports, the same plan kills the agent each time. A single crash
# does not count, because a restarted device must serve immediately. A device that returns with the same boot was only
# disconnected, and a device that gave a reason did not crash. If no other device can serve, the limits are lifted:
# answers between two crashes are better than none.


CRASH_WINDOW_S: Final = 30.0  # a crash this soon after a Prepare may be caused by the plan
REPEAT_WINDOW_S: Final = 300.0  # in which a second crash counts
BACKOFF_S: Final = 60.0  # duration of the first limit, doubled after each further crash
BACKOFF_MAX_S: Final = 3600.0
MEMORY_FACTOR: Final = 0.75  # new limit as a share of the memory that the plan needed


@dataclass(slots=True)
class _Crash:
    limit_bytes: int  #: of memory; 0: no limit
    rest_s: float  #: duration of the limit
    until_s: float  #: end of the limit
    forgotten_s: float


class CrashBackoff:
    """The devices that crashed soon after a Prepare of one model."""

    def __init__(self) -> None:
        self._departures: dict[str, tuple[int, int]] = {}  #: boot and needed bytes by device
        self._crashes: dict[str, _Crash] = {}

    def record_departure(self, device: str, boot: int, needed_bytes: int, given_s: float, now: float) -> None:
        """Record that a device has left; `given_s`: last exchange about a plan that needs `needed_bytes`."""
        if now - given_s <= CRASH_WINDOW_S:
            self._departures[device] = (boot, needed_bytes)

    def record_return(self, device: str, boot: int, now: float) -> None:
        """Record that a device is back; a new boot means a crash."""
        boot_before, needed_bytes = self._departures.pop(device, (boot, 0))
        if boot_before == boot:
            return
        before = self._crashes.get(device)
        if before is None:
            self._crashes[device] = _Crash(0, BACKOFF_S / 2, now, now + REPEAT_WINDOW_S)
            return
        rest_s = min(2 * before.rest_s, BACKOFF_MAX_S)
        self._crashes[device] = _Crash(
            int(MEMORY_FACTOR * needed_bytes), rest_s, now + rest_s, now + rest_s + REPEAT_WINDOW_S
        )

    def memory_limits(self, now: float) -> dict[str, int]:
        """Return the current memory limits by device."""
        return {device: crash.limit_bytes for device, crash in self._crashes.items() if now < crash.until_s}

    def lift(self, devices: Collection[str], now: float) -> list[str]:
        """Lift the limits of these devices early; return the devices that had one."""
        limited = sorted(self.memory_limits(now).keys() & set(devices))
        for device in limited:
            self._crashes[device].limit_bytes, self._crashes[device].until_s = 0, now
        return limited

    def lift_expired(self, now: float) -> list[str]:
        """Return each device with an expired limit once; forget old crashes."""
        for device in [device for device, crash in self._crashes.items() if now >= crash.forgotten_s]:
            del self._crashes[device]
        expired = [device for device, crash in self._crashes.items() if now >= crash.until_s and crash.limit_bytes]
        for device in expired:
            self._crashes[device].limit_bytes = 0
        return expired


# ----------------------------------------------------------------------------------------------------------------------
# Hang detection: probe the devices of a late run, and quarantine devices that do not answer.
#
# The computing thread sends messages about runs and plans, another thread heartbeats; so only silence of the former
# counts. After a lost tensor all devices still answer; such a run is retried later.


PROBE_TIMEOUT_S: Final = 0.5  # least time for an answer to a probe, see `HangDetector._patience_s`
PROBE_TIMEOUT_MAX_S: Final = 5.0
PREPARE_SILENCE_S: Final = 6.0  # without a message, after two Prepares
PROGRESS_S: Final = 20.0  # with messages, but without progress
LOAD_MAX_S: Final = 300.0  # limit of a preparation, plus the load time over the slowest link
SLOWEST_LOAD_BYTES_PER_S: Final = 1e5
STALLED_S: Final = 0.5  # a tick this late means that this process or the broker was held up


class HungDevice(NamedTuple):
    """A device to quarantine, and why; is_silent: its next message ends the quarantine."""

    device: str
    reason: str
    is_silent: bool = True


class HangDetector:
    """Watches the runs and preparations of all groups; probes devices by a Prepare."""

    def __init__(self, groups: PlanGroups, fleet: Fleet, rollout: Rollout, standby: Standby) -> None:
        self._groups, self._fleet, self._rollout, self._standby = groups, fleet, rollout, standby
        self._ticked_s = self._heard_s = float("inf")

    def tick(self, now: float, heard_s: float) -> tuple[list[CoordinatorCommand], list[HungDevice]]:
        """Return probes of late devices, and the devices that did not answer although others can serve.

        heard_s: last sign of life of the broker; a device's silence counts only while the broker is heard.
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
                # An idle broker that has acknowledged the probe is quiet until the next heartbeat.
                pause_s = QUIET_S if heard_before_s > run.probed_s else STALLED_S
                if was_held_up or heard_s - heard_before_s > pause_s:
                    out += self._probe_run(group, run, now)
                elif heard_s > run.probed_s < now - self._patience_s(group, run):
                    how = "does not answer while a run is overdue"
                    late |= {device: HungDevice(device, how) for device in self._silent_devices(run)}
            record = group.plans.preparing
            if record is not None and record.state == "preparing":
                late |= self._unprepared(record, heard_s)
            # No other device can serve a group that pins its devices.
            pinned = group.plans.pins.devices or ()
            silent |= {device: hung for device, hung in late.items() if device not in pinned}
        can_serve = set(self._fleet.usable()) - set(silent)
        return out, list(silent.values()) if can_serve else []

    def _patience_s(self, group: PlanGroup, run: Run) -> float:
        """Return how long to wait for answers to the probe of a late run.

        A replacement of a silent device costs the load of its weights on other devices, so the wait is as long as that
        load, but ends before the run is retried.
        """
        assert run.probed_s is not None
        record = group.plans.active
        load_s = 0.0
        if record is not None and not self._standby.is_held(group):
            needed = {device: record.needed_bytes(device) for device in run.plan.devices}
            load_s = max(nbytes / self._fleet.load_bytes_per_s(device) for device, nbytes in needed.items())
        limit_s = min(PROBE_TIMEOUT_MAX_S, max(run.times.deadline_s - run.probed_s, PROBE_TIMEOUT_S))
        return min(max(run.times.expected_s, PROBE_TIMEOUT_S, load_s), limit_s)

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


DEBOUNCE_S: Final = 0.2  # a broker that shuts down ends the planner's connection within this time after the wills
WILL_RECONNECT_S: Final = 3.0  # devices reconnect within this time to a broker that retained their wills
WILL_RECONNECT_MAX_S: Final = 6.0  # the same after a longer outage: devices try again every 5 s


class LastWillDebounce:
    """Passes events on to a session, last wills with a delay.

    "online" cancels a will of the same device. A new connection drops all wills, because the broker publishes valid
    ones again. An `offline` with a reason comes from the device, so it is not a will.
    """

    def __init__(self, session: CoordinatorSession) -> None:
        self._session = session
        self._held: dict[str, tuple[float, DeviceStatus]] = {}
        self._back_by_s, self._away_s = -inf, inf

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorCommand]:
        """Handle an event and due wills; return their commands."""
        out: list[CoordinatorCommand] = []
        if isinstance(event, DeviceStatus):
            self._held.pop(event.device, None)
            if event.status.state == "offline" and not event.status.reason:
                self._held[event.device] = (max(now + DEBOUNCE_S, self._back_by_s), event)
                return []
        elif isinstance(event, BrokerState):
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
# A silent broker is frozen or cut off. Its devices cannot be heard, so they are not to blame.


QUIET_S: Final = 1.5  # silence of the broker until the planner asks for a sign of life
FROZEN_S: Final = 1.5  # silence after the question until the broker counts as away


class BrokerWatch:
    """Detects a silent broker long before its connection times out."""

    def __init__(self) -> None:
        self._ping_s = inf
        self._silent = False

    def look(self, heard_s: float, now: float) -> Literal["ask", "away", "back"] | None:
        """Return the next action: ask the broker for a sign of life, or treat it as away or back."""
        if now - heard_s < QUIET_S:
            was, self._ping_s, self._silent = self._silent, inf, False
            return "back" if was else None
        if self._ping_s == inf:
            self._ping_s = now
            return "ask"
        if not self._silent and now - self._ping_s >= FROZEN_S:
            self._silent = True
            return "away"
        return None
