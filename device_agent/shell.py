"""The builder's threads, which build Programs, and the session thread, which runs the session."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from math import inf
from queue import SimpleQueue
from typing import Any, Final

from device_agent.budget import Budget, give_way
from device_agent.heartbeat import METERED, Meter
from device_agent.links import IdleProbes, MeshLinks
from device_agent.loader import LoaderThread, RequestAgain
from device_agent.network import (
    PLANES,
    AgentEvent,
    Network,
    OwnStatus,
    PeerProbeDue,
    PlaneState,
    PlannerStatus,
    Stop,
    Subscriptions,
)
from device_agent.probes import BUSY_S
from hepti_mqtt import __version__
from hepti_mqtt.config.process import RateLimitedLog
from hepti_mqtt.core.errors import ConfigError, HeptiError, PacketLimitError, RefusedError, RemoteError, WireError
from hepti_mqtt.core.ids import PlanVersion, Start
from hepti_mqtt.core.program import Compute
from hepti_mqtt.kernels import Workers
from hepti_mqtt.protocol import frames, messages
from hepti_mqtt.protocol.frames import TensorArrival
from hepti_mqtt.protocol.keys import Channel, agree
from hepti_mqtt.protocol.messages import is_compatible
from hepti_mqtt.protocol.plausible import PROGRAMS_BYTES
from hepti_mqtt.protocol.starts import NameHolder
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.runtime.machinery import Plane, Publish
from hepti_mqtt.runtime.worker import interface
from hepti_mqtt.runtime.worker.executor import Step
from hepti_mqtt.runtime.worker.interface import Command, FrameIn, MessageIn, Tick
from hepti_mqtt.runtime.worker.kv_caches import KeptCache
from hepti_mqtt.runtime.worker.programs import analyse, build
from hepti_mqtt.runtime.worker.residents import plan_key
from hepti_mqtt.runtime.worker.session import WorkerSession
from hepti_mqtt.transport.base import Connected, Disconnected, Inbox, Refused, Subscribed

BuildOrders = SimpleQueue[interface.BuildOrder | None]


class BuilderThread:
    """Builds Programs and analyses plans on two threads: awaited orders at normal priority, others at low priority.

    On a busy machine a thread of low priority hardly runs. The CPU time of orders counts against the budget of
    background work. emit: called on both threads.
    """

    def __init__(
        self,
        device: str,
        topics: Topics,
        workers: Workers,
        emit: Callable[[interface.ProgramBuilt | interface.PrepareAnalysed], None],
        budget: Budget,
    ) -> None:
        self._device, self._topics, self.workers, self._emit = device, topics, workers, emit
        self._budget = budget
        self._awaited: BuildOrders = SimpleQueue()
        self._others: BuildOrders = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(self._awaited,), name="hepti-builder", daemon=True),
            threading.Thread(target=self._run_slowly, args=(self._others,), name="hepti-builder-slow", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads and wait for them."""
        for orders in (self._awaited, self._others):
            orders.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def post(self, order: interface.BuildOrder) -> None:
        """Queue an order; callable on any thread."""
        (self._awaited if order.awaited else self._others).put(order)

    def _run_slowly(self, orders: BuildOrders) -> None:
        give_way()
        self._run(orders)

    def _run(self, orders: BuildOrders) -> None:
        while (order := orders.get()) is not None:
            begun_s = time.thread_time()
            if isinstance(order, interface.AnalysePrepare):
                self._emit(analyse(order, self._device, self._topics))
            else:
                self._emit(build(order, self._device, self.workers))
            self._budget.spend(time.thread_time() - begun_s, time.perf_counter())


# ----------------------------------------------------------------------------------------------------------------------
# The session thread: takes events, runs the session's ops, executes its commands.


PACKET_MARGIN: Final = 600  # topic and headers of a PUBLISH, at most
PEER_POLL_S: Final = 3e-4  # of computing between two polls of peers; a poll costs as much as a small op

ERROR_PAUSE_S: Final = 0.1  # after an unexpected error, so that a permanent one does not take a whole core
REPEATED_S: Final = 1.0  # errors closer together than this count as repeated
MAX_REPEATED: Final = 30  # errors in a row after which the device goes offline


class SessionLoop:
    """Runs one `WorkerSession` in the calling thread until a `Stop` event.

    announce: publishes caps and status for a control connection; returns the broker's packet limit in bytes, None
    without one. links: to peers, None without mesh; with links the thread waits for peers and the inbox in one place.
    private_key: this device's part of the secret shared with the planner; empty for none. budget: of background work;
    notified when runs begin, wait and end. An error in one event, op or command is counted, logged and, if it names its
    transaction or request, reported; the session continues.
    """

    def __init__(
        self,
        session: WorkerSession,
        start: Start,
        inbox: Inbox[AgentEvent],
        network: Network,
        loader: LoaderThread,
        builder: BuilderThread,
        meter: Meter,
        complaints: RateLimitedLog,
        announce: Callable[[Connected], int | None],
        log: logging.Logger,
        links: MeshLinks | None = None,
        private_key: bytes = b"",
        budget: Budget | None = None,
    ) -> None:
        self._links, self._private_key, self._budget = links, private_key, budget or Budget()
        self._session, self._inbox, self._network = session, inbox, network
        self._loader, self._builder, self._meter, self._complaints, self._announce, self._log = (
            loader,
            builder,
            meter,
            complaints,
            announce,
            log,
        )
        self._subscriptions = Subscriptions(network)
        self._pauses = IdleProbes(network, links)
        self._logged = 0  # transitions of plans in the log
        self._up: dict[Plane, Connected] = {}
        self._announced = False
        self._name = NameHolder(start)
        self._planner: Start | None = None
        self._agreed_boot: int | None = None  # of the planner of the current secret
        self._planner_key, self._numbers = "", count(1)  # numbers: of messages to planners
        self._planner_version: str | None = None  # None before a planner's first status
        #: whether `offline` must still be published after `run`, and why, if a permanent error ended it
        self.announce_offline, self.fault = True, ""
        self.packet_limit_bytes: int | None = None
        self.last_op_s = float("-inf")  # time of the last op, by time.perf_counter()
        self._event_handlers: Mapping[type, Callable[[Any], None]] = {
            PlaneState: self._plane_state,
            PlannerStatus: self._planner_status,
            MessageIn: self._message,
            OwnStatus: self._own_status,
        }
        self._command_handlers: Mapping[type, Callable[[Any], None]] = {
            Publish: self._publish,
            interface.Subscribe: self._subscribe,
            interface.Unsubscribe: lambda c: self._subscriptions.unsubscribe(c.filters, c.work_topics),
            interface.Load: loader.post,
            interface.BuildProgram: builder.post,
            interface.AnalysePrepare: builder.post,
            interface.Unload: self._unload,
            interface.ReadCaches: loader.post,
            interface.LogTrouble: lambda c: complaints.record(c.kind, c.text, c.error),
        }
        if links is not None:
            self._event_handlers = {**self._event_handlers, PeerProbeDue: lambda _: self._probe_peers(links)}
            self._command_handlers = {
                **self._command_handlers,
                interface.AllowPeers: links.admit,
                interface.JoinPeers: links.join,
                interface.LeavePeers: links.leave,
            }
            links.mesh.call_before_waiting(self._wake)
        inbox.wake = self._wake

    def _wake(self) -> None:
        """Wake the session's thread, or interrupt its op, for the inbox; from any thread."""
        self._builder.workers.interrupt()
        if self._links is not None:
            self._links.mesh.wake()

    def run(self) -> None:
        """Work until a `Stop`; raises its error, and RemoteError if an unexpected error repeats without a pause."""
        stop: Stop | None = None
        repeated, failed_s = 0, float("-inf")
        while stop is None:
            try:
                stop = self._work()
            except Exception as exc:
                now = time.perf_counter()
                repeated, failed_s = (repeated + 1 if now - failed_s < REPEATED_S else 1), now
                self._complaints.record("session_errors", f"the session goes on after {exc!r}", exc)
                if repeated == MAX_REPEATED:
                    self.fault = f"{MAX_REPEATED} errors in a row: {exc!r}"
                    raise RemoteError(
                        f"{self._session.device} ends: {self.fault}. Start it again; see its log."
                    ) from exc
                time.sleep(ERROR_PAUSE_S)
        self.announce_offline = stop.announce_offline
        if stop.error is not None:
            raise stop.error

    def end(self) -> tuple[KeptCache, ...]:
        """End all plans after `run`; return the KV caches to save, the oldest first."""
        return self._session.end(time.perf_counter())

    def _work(self) -> Stop:
        """Take events and run ops until a `Stop`, and return it."""
        inbox, session, clock = self._inbox, self._session, time.perf_counter
        links, polled_s, workers = self._links, 0.0, self._builder.workers
        while True:
            workers.resume()
            step = None if not inbox.empty() else session.next_step()
            if step is None:
                if inbox.empty():
                    self._budget.note(session.runs.has_any, True, clock())
                if links is not None and inbox.empty():
                    self._poll_peers(links, session.deadline)
                    polled_s = clock()
                    continue
                event = inbox.get()
                if isinstance(event, Stop):
                    return event
                self.handle_event(event)
                continue
            self.last_op_s = clock()
            self._budget.note(True, False, self.last_op_s)
            self._compute(step)
            if links is not None and links.has_peers and (now := clock()) - polled_s > PEER_POLL_S:
                self._poll_peers(links, 0.0)
                polled_s = now

    def _compute(self, step: Step) -> None:
        """Run a step until it is done, an event arrives or, with peers, PEER_POLL_S are over."""
        commands: list[Command] = []
        limit_s = PEER_POLL_S if self._links is not None and self._links.has_peers else 0.0
        try:
            start = time.perf_counter()
            outgoing = step.run(limit_s, sockets=None if self._links is None else self._links.mesh.channels)
            end = time.perf_counter()
            program = step.running.bound.template.program
            for place, seconds in step.timings:
                op = program.ops[place]
                if isinstance(op, Compute) and op.kernel in METERED:
                    self._meter.samples.append((op, program.slots, seconds))
            self._meter.frames_s += step.exchanged_s
            computed_s = end - start - step.waited_s - step.exchanged_s
            commands = self._session.finish_step(step, outgoing, computed_s, end)
        except Exception as exc:
            self._on_op_failed(step, exc)
        for place, command in enumerate(commands):
            try:
                self._command_handlers[type(command)](command)
            except Exception as exc:
                self._on_command_failed(step, command, exc)
                # The run has failed, so send nothing more of it; other commands, such as BuildProgram, still hold.
                self._execute([c for c in commands[place + 1 :] if not isinstance(c, Publish)])
                break
        if self._session.runs.idle:
            self._probe_in_pause(time.perf_counter())

    def _probe_in_pause(self, now: float) -> None:
        try:
            self._pauses.on_idle(now, self._session.runs.take_waited())
        except Exception as exc:
            self._complaints.record("command_errors", f"a probe failed: {exc}", _unexpected(exc))

    def _probe_peers(self, links: MeshLinks) -> None:
        now = time.perf_counter()
        links.probe(now, busy=now - self.last_op_s < BUSY_S)

    def _poll_peers(self, links: MeshLinks, until_s: float) -> None:
        """Handle peers' events, waiting for the first one until a time or until the inbox wakes the thread."""
        timeout_s = None if until_s == inf else max(until_s - time.perf_counter(), 0.0) if until_s else 0.0
        for event in links.wait(timeout_s):
            self.handle_event(event)
        now = time.perf_counter()
        self._meter.frames_s += now - links.mesh.woke_s
        if self._session.deadline <= now:
            self.handle_event(Tick())

    def handle_event(self, event: AgentEvent) -> None:
        """Handle one event."""
        try:
            if isinstance(event, TensorArrival) and self._session.runs.try_fill(event):
                return  # the usual case; no plan and no order changes
            self._event_handlers.get(type(event), self._feed_session)(event)
        except Exception as exc:
            self._complaints.record("event_errors", f"{type(event).__name__} failed: {exc}", _unexpected(exc))
            self._execute(self._report(event, exc))

    def _feed_session(self, event: Any) -> None:
        commands = self._session.handle(event, time.perf_counter())
        story = self._session.plans.story
        if story.count != self._logged:
            for transition in story.last(story.count - self._logged):
                self._log.debug("%s", transition)
            self._logged = story.count
        self._execute(commands)

    def _on_op_failed(self, step: Step, error: Exception) -> None:
        self._complaints.record("op_errors", f"{step.kernel or 'send'} failed: {error}", _unexpected(error))
        self._execute(self._session.fail_step(step, error))

    def _on_command_failed(self, step: Step, command: Command, error: Exception) -> None:
        """Fail the request of a failed command; after its last op only the frame names it."""
        self._complaints.record("command_errors", f"{type(command).__name__} failed: {error}", _unexpected(error))
        commands = self._session.fail_step(step, error)
        if not commands and isinstance(command, Publish):
            with suppress(WireError):  # no frame: the error is logged above
                commands = self._report(FrameIn(frames.decode(command.joined_payload)), error)
        self._execute(commands)

    def _report(self, event: AgentEvent, error: Exception) -> list[Command]:
        """Return the report of a failed event to the planner; [] if the event names no transaction or run."""
        code, why = (error.code, str(error)) if isinstance(error, HeptiError) else ("device", repr(error))
        text = f"{self._session.device}: {why}"
        failed: messages.PrepareFailed | messages.RunFailed
        try:
            if isinstance(event, FrameIn) and event.frame.kind != "tensor":
                frame = event.frame
                failed = messages.RunFailed(frame.model, frame.plan_version, frame.run_id, code, text)
            elif isinstance(event, MessageIn) and isinstance(event.message, messages.Prepare):
                plan = event.message.plan
                plan_version = PlanVersion(*plan["version"])
                failed = messages.PrepareFailed(
                    event.message.transaction_id, plan["model"], plan_version, code, text, 0
                )
            else:
                return []
            payload = messages.encode(failed)
        except (KeyError, TypeError, WireError):
            return []  # the plan names no model or version
        return [Publish(self._session.topics.reports(self._session.device), payload, 1)]

    # -- commands ------------------------------------------------------------------------------------------------

    def _execute(self, commands: list[Command]) -> None:
        for command in commands:
            try:
                self._command_handlers[type(command)](command)
            except Exception as exc:
                self._complaints.record("command_errors", f"{type(command).__name__} failed: {exc}", _unexpected(exc))

    def _publish(self, command: Publish) -> None:
        if command.plane == "mesh":
            if self._links is not None:  # without links a plan names no peers
                begun = time.perf_counter()
                self._links.publish(command)
                self._meter.frames_s += time.perf_counter() - begun
            return
        limit = self.packet_limit_bytes
        if limit is not None and command.nbytes + PACKET_MARGIN > limit:
            # The broker would end the connection, and QoS 1 would send the same packet again and again.
            raise PacketLimitError(
                f"a message of {command.nbytes} bytes is over the broker's limit of {limit} bytes per packet; "
                "raise max_packet_size in mosquitto.conf (other brokers name it alike)"
            )
        if command.plane == "data":
            self._network.send(command.topic, command.payload, command.body)
        else:
            self._network.publish(command.plane, command.topic, command.payload, command.qos, command.retain)

    def _subscribe(self, command: interface.Subscribe) -> None:
        if self._subscriptions.subscribe(command.model, command.plan_version, command.filters, command.work_topic):
            self.handle_event(interface.Subscribed(command.model, command.plan_version))

    def _unload(self, command: interface.Unload) -> None:
        self._subscriptions.forget(command.model, command.plan_version)
        self._loader.post(command)

    # -- the connections -----------------------------------------------------------------------------------------

    def _plane_state(self, event: PlaneState) -> None:
        match event.state:
            case Connected() as link:
                self._link_up(event.plane, link)
            case Disconnected(reason):
                self._link_down(event.plane, reason)
            case Subscribed(token):
                for model, plan_version in self._subscriptions.acknowledged(event.plane, token):
                    self.handle_event(interface.Subscribed(model, plan_version))
            case Refused() as refusal:
                self._filters_refused(event.plane, refusal)

    def _link_up(self, plane: Plane, link: Connected) -> None:
        self._up[plane] = link
        is_complete = not self._announced and len(self._up) == len(PLANES)
        if is_complete:
            self._announced = True
            self.packet_limit_bytes = self._announce(self._up["control"])
        if is_complete or plane == "control":  # after the status: the planner must know the device
            self._loader.post(RequestAgain())

    def _link_down(self, plane: Plane, reason: str) -> None:
        self._log.warning("the %s connection is lost (%s); connecting again", plane, reason)
        self._up.pop(plane, None)
        if plane == "control":
            self._announced = False
            self._feed_session(interface.MayHaveMissedCommands("the control connection was lost"))

    def _filters_refused(self, plane: Plane, refusal: Refused) -> None:
        what = f"the broker refused {', '.join(refusal.topics)}: {refusal.reason}; check its access list"
        if refusal.token is None and self._session.topics.status(self._session.device) in refusal.topics:
            what += f"; the broker's user must be named {self._session.device}, as the device is"
            self._inbox.post(Stop(RefusedError(what), announce_offline=False))
            return
        if refusal.token is None:
            self._complaints.record("publish_refused", what)
            return
        error = RefusedError(what)
        if (plane, refusal.token) in self._network.base_subscription_tokens:
            self._inbox.post(Stop(error))
            return
        for model, plan_version in self._subscriptions.refused(plane, refusal.token):
            self.handle_event(interface.LoadFailed(model, plan_version, error))

    # -- statuses ------------------------------------------------------------------------------------------------

    def _planner_status(self, event: PlannerStatus) -> None:
        status = event.status
        if status.state == "offline":
            return
        self._agree(status.public_key, status.boot != self._agreed_boot)
        self._agreed_boot = status.boot
        # A status of a lower term is old: a broker that lost its last save retained it. If the broker lost everything,
        # a serving planner may have a lower term, too; it releases this device's plans itself.
        if self._planner is None or status.start > self._planner:
            self._planner = status.start
            self._feed_session(interface.PlannerLost(status.boot))
        self._planner_version = status.version
        if status.state == "online":
            self._loader.post(RequestAgain())

    def _agree(self, public_key: str, is_new: bool) -> None:
        """Agree on a secret with a planner; a verified one is kept until the planner starts again."""
        channel = self._network.channel
        is_kept = not is_new and (public_key == self._planner_key or (channel is not None and channel.verified))
        if is_kept or not self._private_key:
            return
        self._planner_key = public_key
        self._network.channel = (
            Channel(agree(self._private_key, public_key), self._numbers, at_planner=False) if public_key else None
        )

    def _message(self, event: MessageIn) -> None:
        """Pass a message with a valid seal to the session.

        A Prepare of an incompatible planner is answered with a digest that fits no Program: a planner refuses such a
        device, and names both versions in its log and record.
        """
        channel = self._network.channel
        if channel is not None and not channel.accepts(event.seal):
            text = f"dropped a {type(event.message).__name__} that is not from the planner, or a repeated one"
            self._complaints.record("forged", text)
            return
        if channel is not None and isinstance(event.message, messages.Prepare):
            key = channel.wrapped(event.message.key, *plan_key(event.message))
            event = MessageIn(replace(event.message, key=key), event.seal)
        if isinstance(event.message, messages.Activate):
            self._budget.expect_run(time.perf_counter())  # requests may wait for this plan
        message, version = event.message, self._planner_version
        if not isinstance(message, messages.Prepare) or version is None or is_compatible(version):
            self._feed_session(event)
            return
        theirs = version or "before 0.2.0"
        self._complaints.record(
            "other_version",
            f"Refused a plan: the planner runs version {theirs}, this device {__version__}. Install the same on both.",
        )
        model, plan_version = plan_key(message)
        ready = messages.Ready(message.transaction_id, model, plan_version, 0, bytes(PROGRAMS_BYTES))
        self._execute([Publish(self._session.topics.reports(self._session.device), messages.encode(ready), 1)])

    def _own_status(self, event: OwnStatus) -> None:
        """Stop if another agent has this name; doubt the plans if the broker has published this agent's will.

        The network has already repaired the retained status, unless it names a later start.
        """
        verdict = self._name.handle(event.status, time.monotonic())
        if verdict == "taken":
            error = ConfigError(
                f"another agent with the name {self._session.device} has started on this site; give one of them "
                "another --id"
            )
            self._inbox.post(Stop(error, announce_offline=False))
        if verdict != "contradict":
            return
        if event.status.boot == self._name.start.boot:
            self._feed_session(interface.MayHaveMissedCommands("the broker has published our will"))
        if event.status.start > self._name.start and self._announced:
            self.packet_limit_bytes = self._announce(self._up["control"])


def _unexpected(error: Exception) -> Exception | None:
    """Return an error if its traceback is worth logging; a HeptiError's text is enough."""
    return None if isinstance(error, HeptiError) else error
