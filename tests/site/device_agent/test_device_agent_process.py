"""Agents as processes at a real broker: how they join, say what they are, and end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time

import pytest
from broker_kinds import broker_of, needs_mosquitto
from site_processes import PATIENCE_S, Voice, trust_measurement

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

TOPICS = Topics("home")
STARTED = lambda status: status.state != "starting"  # noqa: E731


@pytest.fixture(scope="module")
def broker():
    with start_broker() as running:
        yield running


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
        topics = (TOPICS.all_status(), TOPICS.all_caps(), TOPICS.all_heartbeats(), TOPICS.all_reports())
        super().__init__(url, *topics)

    def hear(self, topic, payload):
        parsed = TOPICS.parse(topic)
        if payload and (value := DECODE[parsed.kind](payload)) != messages.QUESTION:
            self.heard.put((parsed.device, value))

    def wait(self, device, kind, condition=lambda value: True):
        """Return the first word of a kind that a device has said; others are kept for later waits."""
        for place, (who, value) in enumerate(self.later):
            if who == device and isinstance(value, kind) and condition(value):
                del self.later[place]
                return value
        until = time.monotonic() + PATIENCE_S
        while True:
            who, value = self.heard.get(timeout=max(until - time.monotonic(), 0.001))
            if who == device and isinstance(value, kind) and condition(value):
                return value
            self.later.append((who, value))

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


class Agents:
    def __init__(self, url, cache):
        self.url, self.cache, self.processes = url, cache, []

    def start(self, device, *options, url=None, cache=None):
        trust_measurement()
        command = [sys.executable, "-W", "error", "-m", "hepti_mqtt.cli", "agent", "--id", device]
        command += ["--broker", url or self.url]
        command += ["--threads", "1", "--cache", str(cache or self.cache), *options]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def close(self):
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def agents(broker, tmp_path):
    agents_of_test = Agents(broker.url, tmp_path)
    yield agents_of_test
    agents_of_test.close()


def test_join_describe_beat_die_come_back_and_leave(planner, agents):
    """A killed agent leaves its will, and comes back with a higher term."""
    process = agents.start("join1", "--memory", "1GiB")
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
    process.kill()
    will = planner.wait("join1", messages.Status, STARTED)
    start = status.start
    assert will == messages.Status("offline", start.boot, version=__version__, term=start.term)
    process = agents.start("join1")
    assert planner.online("join1", after=start).term == start.term + 1
    process.send_signal(signal.SIGTERM)
    assert planner.wait("join1", messages.Status, STARTED).state == "offline"
    assert process.wait(PATIENCE_S) == 0
    assert "Traceback" not in process.stderr.read()


def test_a_broker_is_waited_for_and_met_again_when_it_restarts(planners, agents):
    with start_broker() as broker:
        broker.stop()
        process = agents.start("again1", url=broker.url)
        line = next(line for line in process.stderr if "no broker answers" in line)
        assert "retrying" in line
        broker.start()
        planner = planners(broker.url)
        planner.online("again1")
        broker.stop()
        broker.start()
        planner.wait("again1", messages.Heartbeat, lambda h: h.counters["control_reconnections"] > 0)


@needs_mosquitto
def test_second_agent_of_one_name_on_another_machine_takes_over(planner, agents, tmp_path):
    first = agents.start("same2")
    start = planner.online("same2")
    agents.start("same2", cache=tmp_path / "elsewhere")
    assert first.wait(PATIENCE_S) == ConfigError.exit_code
    planner.online("same2", after=start)


@pytest.mark.nightly
@needs_mosquitto
def test_of_two_agents_of_one_name_that_start_together_one_ends(planner, agents, tmp_path):
    both = [agents.start("same3", cache=tmp_path / place) for place in ("one", "other")]
    deadline = time.monotonic() + PATIENCE_S
    while all(agent.poll() is None for agent in both):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    codes = [agent.poll() for agent in both]
    assert sorted(codes, key=str) == [ConfigError.exit_code, None]
    winner = both[codes.index(None)]
    planner.wait("same3", messages.Heartbeat)
    assert winner.poll() is None


def agent_config(url, tmp_path, **options):
    return AgentConfig(BrokerUrl.parse(url), "home", "own1", threads=1, cache_dir=tmp_path, **options)


def test_an_agent_that_cannot_start_says_why(planner, broker, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no room for kernels")

    monkeypatch.setattr("device_agent.agent.prepare_kernels", fail)
    with pytest.raises(OSError, match="no room"):
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


def test_no_broker_without_patience_is_an_error(tmp_path, capsys):
    with start_broker() as broker:
        url = broker.url
    with pytest.raises(NetworkError):
        run_agent(agent_config(url, tmp_path, retry=False))
    assert (
        main(["agent", "--broker", url, "--id", "own1", "--cache", str(tmp_path), "--no-retry"])
        == NetworkError.exit_code
    )


def test_an_absent_broker_is_waited_for_no_longer_than_until_stop(agents, tmp_path):
    with start_broker() as broker:
        url = broker.url
    stop = StopSignals()
    stop.request()
    run_agent(agent_config(url, tmp_path), stop)
    process = agents.start("wait2", url=url)
    next(line for line in process.stderr if "for weights" in line)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0


def test_the_budget_is_what_is_given_as_far_as_it_is_free_or_most_of_what_is_free():
    mib = 1 << 20
    assert memory_budget(500 * mib, 1000 * mib) == 500 * mib - LOADING_BYTES
    assert memory_budget(500 * mib, 300 * mib) == 300 * mib - LOADING_BYTES
    assert memory_budget(None, 1000 * mib) == 800 * mib - LOADING_BYTES
    with pytest.raises(ConfigError):
        memory_budget(LOADING_BYTES, 10**12)
