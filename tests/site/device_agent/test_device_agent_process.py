"""Agents as processes at a real broker: how they join, say what they are, and end."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time

import pytest
from broker_kinds import broker_of, needs_mosquitto
from site_processes import PATIENCE_S, SITE, Site, Voice, poll

from device_agent import AgentConfig, memory_budget, run_agent
from device_agent.machine import LOADING_BYTES
from hepti_mqtt import __version__
from hepti_mqtt.cli.main import main
from hepti_mqtt.config.process import StopSignals
from hepti_mqtt.core.errors import ConfigError, NetworkError
from hepti_mqtt.cost.reported import profile_from_caps
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport.broker_limits import WANTED_BYTES
from hepti_mqtt.transport.url import BrokerUrl

TOPICS = Topics(SITE)
STARTED = lambda status: status.state != "starting"  # noqa: E731
STRICT = (sys.executable, "-W", "error", "-m", "hepti_mqtt.cli")
UNMET = "no broker answers"
DECODE = {
    "status": messages.decode_status,
    "caps": messages.decode_caps,
    "heartbeat": messages.decode_heartbeat,
    "up": lambda payload: messages.decode_sealed_report(payload)[0],
}


class Listener(Voice):
    """Hears everything that devices say."""

    def __init__(self, url):
        self.later = []
        super().__init__(url, TOPICS.all_status(), TOPICS.all_caps(), TOPICS.all_heartbeats(), TOPICS.all_reports())

    def hear(self, topic, payload):
        parsed = TOPICS.parse(topic)
        if payload and (value := DECODE[parsed.kind](payload)) != messages.QUESTION:
            self.heard.put((parsed.device, value))

    def wait(self, device, kind, condition=lambda value: True):
        """Return the first word of a kind that a device has said; others are kept for later waits."""
        until = time.monotonic() + PATIENCE_S
        fits = lambda said: said[0] == device and isinstance(said[1], kind) and condition(said[1])  # noqa: E731
        while (said := next(filter(fits, self.later), None)) is None:
            self.later.append(self.heard.get(timeout=max(until - time.monotonic(), 0.001)))
        self.later.remove(said)
        return said[1]

    def online(self, device, after=None):
        """Wait for an online start, other than `after`; return it."""
        old = 0 if after is None else after.boot
        self.wait(device, messages.Caps, lambda c: c.boot != old)
        online = self.wait(device, messages.Status, lambda s: s.boot != old and s.state == "online").start
        assert after is None or online > after
        return online


@pytest.fixture
def planners():
    with contextlib.ExitStack() as stack:
        yield lambda url: stack.enter_context(Listener(url))


@pytest.fixture
def planner(broker, planners):
    return planners(broker.url)


@pytest.fixture
def machines(broker, tmp_path):
    """Return where agents may run, each with directories of its own."""
    with contextlib.ExitStack() as stack:

        def machine(name, at=broker):
            (tmp_path / name).mkdir()
            return stack.enter_context(Site(tmp_path / name, at, {}))

        yield machine


def test_join_describe_beat_die_come_back_and_leave(planner, machines):
    """A killed agent leaves its will, and comes back with a higher term."""
    site = machines("one")
    site.agent("join1", "1GiB", program=STRICT)
    caps = planner.wait("join1", messages.Caps)
    first = planner.wait("join1", messages.Status)
    assert (first.state, first.boot) == ("starting", caps.boot)
    status = planner.wait("join1", messages.Status, STARTED)
    assert (status.state, status.boot) == ("online", caps.boot)
    assert caps.threads == 1
    assert 0 < caps.rss_idle_bytes < 1 << 30
    assert caps.memory_budget_bytes == memory_budget(1 << 30, 1 << 40)
    assert caps.largest_packet_bytes > 1 << 20
    profile_from_caps("join1", caps.curves, caps.memory_budget_bytes, 1.0)
    first = planner.wait("join1", messages.Heartbeat)
    later = planner.wait("join1", messages.Heartbeat, lambda h: h.round_trip_s is not None)
    assert first.boot == later.boot == caps.boot
    assert later.seq > first.seq
    assert 0.0 <= later.cpu_other <= 1.0
    assert later.slowdown == 1.0
    assert later.rss_bytes > 0
    assert later.counters["control_published"] >= 3
    site.kill("join1")
    will = planner.wait("join1", messages.Status, STARTED)
    start = status.start
    assert will == messages.Status("offline", start.boot, version=__version__, term=start.term)
    site.agent("join1", program=STRICT)
    assert planner.online("join1", after=start).term == start.term + 1
    assert site.stop("join1") == 0
    assert planner.wait("join1", messages.Status, STARTED).state == "offline"
    assert "Traceback" not in site.log("join1")


def test_a_broker_is_waited_for_and_met_again_when_it_restarts(planners, machines):
    with start_broker() as broker:
        broker.stop()
        site = machines("one", broker)
        site.agent("again1")
        poll(lambda: UNMET in site.log("again1"), "a search for the broker")
        broker.start()
        planner = planners(broker.url)
        planner.online("again1")
        broker.stop()
        broker.start()
        planner.wait("again1", messages.Heartbeat, lambda h: h.counters["control_reconnections"] > 0)


@needs_mosquitto
def test_second_agent_of_one_name_on_another_machine_takes_over(planner, machines):
    one, other = machines("one"), machines("other")
    one.agent("same2")
    start = planner.online("same2")
    other.agent("same2")
    assert one.running["same2"].wait(PATIENCE_S) == ConfigError.exit_code
    planner.online("same2", after=start)


@pytest.mark.nightly
@needs_mosquitto
def test_of_two_agents_of_one_name_that_start_together_one_ends(planner, machines):
    both = [machines("one"), machines("other")]
    for site in both:
        site.agent("same3")
    processes = [site.running["same3"] for site in both]
    ended = poll(lambda: [p for p in processes if p.poll() is not None], "the end of one")
    assert [process.returncode for process in ended] == [ConfigError.exit_code]
    planner.wait("same3", messages.Heartbeat)
    assert [process.poll() is None for process in processes].count(True) == 1


def agent_config(url, tmp_path, **options):
    return AgentConfig(BrokerUrl.parse(url), SITE, "own1", threads=1, cache_dir=tmp_path, **options)


def test_an_agent_that_cannot_start_says_why(planner, broker, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no room for kernels")

    monkeypatch.setattr("device_agent.agent.prepare_kernels", fail)
    with pytest.raises(OSError):
        run_agent(agent_config(broker.url, tmp_path), StopSignals())
    status = planner.wait("own1", messages.Status, lambda status: status.reason == "no room for kernels")
    assert status.state == "offline"


def test_a_broker_of_the_old_protocol_is_tried_for_its_largest_packet(planners, tmp_path):
    with broker_of("amqtt") as broker:
        planner, stop = planners(broker.url), StopSignals()
        thread = threading.Thread(target=run_agent, args=(agent_config(broker.url, tmp_path), stop), daemon=True)
        thread.start()
        caps = planner.wait("own1", messages.Caps)
        assert (caps.mqtt, caps.largest_packet_bytes) == (4, WANTED_BYTES)
        planner.wait("own1", messages.Heartbeat)
        stop.request()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_no_broker_without_patience_is_an_error(tmp_path):
    with start_broker() as broker:
        url = broker.url
    with pytest.raises(NetworkError):
        run_agent(agent_config(url, tmp_path, retry=False))
    arguments = ["agent", "--broker", url, "--id", "own1", "--cache", str(tmp_path), "--no-retry"]
    assert main(arguments) == NetworkError.exit_code


def test_an_absent_broker_is_waited_for_no_longer_than_until_stop(machines, tmp_path):
    with start_broker() as broker:
        url = broker.url
    stop = StopSignals()
    stop.request()
    run_agent(agent_config(url, tmp_path), stop)
    site = machines("one", broker)
    site.agent("wait2")
    poll(lambda: UNMET in site.log("wait2"), "a search for the broker")
    site.running["wait2"].send_signal(signal.SIGINT)
    assert site.running["wait2"].wait(PATIENCE_S) == 0


def test_the_budget_is_what_is_given_as_far_as_it_is_free_or_most_of_what_is_free():
    mib = 1 << 20
    assert memory_budget(500 * mib, 1000 * mib) == 500 * mib - LOADING_BYTES
    assert memory_budget(500 * mib, 300 * mib) == 300 * mib - LOADING_BYTES
    assert memory_budget(None, 1000 * mib) == 800 * mib - LOADING_BYTES
    with pytest.raises(ConfigError):
        memory_budget(LOADING_BYTES, 10**12)
