"""What devices and links of a site really do over time, and what their meters say of it.

Truth: jitter of 5 % over 5 s; stalls of a CPU quota, heavy-tailed and seconds long, where `STALLED` says so; a slow
random walk; a script of changes; a device that says it is ten times as fast as measured, on a link of 1 Gbit/s; one
that has half its speed every other minute; or one that is fast only while no run uses it. Noise: meters of speed are
off by 20 % over 8 s and now and then by 2.8 times for some seconds, frame costs by 22 %, link rates are halved beside
exchanges, and every method takes other times than its price. That is harsher than what was recorded on an emulated
site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.core.errors import ConfigError
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.core.profiles import Cluster, FrameCost, PeerLink
from hepti_mqtt.protocol.messages import Heartbeat, LinkReport

Array = NDArray[Any]
KINDS: Final = ("still", "stalls", "walk", "changes", "liar", "restless", "sprinter", "cold", "filled")
STALLED: Final = ("stalls", "walk", "changes")
STEP_S: Final = 0.5  # truth is constant for so long
WARM_S: Final = 120.0  # the first minutes are no part of a verdict: nobody knows the site yet
HALVED: Final = 0.6  # of the probes beside exchanges find half the rate
SCRIPT_S: Final = 1800.0  # length of the script of changes; a shorter site plays it faster
# Of the script: from, until, and what it is called while it lasts and afterwards.
SCRIPT: Final = (
    (300, 480, "CPU at 25 %", "CPU back"),
    (600, 780, "link at 100", "link back"),
    (900, 1080, "device lost", "device back"),
    (1200, 1380, "all at 0.62", "all back"),
)
SPRINT: Final = 3.0  # times as fast is a sprinter while it has nothing to do
WAITED: Final = 10  # a recorded request that took this many times as long as usual waited for weights
SLOW_LINK: Final = 100e6 / 8  # bytes per second of the link that falls, or a quarter of one that is no faster


class Factors(NamedTuple):
    """Factors on the numbers of a site file: of slowdown, link rate and what a frame costs; [steps, devices] each."""

    slowdown: Array
    rate: Array
    frame: Array


@dataclass(frozen=True)
class Truth:
    """A site over time; arrays are [steps, devices] in the order of `names`.

    real: what devices and links are; said: the same as meters see it. up: whether a device is there. halved: whether a
    probe beside exchanges finds half the rate. run_tail [steps]: log factor of a whole run; part_tail: of a device's
    compute time in it. phases: (start in seconds, name), the first one to warm up. methods: real over predicted time of
    a plan's method. at_rest: of devices, how many times as fast they are while no run uses them. recorded: (seconds,
    device, heartbeat) to be sent instead of what meters say.
    """

    kind: str
    names: tuple[str, ...]
    real: Factors
    said: Factors
    up: Array
    halved: Array
    run_tail: Array
    part_tail: Array
    phases: tuple[tuple[float, str], ...]
    methods: Callable[[Plan], float] = lambda _plan: 1.0
    at_rest: Mapping[str, float] = field(default_factory=dict)
    recorded: Sequence[tuple[float, str, Heartbeat]] = ()

    @property
    def seconds(self) -> float:
        """Return how long the site is played."""
        return STEP_S * len(self.up)

    def step(self, now: float) -> int:
        """Return the step of a time."""
        return min(int(now / STEP_S), len(self.up) - 1)

    def cluster(self, file: Cluster, step: int) -> Cluster:
        """Return the real devices and links of a step; file: those of the site file."""
        return self._cluster(file, [x[step] for x in self.real])

    def usual_cluster(self, file: Cluster, start: int, stop: int) -> Cluster:
        """Return the devices that are there in the middle of some steps, as they are on average."""
        usual = self._cluster(file, [np.exp(np.log(x[start:stop]).mean(0)) for x in self.real])
        there = {name for name, up in zip(self.names, self.up[(start + stop) // 2], strict=True) if up}
        return replace(
            usual,
            devices={name: device for name, device in usual.devices.items() if name in there},
            links={name: link for name, link in usual.links.items() if name in there},
            peer_links={pair: link for pair, link in usual.peer_links.items() if there.issuperset(pair)},
            endpoints=usual.endpoints & there,
        )

    def _cluster(self, file: Cluster, factors: Sequence[Array]) -> Cluster:
        devices, links, rates = {}, {}, dict(zip(self.names, factors[1].tolist(), strict=True))
        for name, s, r, f in zip(self.names, *(x.tolist() for x in factors), strict=True):
            profile, link = file.devices[name], file.links[name]
            cost = FrameCost(profile.mesh_frame_s * s * f, s * f / profile.mesh_copy_bytes_per_s)
            devices[name] = replace(profile, slowdown=s, mesh_frame_cost=cost)
            up, down = link.up_bytes_per_s * r, link.down_bytes_per_s * r
            links[name] = replace(link, up_bytes_per_s=up, down_bytes_per_s=down)
        peers = {
            (a, b): PeerLink(link.latency_s, link.bytes_per_s and link.bytes_per_s * min(rates[a], rates[b]))
            for (a, b), link in file.peer_links.items()
        }
        return replace(file, devices=devices, links=links, peer_links=peers)

    def heartbeat(
        self, file: Cluster, name: str, now: float, start: tuple[int, int], load: float, busy: bool
    ) -> Heartbeat:
        """Return what a device says of itself.

        start: its boot and the heartbeat's number. load: factor on its ops for what it does beside. busy: in a run.
        """
        k, i = self.step(now), self.names.index(name)
        half = 0.5 if busy and self.halved[k, i] else 1.0
        said = self._cluster(file, [x[k] for x in self.said])
        own, device = said.links[name], said.devices[name]
        peers = {}
        for other, up in zip(self.names, self.up[k], strict=True):
            if up and other != name and {name, other} <= file.endpoints:
                far, rate = said.links[other], min(own.up_bytes_per_s, said.links[other].down_bytes_per_s)
                link = said.peer_links.get((name, other), PeerLink(own.latency_s + far.latency_s, rate))
                peers[other] = LinkReport(2 * link.latency_s, half * (link.bytes_per_s or rate))
        frame_s, byte_s = device.mesh_frame_cost or (None, None)
        free, slowdown, rate = (
            int(min(device.memory_bytes, 1 << 40)),
            device.slowdown * load / (1.0 if busy else self.at_rest.get(name, 1.0)),
            half * own.up_bytes_per_s,
        )
        round_trip_s = 2 * own.latency_s
        return Heartbeat(
            *start,
            0.0,
            free,
            None,
            round_trip_s,
            rate,
            slowdown,
            0,
            {},
            peers,
            peer_frame_s=frame_s,
            peer_byte_s=byte_s,
        )


def make_truth(kind: str, file: Cluster, minutes: float, seed: int) -> Truth:
    """Return a site of `KINDS` of weather; the same seed gives the same site."""
    g = np.random.default_rng([seed, KINDS.index(kind)])
    names, steps = tuple(file.devices), int(60 * minutes / STEP_S)
    n, shape = len(names), (steps, len(names))
    slow, rate = np.tile(g.normal(0, 0.02, n), (steps, 1)), np.tile(g.normal(0, 0.03, n), (steps, 1))
    frame, up = np.full(shape, g.normal(0, 0.4)), np.ones(shape, bool)
    phases: list[tuple[float, str]] = [(0.0, "warm"), (WARM_S, kind)]
    if kind in ("cold", "filled"):  # nothing is loaded yet, and requests come from the first second
        phases = [(0.0, "nothing"), (0.0, kind)]
    if kind == "changes":
        phases = _script(g, [file.links[d].up_bytes_per_s for d in names], slow, rate, up)
    if kind == "walk":
        slow += np.cumsum(g.normal(0, 0.05 * np.sqrt(STEP_S / 60), shape), 0)
        rate += np.cumsum(g.normal(0, 0.05 * np.sqrt(STEP_S / 60), shape), 0)
        phases[1:] = [(float(at), "walk") for at in np.arange(WARM_S, 60 * minutes, WARM_S)]
    if kind == "restless":
        slow[:, g.integers(0, n)] += log(2) * (np.arange(steps) * STEP_S // 60 % 2)
    at_rest = {}
    if kind == "sprinter":
        slow[:, sprinter := g.integers(0, n)] += log(SPRINT)
        at_rest[names[sprinter]] = SPRINT
    jitter = _wander(g, shape, 0.05, 5.0)
    for device in range(n) if kind in STALLED else ():
        for k in _moments(g, steps, 120.0, 2.5):
            jitter[k, device] += min(abs(g.standard_t(3)) * 0.35, 1.4)
    slow, rate = slow + jitter, rate + _wander(g, shape, 0.03, 10.0)
    said_slow = slow + _wander(g, shape, 0.20, 8.0) + 0.08 * g.standard_t(3, shape)
    for device in range(n):
        for k in _moments(g, steps, 150.0, 6.0):
            said_slow[k, device] += g.choice([1.05, -1.0])
    frame += _wander(g, shape, 0.1, 10.0)
    said_rate = rate + _wander(g, shape, 0.08, 6.0) + 0.05 * g.standard_t(4, shape)
    if kind == "liar":
        said_slow[:, liar := g.integers(0, n)] -= log(10)
        said_rate[:, liar] = log(1e9 / 8 / file.links[names[liar]].up_bytes_per_s)
    said_frame = frame + _wander(g, shape, 0.22, 12.0)
    return Truth(
        kind,
        names,
        Factors(np.exp(slow), np.exp(rate), np.exp(frame)),
        Factors(np.exp(said_slow), np.exp(said_rate), np.exp(said_frame)),
        up,
        g.random(shape) < HALVED,
        0.03 * g.standard_t(3, steps),
        0.05 * g.standard_t(3, shape),
        tuple(phases),
        _method_factors(seed, g.normal(0, 0.15)),
        at_rest,
    )


def recorded_truth(file: Cluster, lines: Sequence[Mapping[str, Any]]) -> Truth:
    """Return a site in which nothing changes and devices tell what was recorded on another one.

    lines: one mapping per heartbeat, `t` in seconds, `device` and the fields of `Heartbeat` but for counters and edges,
    and one per request, `t` and `ms`. Runs take as much longer than usual as the recorded ones did, but for those that
    waited for weights.
    Raises ConfigError for another number of devices than in the file.
    """
    heartbeats, requests = [x for x in lines if "device" in x], [x for x in lines if "ms" in x]
    names, told = tuple(file.devices), sorted({x["device"] for x in heartbeats})
    if len(told) != len(names):
        raise ConfigError(f"the recording is of {len(told)} devices, the site file of {len(names)}")
    ours, zero_s = dict(zip(told, names, strict=True)), min(x["t"] for x in heartbeats)
    beats = []
    for x in heartbeats:
        peers = {ours[peer]: LinkReport(*link) for peer, link in x["peers"].items()}
        fields = {key: value for key, value in x.items() if key not in ("t", "device", "peers")}
        beats.append((x["t"] - zero_s, ours[x["device"]], Heartbeat(**fields, peers=peers)))
    steps = int(beats[-1][0] / STEP_S) + 1
    calm = np.ones((steps, len(names)))
    tail, usual_ms = np.zeros(steps), median([x["ms"] for x in requests] or [1.0])
    for x in requests:
        if x["ms"] < WAITED * usual_ms:
            tail[max(int((x["t"] - zero_s) / STEP_S), 0) :] = log(x["ms"] / usual_ms)
    same, there, phases = Factors(calm, calm, calm), calm > 0, ((0.0, "warm"), (60.0, "recorded"))
    part_tail = np.tile(tail[:, None], len(names))
    return Truth("recorded", names, same, same, there, ~there, tail, part_tail, phases, recorded=beats)


def _script(
    g: np.random.Generator, rates: Sequence[float], slow: Array, rate: Array, up: Array
) -> list[tuple[float, str]]:
    """Write the changes into the logs of slowdown and rate, and into `up`; return the phases."""
    scale = STEP_S * len(slow) / SCRIPT_S
    (cpu, link, lost), (a, b, c, d) = (
        g.integers(0, len(rates), 3),
        (slice(int(start * scale / STEP_S), int(stop * scale / STEP_S)) for start, stop, _, _ in SCRIPT),
    )
    slow[a, cpu] += log(4)
    rate[b, link] += log(SLOW_LINK / rates[link]) if rates[link] > 1.2 * SLOW_LINK else log(0.25)
    up[c, lost] = False
    slow[d] -= log(0.62)
    ends = [(at * scale, name) for start, stop, name, over in SCRIPT for at, name in ((start, name), (stop, over))]
    return [(0.0, "warm"), (min(WARM_S, 0.5 * ends[0][0]), "steady"), *ends]


def _method_factors(seed: int, site: float) -> Callable[[Plan], float]:
    """Return by how much methods take longer than their price on a site: all of them alike, and each by itself."""

    def factor(plan: Plan) -> float:
        g = np.random.default_rng([seed, *plan.method.encode()])
        return exp(g.normal(0, 0.05)) if len(plan.devices) == 1 else exp(site + g.normal(0, 0.08))

    return factor


def _wander(g: np.random.Generator, shape: tuple[int, int], sd: float, tau_s: float) -> Array:
    """Return noise [steps, devices] that is correlated over `tau_s` (Ornstein and Uhlenbeck's process)."""
    keep = exp(-STEP_S / tau_s)
    errors, out = g.normal(0, sd * np.sqrt(1 - keep * keep), shape), np.zeros(shape)
    x = g.normal(0, sd, shape[1])
    for k in range(shape[0]):
        x = out[k] = keep * x + errors[k]
    return out


def _moments(g: np.random.Generator, steps: int, between_s: float, last_s: float) -> list[slice]:
    """Return the steps of things that happen now and then for a while."""
    found, at = [], 0.0
    while (at := at + g.exponential(between_s)) < STEP_S * steps:
        found.append(slice(int(at / STEP_S), int((at + g.exponential(last_s)) / STEP_S) + 1))
    return found
