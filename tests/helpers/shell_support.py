"""A session thread over list transports, whose loader and builder do what tests say."""

import logging

import sites
import swarm
from device_agent_support import ListTransport

from device_agent.heartbeat import Meter
from device_agent.network import Network, PlaneState, Stop
from device_agent.probes import Prober
from device_agent.shell import SessionLoop
from hepti_mqtt.config.process import RateLimitedLog
from hepti_mqtt.core.ids import Start
from hepti_mqtt.kernels import Workers
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.worker.executor import pack
from hepti_mqtt.runtime.worker.interface import AnalysePrepare, FrameIn, Load, Loaded, MessageIn, Unload
from hepti_mqtt.runtime.worker.programs import analyse, build
from hepti_mqtt.runtime.worker.session import WorkerSession
from hepti_mqtt.strategies.plan_programs import resident_weights
from hepti_mqtt.transport.base import Connected, Inbox, Subscribed

TOPICS = Topics("home")
BOOT = 100
SPEC = sites.FAMILIES["bert-embedding"]
TENSORS = sites.tensors(SPEC)
PLAN = sites.plan(SPEC, ("single", {}), (1.0,))
TWO = sites.plan(SPEC, ("row", {"variant": "kv"}), (1.0, 1.0))
UP = TOPICS.reports("d0")


class Finite(Inbox):
    """An inbox that ends the session thread where it would wait."""

    def get(self):
        return Stop() if self.empty() else super().get()


class ListLoader:
    def __init__(self):
        self.posted = []

    def post(self, item):
        self.posted.append(item)

    def loads(self):
        return [i for i in self.posted if isinstance(i, Load)]


class NowBuilder:
    """Builds each posted order immediately."""

    def __init__(self, inbox, workers):
        self.inbox, self.workers = inbox, workers

    def post(self, order):
        if isinstance(order, AnalysePrepare):
            self.inbox.post(analyse(order, "d0", TOPICS))
        else:
            self.inbox.post(build(order, "d0", self.workers))


class Device:
    def __init__(self, memory_bytes=1 << 30, limit=None, private_key=b""):
        log = logging.getLogger("test")
        self.inbox = Finite()
        self.planes, self.announced, self.limit = {}, [], limit
        self.complaints = RateLimitedLog(log)
        self.loader = ListLoader()
        self.network = Network(
            TOPICS, "d0", self.inbox, Prober("d0", BOOT), self.loader.post, self.complaints, self.make
        )
        self.workers = Workers(1)
        self.session = WorkerSession("d0", "home", memory_bytes)
        self.builder = NowBuilder(self.inbox, self.workers)
        self.meter = Meter(swarm.curves(1e9))
        self.shell = SessionLoop(
            self.session,
            Start(1, BOOT),
            self.inbox,
            self.network,
            self.loader,
            self.builder,
            self.meter,
            self.complaints,
            self.announce,
            log,
            private_key=private_key,
        )

    def make(self, plane, on_message, on_state):
        self.planes[plane] = ListTransport(on_message, on_state)
        return self.planes[plane]

    def announce(self, link):
        self.announced.append(link)
        return self.limit

    def run(self, *events):
        """Let the session thread take events and do all that follows from them."""
        for event in events:
            self.inbox.post(event)
        self.shell.run()
        self.session.check()

    def join(self):
        self.run(PlaneState("control", Connected(5, None)), PlaneState("data", Connected(4, None)))

    def ups(self, kind=None):
        sent = [
            messages.decode_sealed_report(p)[0] for topic, p, _, _ in self.planes["control"].published if topic == UP
        ]
        return [m for m in sent if kind is None or isinstance(m, kind)]

    def prepare(self, plan=PLAN, txn=1):
        message = messages.Prepare(txn, plan.to_dict(), SPEC.to_dict(), bytes(32), 2)
        self.run(MessageIn(message))

    def acknowledge(self):
        for plane, transport in self.planes.items():
            self.run(*(PlaneState(plane, Subscribed(token)) for token in transport.subscribed))

    def loaded(self, plan=PLAN):
        weights = pack(TENSORS, resident_weights(SPEC, plan, "d0"))
        self.run(Loaded(plan.model, plan.version, weights))

    def ready(self, plan=PLAN):
        self.join()
        self.prepare(plan)
        self.acknowledge()
        self.loaded(plan)


def devices():
    """Yield what makes devices, and end their threads afterwards; a fixture of each file."""
    devices_of_test = []

    def make(**options):
        devices_of_test.append(Device(**options))
        return devices_of_test[-1]

    yield make
    for each in devices_of_test:
        each.workers.close()


def request(run_id=1, plan=PLAN, length=7):
    shape, inputs = sites.request(SPEC, (length,))
    payload = frames.encode_work(plan.model, plan.version, run_id, shape, inputs)
    return shape, inputs, FrameIn(frames.decode(payload))


def unloaded(d):
    return [(i.model, i.plan_version) for i in d.loader.posted if isinstance(i, Unload)]
