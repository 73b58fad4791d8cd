"""Agents as processes at a real broker; the test plays the planner."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from broker_kinds import broker_of, needs_mosquitto
from site_processes import trust_measurement

from device_agent import AgentConfig, memory_budget, run_agent
from device_agent.machine import LOADING_BYTES
from hepti_mqtt import __version__, models
from hepti_mqtt.checkpoint import Checkpoint, make_model
from hepti_mqtt.cli.main import main
from hepti_mqtt.config.process import StopSignals
from hepti_mqtt.cost.reported import profile_from_caps
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.errors import ConfigError, NetworkError
from hepti_mqtt.ids import PlanVersion
from hepti_mqtt.models.shapes import TokenBatch
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import make_plan
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol import messages as protocol_messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.broker_limits import WANTED_BYTES
from hepti_mqtt.transport.url import BrokerUrl

PATIENCE_S = 60.0  # how long a test waits for what must come; never how long it takes
MODEL = "tiny"
TOPICS = Topics("home")
STARTED = lambda status: status.state != "starting"  # noqa: E731


@pytest.fixture(scope="module")
def broker():
    with start_broker() as running:
        yield running


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("hashes")))
        directory = make_model("tiny-bert", tmp_path_factory.mktemp("models") / MODEL)
        with Checkpoint.open(directory, MODEL) as opened:
            assert opened.manifest.digest
            yield opened


class Planner:
    """Hears everything that devices say and serves tiles."""

    def __init__(self, url, checkpoint=None, boot=50):
        self.checkpoint, self.boot = checkpoint, boot
        self.heard = queue.SimpleQueue()
        self.later = []
        self.tiles_sent = 0
        self.transport = BrokerConnection(
            BrokerUrl.parse(url), "test-planner", on_message=self.hear, on_state=lambda state: None
        )
        topics = (TOPICS.all_status(), TOPICS.all_caps(), TOPICS.all_heartbeats(), TOPICS.all_reports())
        self.transport.subscribe([(t, 1) for t in topics])
        self.transport.connect(PATIENCE_S)

    def hear(self, topic, payload):
        parsed = TOPICS.parse(topic)
        decode = {
            "status": messages.decode_status,
            "caps": messages.decode_caps,
            "heartbeat": messages.decode_heartbeat,
            "up": messages.decode_report,
        }[parsed.kind]
        if not payload:
            return
        value = decode(payload)
        if value == messages.QUESTION:
            return
        if isinstance(value, messages.RequestTiles) and self.checkpoint is not None:
            for digest in value.hashes:
                self.send_tile(parsed.device, digest)
        self.heard.put((parsed.device, value))

    def send_tile(self, device, digest):
        manifest = self.checkpoint.manifest
        body = manifest.encode() if digest == manifest.digest else self.checkpoint.tile(digest)
        frame = frames.Frame("tile", MODEL, PlanVersion(self.boot, 1), 0, shape=(len(body),), body=body)
        self.tiles_sent += 1
        self.transport.publish(TOPICS.weights(device), frames.encode(frame), 1)

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
        self.wait(device, protocol_messages.Caps, lambda c: c.boot != old)
        online = self.wait(device, protocol_messages.Status, lambda s: s.boot != old and s.state == "online").start
        assert after is None or online > after
        return online

    def tell(self, device, message):
        self.transport.publish(TOPICS.command(device), messages.encode(message), 1)

    def plan(self, devices, strategy="single", options=None, number=1, shares=None):
        template = Plan(MODEL, PlanVersion(self.boot, number), strategy, devices, devices[0])
        shares = tuple(map(float, shares or (1.0,) * len(devices)))
        return make_plan(self.checkpoint.spec, template, strategy, options or {}, shares)

    def prepare(self, plan, *shapes):
        spec, manifest = self.checkpoint.spec.to_dict(), self.checkpoint.manifest.digest
        for device in plan.devices:
            number = plan.version.number
            self.tell(
                device,
                messages.Prepare(
                    number, plan.to_dict(), spec, manifest, 1, tuple(s.plain() for s in shapes), len(shapes)
                ),
            )
        for device in plan.devices:
            self.wait(device, messages.Ready, lambda m: m.plan_version == plan.version)

    def infer(self, plan, run_id, lengths=(5, 9)):
        shape = TokenBatch(lengths)
        vocab = self.checkpoint.spec.text.vocab
        ids = np.random.default_rng(run_id).integers(0, vocab, shape.tokens).astype(np.int32)
        expected = models.reference(self.checkpoint.spec, self.checkpoint.tensors(), ids, shape)[1]
        np.testing.assert_allclose(self.answer(plan, run_id, shape, ids), expected, atol=5e-5)

    def answer(self, plan, run_id, shape, ids):
        """Return the output of a run."""
        self.begin(plan, run_id, shape, ids)
        return self.end(plan, run_id)

    def begin(self, plan, run_id, shape, ids, continued=None):
        """Let the devices of a plan begin a run, or go on with another one."""
        work = frames.encode_work(MODEL, plan.version, run_id, shape, ids, continued=continued)
        self.transport.publish(TOPICS.work(MODEL, plan.devices[0]), work, 1)

    def end(self, plan, run_id):
        """Return the output of a run that has begun, once its devices have reported."""
        for device in plan.devices:
            self.wait(device, frames.Frame, lambda f: f.kind == "done" and f.run_id == run_id)
        return self.wait(plan.root, frames.Frame, lambda f: f.kind == "output" and f.run_id == run_id).array()

    def close(self):
        self.transport.close()


@pytest.fixture
def planners(checkpoint):
    started = []

    def make(url):
        started.append(Planner(url, checkpoint))
        return started[-1]

    yield make
    for each in started:
        each.close()


@pytest.fixture
def planner(broker, planners):
    return planners(broker.url)


class Agents:
    def __init__(self, url, cache):
        self.url, self.cache, self.processes = url, cache, []

    def start(self, device, *options, url=None, cache=None):
        trust_measurement()
        command = [
            sys.executable,
            "-W",
            "error",
            "-m",
            "hepti_mqtt.cli",
            "agent",
            "--broker",
            url or self.url,
            "--id",
            device,
        ]
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


@pytest.fixture(scope="module")
def pair(broker, tmp_path_factory):
    """Start two agents, which two tests share: two1 and two2."""
    agents_of_test = Agents(broker.url, tmp_path_factory.mktemp("pair"))
    for device in ("two1", "two2"):
        agents_of_test.start(device)
    yield agents_of_test
    agents_of_test.close()


def test_join_describe_beat_die_come_back_and_leave(planner, agents):
    """A killed agent leaves its will, and comes back with a higher term."""
    process = agents.start("join1", "--memory", "1GiB")
    caps = planner.wait("join1", protocol_messages.Caps)
    first = planner.wait("join1", protocol_messages.Status)
    assert (first.state, first.boot) == ("starting", caps.boot)
    status = planner.wait("join1", protocol_messages.Status, STARTED)
    assert (status.state, status.boot) == ("online", caps.boot)
    assert caps.threads == 1
    assert 0 < caps.rss_idle_bytes < 1 << 30
    assert caps.memory_budget_bytes == memory_budget(1 << 30, 1 << 40)
    assert caps.largest_packet_bytes > 1 << 20
    profile_from_caps("join1", caps.curves, caps.memory_budget_bytes, 1.0)
    first = planner.wait("join1", protocol_messages.Heartbeat)
    later = planner.wait("join1", protocol_messages.Heartbeat, lambda h: h.round_trip_s is not None)
    assert first.boot == later.boot == caps.boot
    assert later.seq > first.seq
    assert 0.0 <= later.cpu_other <= 1.0
    assert later.slowdown == 1.0
    assert later.rss_bytes > 0
    assert later.counters["control_published"] >= 3
    process.kill()
    will = planner.wait("join1", protocol_messages.Status, STARTED)
    start = status.start
    assert will == protocol_messages.Status("offline", start.boot, version=__version__, term=start.term)
    process = agents.start("join1")
    assert planner.online("join1", after=start).term == start.term + 1
    process.send_signal(signal.SIGTERM)
    assert planner.wait("join1", protocol_messages.Status, STARTED).state == "offline"
    assert process.wait(PATIENCE_S) == 0
    assert "Traceback" not in process.stderr.read()


def test_a_request_through_two_agents_and_a_restart_that_moves_no_bytes(planner, pair):
    start = planner.online("two1")
    planner.online("two2")
    plan = planner.plan(("two1", "two2"), "row", {"variant": "kv"})
    planner.prepare(plan)
    planner.infer(plan, 1)
    planner.infer(plan, 2, (16,))
    sent = planner.tiles_sent
    assert sent > 0
    pair.processes[0].kill()
    pair.start("two1")
    planner.online("two1", after=start)
    again = planner.plan(("two1", "two2"), "row", {"variant": "kv"}, number=2)
    planner.prepare(again)
    planner.infer(again, 3)
    assert planner.tiles_sent == sent
    beat = planner.wait(
        "two1", protocol_messages.Heartbeat, lambda h: h.boot != start.boot and h.counters.get("tiles_cached")
    )
    assert beat.counters.get("tiles_asked", 0) == 0


LAYERS = 60


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("hashes")))
        directory = make_model("tiny-albert", tmp_path_factory.mktemp("deep") / MODEL, layers=LAYERS)
        with Checkpoint.open(directory, MODEL) as opened:
            yield opened


def test_a_run_goes_on_under_another_plan_and_then_on_one_device(planner, pair, deep):
    """Rows move to another device in the middle of a run, and in that of a second one all of them."""
    planner.checkpoint = deep
    for device in ("two1", "two2"):
        planner.online(device)
    other = pair.processes[1]
    row = ("row", {"variant": "kv"})
    halves, uneven = (planner.plan(("two1", "two2"), *row, number=n, shares=s) for n, s in ((3, (1, 1)), (4, (3, 1))))
    single, shape = planner.plan(("two1",), number=5), TokenBatch((14,))
    for plan in (halves, uneven, single):
        planner.prepare(plan, shape)
    ids = np.arange(5, 19, dtype=np.int32)
    want = planner.answer(single, 11, shape, ids)
    for run_id, after in ((12, uneven), (14, single)):
        other.send_signal(signal.SIGSTOP)  # so that two1 waits before the border
        planner.begin(halves, run_id, shape, ids)
        planner.begin(after, run_id + 1, shape, ids, frames.Continued(run_id, LAYERS // 2))
        if "two2" not in after.devices:
            left = messages.HandOver(MODEL, halves.version, run_id, LAYERS // 2, run_id + 1, after.to_dict())
            planner.tell("two2", left)
        other.send_signal(signal.SIGCONT)
        np.testing.assert_allclose(planner.end(after, run_id + 1), want, atol=1e-3)


def test_a_broker_is_waited_for_and_met_again_when_it_restarts(planners, agents):
    with start_broker() as broker:
        broker.stop()
        process = agents.start("again1", url=broker.url)
        line = next(line for line in process.stderr if "no broker answers" in line)
        assert "retrying" in line
        broker.start()
        planner = planners(broker.url)
        planner.online("again1")
        plan = planner.plan(("again1",))
        planner.prepare(plan)
        broker.stop()
        broker.start()
        planner.wait("again1", protocol_messages.Heartbeat, lambda h: h.counters["control_reconnections"] > 0)
        planner.infer(plan, 1)


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
    planner.wait("same3", protocol_messages.Heartbeat)
    assert winner.poll() is None


def agent_config(url, tmp_path, **options):
    return AgentConfig(BrokerUrl.parse(url), "home", "own1", threads=1, cache_dir=tmp_path, **options)


def test_an_agent_that_cannot_start_says_why(planner, broker, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no room for kernels")

    monkeypatch.setattr("device_agent.agent.prepare_kernels", fail)
    with pytest.raises(OSError, match="no room"):
        run_agent(agent_config(broker.url, tmp_path), StopSignals())
    status = planner.wait("own1", protocol_messages.Status, lambda status: status.reason == "no room for kernels")
    assert status.state == "offline"


def test_a_broker_of_the_old_protocol_is_tried_for_its_largest_packet(planners, tmp_path):
    with broker_of("amqtt") as broker:
        planner, stop = planners(broker.url), StopSignals()
        thread = threading.Thread(target=run_agent, args=(agent_config(broker.url, tmp_path), stop), daemon=True)
        thread.start()
        caps = planner.wait("own1", protocol_messages.Caps)
        assert (caps.mqtt, caps.largest_packet_bytes) == (4, WANTED_BYTES)
        planner.wait("own1", protocol_messages.Heartbeat)
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
