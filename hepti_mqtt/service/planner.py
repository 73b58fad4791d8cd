"""The planner process: threads, clock and connections around `CoordinatorSession`."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from secrets import token_bytes
from typing import TYPE_CHECKING, Final, Literal

from hepti_mqtt import __version__
from hepti_mqtt.config.process import RateLimitedLog, requires_extra, return_large_blocks
from hepti_mqtt.core.errors import (
    ConfigError,
    HeptiError,
    NetworkError,
    OverloadedError,
    RefusedError,
    RemoteError,
)
from hepti_mqtt.core.ids import PlanVersion, Start, check_name, whole_model
from hepti_mqtt.core.plan import Plan
from hepti_mqtt.cost.loads import TileMap
from hepti_mqtt.protocol.keys import KEY_BYTES
from hepti_mqtt.protocol.messages import Status, decode_status, encode_status
from hepti_mqtt.protocol.starts import NameHolder
from hepti_mqtt.protocol.topics import ANSWERS, DROPPED_TOPIC, Topics
from hepti_mqtt.runtime.coordinator import interface, session
from hepti_mqtt.runtime.coordinator.fair_queue import Batching
from hepti_mqtt.runtime.coordinator.fleet import BrokerWatch, LastWillDebounce
from hepti_mqtt.runtime.coordinator.interface import PublishPlan
from hepti_mqtt.runtime.coordinator.plans import PlanSnapshot, ServedModel
from hepti_mqtt.runtime.coordinator.prefixes import HeldText
from hepti_mqtt.runtime.coordinator.requests import Request, RequestKey
from hepti_mqtt.runtime.coordinator.search_kinds import SEARCHES
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.service.card import model_card
from hepti_mqtt.service.channel import RequestChannel
from hepti_mqtt.service.decoder import (
    MessageDecoder,
    PlannerStatus,
    RawRequest,
    RetainedPlan,
)
from hepti_mqtt.service.forecast import Forecasts
from hepti_mqtt.service.handler import OpenModel, Reply, RequestHandler
from hepti_mqtt.service.heartbeats import HeartbeatInbox
from hepti_mqtt.service.home_assistant import RANKING, HomeAssistant
from hepti_mqtt.service.last_state import read_state, save_state
from hepti_mqtt.service.outcomes import RecentAnswers
from hepti_mqtt.service.record import encode_record, read_recalled
from hepti_mqtt.service.retained import RetainedSweep
from hepti_mqtt.service.setup import PlannerConfig, open_models, state_directory
from hepti_mqtt.service.solver import MeasuredErrors, solve, start_preloading
from hepti_mqtt.service.threads import SWITCH_S, FairExecutor, SearchThrottle, Window, run_into
from hepti_mqtt.service.tiles import TileServer
from hepti_mqtt.transport.base import Connected, Disconnected, Inbox, Refused, State, Will, wait_for_broker
from hepti_mqtt.transport.broker_connection import BrokerConnection
from hepti_mqtt.transport.broker_limits import open_broker_warning
from hepti_mqtt.transport.name_claim import claim, new_boot
from hepti_mqtt.transport.url import BrokerUrl

if TYPE_CHECKING:
    from hepti_mqtt.service.metrics import PlannerMetrics

# ----------------------------------------------------------------------------------------------------------------------
# The threads of a planner.
#
# The network thread decodes and enqueues. The session thread (the caller of `run_planner`) handles one event at a time
# and executes the commands. Only this thread calls the session; other threads read its public key and counters, and
# receive immutable values: commands and the current plans. Searching, tokenising, forecasting and reading tiles have
# their own threads, so that none of them delays a running request.


TICK_S: Final = 0.1
MAX_ECHOES: Final = 16
ODD_CLOCK_S: Final = 60.0
INBOX: Final = 10_000
INBOX_BYTES: Final = 256 << 20
UNREAD_BYTES: Final = 64 << 20  # of requests that wait for a reader thread
REQUEST_BYTES: Final = 2048  # overhead of an unparsed request's Python objects
MOST_REQUESTS: Final = UNREAD_BYTES // REQUEST_BYTES  # unacknowledged requests that the broker may deliver
MAX_PARSED: Final = 192  # parsed unanswered requests per model, below the coordinator's limit
MAX_UNREFUSED: Final = 4096  # overflowing requests that wait for an error answer
MAX_UNREFUSED_BYTES: Final = 32 << 20
READER_THREADS: Final = 2  # one thread at a time reads the requests of a client
ANSWER_THREADS: Final = 2
CANCEL: Final = b'{"cancel"'
TILES_QUEUED_BYTES: Final = 2 << 20

SHARING_PROTOCOL: Final = 5
_NOT_SHARED: Final = (
    "--shared needs shared subscriptions, and this broker does not support MQTT 5; use a broker of "
    "docs/guide/groups.md, or leave --shared out"
)

PlannerState = Literal["starting", "online", "offline"]


def run_planner(config: PlannerConfig, stop: threading.Event | None = None) -> None:
    """Plan and coordinate for one site until `stop` is set.

    Waits for the broker. Raises ModelError before the start if no model is usable (of several, the planner serves the
    usable models); ConfigError if a name or a pin is wrong, or if the site has a planner; RefusedError if the broker
    refuses the first connection.
    """
    check_name("site", config.site)
    options = config.options
    if options.shared == config.site:
        raise ConfigError(f"--shared {options.shared} is the planner's own site; give each group a --site of its own")
    if not options.models:
        raise ConfigError("a planner needs at least one model: --model NAME=DIRECTORY")
    stop = stop or threading.Event()
    return_large_blocks()
    with contextlib.ExitStack() as stack:
        claiming: Future[Start | None] = Future()
        ended = threading.Event()
        stack.callback(ended.set)
        threading.Thread(
            target=run_into, args=(claiming, partial(_claim_when_up, config, stop, ended)), name="claim", daemon=True
        ).start()
        models = open_models(config, stack)
        if (start := claiming.result()) is None:
            return
        if (warning := open_broker_warning(config.url)) is not None:
            config.log.warning(warning)
        _Planner(config, start, models).run(stop)


def _claim_when_up(config: PlannerConfig, stop: threading.Event, ended: threading.Event) -> Start | None:
    """Return the start of a new planner once the broker answers; None after `stop`, or if the planner has ended."""

    def connect(_left_s: float) -> Start | None:
        return None if ended.is_set() else claim_site(config.url, config.site)

    return wait_for_broker(connect, config.log.warning, stop=stop)


def claim_site(url: BrokerUrl, site: str) -> Start:
    """Return the start of a new planner of a site.

    Raises ConfigError if a running planner serves the site; NetworkError and RefusedError of the connection.
    """
    name_claim = claim(url, Topics(site).planner_status(), f"hepti-{site}-planner", new_boot(), look=True)
    if name_claim.held:
        raise ConfigError(f"Site {site} already has a planner. Stop it, or choose another --site.")
    return name_claim.start


def _coordinator(config: PlannerConfig, start: Start, models: Mapping[str, OpenModel]) -> session.CoordinatorSession:
    """Return the session of a planner; at log level debug, it checks its invariants after each event."""
    options = config.options
    served_models = tuple(
        ServedModel(
            m.name,
            m.checkpoint.spec,
            m.checkpoint.manifest.digest,
            pins=m.pins,
            batching=Batching(options.batch, options.batch_delay_ms / 1e3),
            tiles=TileMap(m.checkpoint.manifest),
        )
        for m in models.values()
    )
    return session.CoordinatorSession(
        config.site,
        start.boot,
        served_models,
        options.in_flight,
        broker_bytes_per_s=None if options.broker_mbit is None else options.broker_mbit * 1e6 / 8,
        secret=token_bytes(KEY_BYTES),
        checked=options.frame_tags,
        recalls=True,
        checks=config.log.isEnabledFor(logging.DEBUG),
    )


def _placement(plan: Plan | None) -> tuple[PlanVersion, tuple[str, ...]] | None:
    """Return a plan's version and devices, without its prices, which change with each search."""
    return None if plan is None else (plan.version, plan.devices)


class _Planner:
    def __init__(self, config: PlannerConfig, start: Start, models: Mapping[str, OpenModel]) -> None:
        self.config, self.start, self.models, options = config, start, models, config.options
        self.name_holder = NameHolder(start)
        self.log = config.log
        self.decoder = MessageDecoder(config.site, RateLimitedLog(self.log), options.shared)
        self.topics = self.decoder.topics
        self.clocks: dict[str, float] = {}
        self.recalled = set[str]()  # models with an earlier planner's plan that was passed to the session
        self.unrecalled = set(models)  # models until the broker returns this planner's own record of them
        self.published_plans: dict[str, PublishPlan] = {}
        self.unused: Mapping[str, str] = {}  # reasons of unused devices in the published records
        self.session = _coordinator(config, start, models)
        self.checkpoints = {name: model.checkpoint for name, model in models.items()}
        self.state = state_directory(config.site, config.state_dir)
        self.last_state = read_state(self.state, self.checkpoints, self.log)
        self.session.kv_caches.recall(self.last_state.texts)
        self.has_served = False  #: a plan was active, so the last planner's state file is obsolete
        self.will_debounce, self.broker_watch = LastWillDebounce(self.session), BrokerWatch()
        self.snapshots: tuple[PlanSnapshot, ...] = ()
        self.computing: frozenset[str] = frozenset()  #: models with active runs
        self.forecasts = Forecasts(config.site, {n: m.checkpoint.spec for n, m in models.items()})
        self.accuracy = {n: MeasuredErrors.of(m.checkpoint, options.max_weight_error) for n, m in models.items()}
        self.handler = RequestHandler(config.site, models, self.forecasts, options.request_pins)
        self.inbox: Inbox[Callable[[], None] | interface.CoordinatorEvent] = Inbox(INBOX, INBOX_BYTES)
        # Parsed requests per client: one batch more than run at once. The client's other requests wait unread.
        window = Window(min((options.in_flight + 1) * options.batch, MAX_PARSED), MAX_PARSED)
        self.reading = FairExecutor(
            "planner-reader", READER_THREADS, self._run_guarded, limit_bytes=UNREAD_BYTES, window=window
        )
        self.answering = FairExecutor("planner-answers", ANSWER_THREADS, self._run_guarded)
        self.refusing = FairExecutor("planner-refuser", 1, self._run_guarded, MAX_UNREFUSED, MAX_UNREFUSED_BYTES)
        self.searching = FairExecutor("planner-search", 1, self._run_guarded)
        # Short searches do not wait for a long search.
        self.short_searching = FairExecutor("planner-short-search", 1, self._run_guarded)
        self.throttle = SearchThrottle(lambda: not (self.inbox.empty() and self.reading.idle and self.answering.idle))
        self.failure: HeptiError | None = None
        self._make_connections(f"hepti-{config.site}-planner")
        self.retained_status: Will | None = None  # at the broker
        self.echoes: deque[bytes] = deque(maxlen=MAX_ECHOES)  # own statuses that the broker has not delivered back yet
        self.away = {"control", "requests"}  # lost connections; accessed only on the session thread
        self.tiles = TileServer(
            config.site,
            start.boot,
            self.checkpoints,
            lambda topic, payload: self.bulk.publish(topic, payload, 1),
            lambda *what: self.inbox.post(interface.WeightsUnreadable(*what)),
            lambda error: self.inbox.post(partial(self._fail, error)),
        )
        self.retained_sweep = RetainedSweep(config.url, self.topics, self.log)
        self.dropped: int | None = None  # messages dropped by the broker, by its last report
        self.outcomes = RecentAnswers()
        self.home_assistant = self._home_assistant(options.home_assistant)
        self.metrics = self._metrics()

    def _make_connections(self, name: str) -> None:
        """Open a connection per kind of traffic, so that none queues after another; name: MQTT client id."""
        config = self.config
        self.control = BrokerConnection(
            config.url,
            name,
            on_message=self._handle_message,
            on_state=self._handle_connection,
            will=self._status("offline"),
            clean=False,
            name="planner-control",
        )
        place, changed = self.state / "requests", self._handle_requests_connection
        self.channel = RequestChannel(
            config.url,
            name,
            place,
            self.control,
            self.decoder,
            self._enqueue_request,
            changed,
            self._shared("offline"),
            MOST_REQUESTS,
        )
        # Only for weights, so that requests do not queue after weights.
        self.bulk = BrokerConnection(
            config.url, f"{name}-weights", name="planner-weights", max_queued_bytes=TILES_QUEUED_BYTES
        )
        heartbeats = self.topics.all_heartbeats()
        self.heartbeats = HeartbeatInbox(config.url, f"{name}-heartbeats", heartbeats, self._handle_heartbeats_state)

    def _home_assistant(self, prefix: str | None) -> HomeAssistant | None:
        if prefix is None:
            return None
        entry_models = {name: model for name, model in self.models.items() if whole_model(name) == name}
        heads = {name: model.checkpoint.spec.head for name, model in entry_models.items()}
        ranks = {name for name, head in heads.items() if head.task == "classification" and head.outputs == 1}
        tasks = {name: RANKING if name in ranks else head.task for name, head in heads.items()}
        warn = partial(self.decoder.log.record, "home_assistant")
        return HomeAssistant(self.config.url, self.topics, prefix, tasks, time.monotonic, warn)

    def _metrics(self) -> PlannerMetrics | None:
        if self.config.options.metrics is None:
            return None
        with requires_extra("metrics", "--metrics"):
            from hepti_mqtt.service.metrics import PlannerMetrics

        counted = (self.decoder.counters, self.session.counters, self.channel.journal.counters)
        return PlannerMetrics(self.models, lambda: {k: n for c in counted for k, n in dict(c).items()})

    # -- network thread: these methods never block ---------------------------------------------------------------------

    def _handle_message(self, topic: str, payload: bytes) -> None:
        """Handle a message from the broker."""
        if topic == DROPPED_TOPIC:
            self.inbox.post(lambda: self._note_dropped(payload))
            return
        arrival = self.decoder.decode(topic, payload)
        if isinstance(arrival, RawRequest):
            self._enqueue_request(arrival)
        elif isinstance(arrival, PlannerStatus):
            self.inbox.post(lambda: self._handle_planner_status(arrival.status))
        elif isinstance(arrival, RetainedPlan):
            if arrival.model not in self.models:
                self.inbox.post(lambda: self._publish(self.topics.plan(arrival.model), b"", retain=True))
            elif arrival.model in self.unrecalled:
                self.inbox.post(lambda: self._recall(arrival.model, arrival.payload))
        elif arrival is None:
            return
        elif not self.inbox.accept(arrival.device, arrival, len(payload)):
            self._drop("flood", f"a message of {arrival.device}, which sends faster than the planner reads")

    def _handle_connection(self, state: State) -> None:
        """Handle a state of the control connection."""
        if isinstance(state, Connected):
            self.inbox.post(self._connected)
        elif isinstance(state, Disconnected):
            self.log.warning("lost the connection to the broker: %s", state.reason)
            self.inbox.post(lambda: self.away.add("control"))
            self.inbox.post(lambda: self.name_holder.handle_loss(time.monotonic()))
            self.inbox.post(interface.BrokerState(online=False))
        elif isinstance(state, Refused) and state.token is None:
            self.log.error("the broker refused a publish to %s: %s", ", ".join(state.topics), state.reason)
        elif isinstance(state, Refused) and state.topics != (DROPPED_TOPIC,):
            self.inbox.post(lambda: self._refused(state))

    def _handle_heartbeats_state(self, state: State) -> None:
        if isinstance(state, Refused):
            self.inbox.post(lambda: self._refused(state))

    def _handle_requests_connection(self, state: State) -> None:
        """Handle a state of the requests' connection."""
        if isinstance(state, Connected) and self.decoder.shared is not None and state.protocol < SHARING_PROTOCOL:
            self.inbox.post(lambda: self._fail(ConfigError(_NOT_SHARED)))
        elif isinstance(state, Connected):
            self.inbox.post(lambda: self._announce("requests"))
        elif isinstance(state, Disconnected):
            self.inbox.post(lambda: self.away.add("requests"))
        elif isinstance(state, Refused):
            self.inbox.post(lambda: self._refused(state))

    def _enqueue_request(self, raw: RawRequest) -> None:
        read, refuse = partial(self._read, raw, time.monotonic()), partial(self._refuse_overload, raw)
        queue_name, model = self._reader_queue(raw)
        self.reading.submit(queue_name, read, len(raw.payload) + REQUEST_BYTES, refuse, model)

    def _reader_queue(self, raw: RawRequest) -> tuple[str, str]:
        """Return the name of the request's reader queue, and the model whose window counts it.

        A payload that begins with `{"cancel"` has its own queue; a cancel in another spelling waits its turn.
        """
        model = raw.model if raw.model in self.models else ""
        is_cancel = raw.payload.startswith(CANCEL)
        return f"{raw.client}/{'cancel' if is_cancel else model}", "" if is_cancel else model

    def _refuse_overload(self, raw: RawRequest) -> None:
        error = OverloadedError(
            f"More than {UNREAD_BYTES >> 20} MB of requests wait to be read, most from client {raw.client}. "
            "Try again later."
        )
        # On another thread, because finding the id takes time.
        refuse = partial(self._refuse_unread, raw, error)
        drop = partial(self._drop, "untold", f"a request of {raw.client}, unanswered")
        # A larger request can be refused, too, if no other waits.
        nbytes = min(len(raw.payload), MAX_UNREFUSED_BYTES)
        self.refusing.submit(raw.client, refuse, nbytes, drop)

    def _drop(self, kind: str, what: str) -> None:
        self.decoder.log.record(kind, f"Queue full: dropped {what}")

    # -- reader, refuser and answer threads -------------------------------------------------------------------------

    def _read(self, raw: RawRequest, now: float) -> None:
        """Parse a request; free its place in the client's window unless it waits for its answer."""
        is_waiting = False
        try:
            is_waiting = self._start_request(raw, now)
        finally:
            if not is_waiting:
                self.reading.close_task(self._reader_queue(raw)[0])

    def _start_request(self, raw: RawRequest, now: float) -> bool:
        """Parse a request and start it; return whether it waits for its answer."""
        self.channel.begin(raw)
        if self.channel.will_be_redelivered(raw):
            return False
        journal = self.channel.journal
        try:
            journal.check_redelivery(raw)
            parsed = self.handler.read_request(raw, now, journal.id_for)
            is_new = isinstance(parsed, Request) and journal.record_waiting(raw, *self.handler.address(parsed))
        except Exception as error:
            self._refuse_unread(raw, error if isinstance(error, HeptiError) else self._internal_error(error))
            return False
        if isinstance(parsed, RequestKey):
            self.inbox.post(interface.RequestCancelled(parsed))
            journal.settle([raw])  # or it would occupy the broker's delivery window forever
            return False
        if isinstance(parsed, Reply):
            self.channel.send(parsed, [raw])
            if parsed.outcome != "ok":  # a cached answer was counted before
                self.outcomes.record(parsed, 0.0, time.time())
            return False
        cached = self.handler.cached_reply(parsed) if is_new else None
        if cached is not None:  # of a delivery that was answered since `read_request`
            self._deliver(cached)
        elif is_new:
            if raw.site and (acceptance := self.handler.encode_acceptance(parsed, self.config.site)) is not None:
                self.channel.send(acceptance)
            for request in self.handler.parts_of(parsed):
                self._begin(request)
        return True

    def _begin(self, request: Request) -> None:
        """Pass a request to the session thread, or refuse it if too many events wait."""
        if not self.inbox.offer(interface.RequestArrived(request), request.nbytes):
            full = OverloadedError(f"{INBOX} events already wait for the planner; try again later")
            self._answer(interface.RefuseRequest(request, full))
        self.handler.request_forecast(request)  # after posting, so that the forecast does not delay the dispatch

    def _refuse_unread(self, raw: RawRequest, error: HeptiError) -> None:
        reply = self.handler.refuse_unread(raw, error, self.channel.journal.id_for)
        self.channel.send(reply, [raw])
        self.outcomes.record(reply, 0.0, time.time())
        if self.metrics is not None:
            self.metrics.record_answer(raw.model, error.code, 0.0)

    def _answer(self, command: interface.Answer) -> None:
        if isinstance(command, interface.TokenReady):
            if (part := self.handler.encode_token(command)) is not None:
                self.channel.send(part)
            return
        try:
            if isinstance(command, interface.AnswerRequest) and (text := self.handler.following(command)) is not None:
                self._begin(text)
            reply = (
                self.handler.encode_answer(command, time.monotonic())
                if isinstance(command, interface.AnswerRequest)
                else self.handler.encode_error(command)
            )
        except Exception as error:
            reply = self.handler.encode_error(interface.RefuseRequest(command.request, self._internal_error(error)))
        if reply is None:
            return
        self._deliver(reply)
        age_s, model = self.handler.age_s(command.request, time.monotonic()), reply.key.model
        self.outcomes.record(reply, 1e3 * age_s, time.time())
        if self.home_assistant is not None:
            self.home_assistant.record_reply(model, 1e3 * age_s, reply.payload)
        if self.metrics is not None:
            stats = command.stats if isinstance(command, interface.AnswerRequest) else ()
            self.metrics.record_answer(model, reply.outcome, age_s, stats)

    def _deliver(self, reply: Reply) -> None:
        """Send a reply to all deliveries of its request."""
        deliveries = self.channel.journal.take_waiting(reply.key)
        for topic in dict.fromkeys(topic for topic, _ in deliveries):
            self.channel.send(reply._replace(topic=topic), [raw for own, raw in deliveries if own == topic])
        for _, raw in deliveries:
            self.reading.close_task(self._reader_queue(raw)[0])

    def _internal_error(self, error: Exception) -> RemoteError:
        self.log.exception("Internal error while handling a request; the planner continues")
        return RemoteError(f"Internal planner error ({error!r}). See the planner's log.")

    # -- search threads ---------------------------------------------------------------------------------------------

    def _search(self, command: interface.Solve) -> None:
        self.inbox.post(solve(self.throttle.throttled(command), self.accuracy[command.model]))

    # -- session thread ---------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Connect and serve until `stop` is set; raises the error that ends the planner."""
        sys.setswitchinterval(SWITCH_S)
        self.control.subscribe(self.decoder.filters())
        self.control.subscribe([(DROPPED_TOPIC, 0)])  # separately, because a broker may refuse it
        executors = (self.reading, self.answering, self.refusing, self.searching, self.short_searching)
        threads = [
            threading.Thread(target=self.forecasts.run, name="planner-forecasts", daemon=True),
            threading.Thread(target=self.tiles.run, name="planner-tiles", daemon=True),
        ]
        metrics_server = None
        try:
            if self.metrics is not None and self.config.options.metrics is not None:
                metrics_server = self.metrics.serve(self.config.options.metrics)
            for link in (self.bulk, self.heartbeats, self.channel, self.control, self.home_assistant):
                if link is not None:
                    self._connect(link, stop)
            for thread in threads:
                thread.start()
            for executor in executors:
                executor.start()
            self.retained_sweep.start()
            self._serve(stop)
        finally:
            for executor in executors:
                executor.close()
            self.forecasts.close()
            self.retained_sweep.close()
            self.tiles.close()
            self._shut_down()
            if metrics_server is not None:
                metrics_server.close()
        if self.failure is not None:
            raise self.failure
        if self.has_served:
            self._save_state(self.session.kv_caches.texts())

    def _connect(
        self, link: BrokerConnection | HeartbeatInbox | RequestChannel | HomeAssistant, stop: threading.Event
    ) -> None:
        wait_for_broker(lambda _left_s: link.connect(), self.log.warning, stop=stop)

    def _serve(self, stop: threading.Event) -> None:
        tick_at = time.monotonic() + TICK_S
        while not stop.is_set() and self.failure is None:
            left = min(tick_at, self.session.due_s) - time.monotonic()
            try:
                item = self.inbox.get(left) if left > 0 else self._tick()
            except queue.Empty:
                item = self._tick()
            if isinstance(item, interface.Tick):
                tick_at = time.monotonic() + TICK_S
                self.channel.resend_due(time.monotonic())
                if (event := self.outcomes.take()) is not None:
                    self._publish(self.topics.event(ANSWERS), event, 0)
                if self.home_assistant is not None:
                    self.home_assistant.tick()
                if self.metrics is not None:
                    self.metrics.look(self.session, self.channel.unacknowledged, time.monotonic())
            self.throttle.run_before_searches(
                partial(self._run_guarded, item if callable(item) else partial(self._handle, item))
            )

    def _tick(self) -> interface.Tick:
        for topic, payload in self.heartbeats.take():
            heartbeat = self.decoder.decode(topic, payload)
            if isinstance(heartbeat, interface.DeviceHeartbeat):
                self._run_guarded(partial(self._handle, heartbeat))
        heard_s = max(self.control.heard_s, self.heartbeats.heard_s)
        if "control" not in self.away and self.session.fleet.usable():
            verdict = self.broker_watch.look(heard_s, time.monotonic())
            if verdict == "ask":
                self._publish_event("alive", "is the broker alive?")  # the broker acknowledges this event
            elif verdict is not None:
                self.log.warning("the broker %s", "is silent" if verdict == "away" else "is heard again")
                self._handle(interface.BrokerState(online=verdict == "back", is_new=False))
        return interface.Tick(has_backlog=not self.inbox.empty(), heard_s=heard_s)

    def _run_guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            self.log.exception("Internal error while handling an event; the planner continues")

    def _handle(self, event: interface.CoordinatorEvent) -> None:
        try:
            commands: Sequence[interface.CoordinatorCommand] = self.will_debounce.handle(event, time.monotonic())
        except Exception as error:
            if not isinstance(event, interface.RequestArrived):
                raise
            commands = [interface.RefuseRequest(event.request, self._internal_error(error))]
        for command in commands:
            self._run_guarded(partial(self._execute, command))
        if isinstance(event, interface.DeviceHeartbeat):
            self._compare_clock(event.device, event.heartbeat.clock_s)
        elif isinstance(event, interface.Tick) and self.session.fleet.unused_reasons() != self.unused:
            self._publish_plans()
        if (computing := self.session.groups.models_in_use()) != self.computing:
            self.computing = computing
            self.forecasts.set_busy_models(computing)
            self.throttle.set_serving(bool(computing))
            self.tiles.set_serving(bool(computing))
        if (snapshots := self.session.snapshot()) != self.snapshots:
            self.snapshots = snapshots
            self.forecasts.set_plans(snapshots)

    def _recall(self, model: str, payload: bytes) -> None:
        """Pass the plan of an earlier planner to the session, from its retained record.

        After a normal stop that record is empty, so the broker returns only this planner's own record; then the plan is
        in the state file.
        """
        boot, recalled = read_recalled(payload, model, self.models[model].checkpoint.spec)
        is_own = boot == self.start.boot
        if is_own:
            self.unrecalled.discard(model)
            recalled = None if model in self.recalled else self.last_state.plans.get(model)
        if recalled is not None:
            self.recalled.add(model)
        elif is_own and model not in self.recalled:  # a search follows
            start_preloading()
        if recalled is not None or is_own:
            self._handle(interface.PlanRecalled(model, recalled))

    def _compare_clock(self, device: str, clock_s: float) -> None:
        """Warn of a device with a wrong clock; only timestamps for users depend on clocks."""
        ahead_s = clock_s - time.time()
        ahead_s = ahead_s if clock_s and abs(ahead_s) > ODD_CLOCK_S else 0.0
        if abs(ahead_s - self.clocks.get(device, 0.0)) <= ODD_CLOCK_S or device not in self.session.fleet.members:
            return
        self.clocks[device] = ahead_s
        self.clocks = {name: s for name, s in self.clocks.items() if s and name in self.session.fleet.members}
        if ahead_s:
            text = f"the clock of {device} differs from this machine's by {abs(ahead_s):.0f} s; set the wrong clock"
            self.decoder.log.warn_once("odd_clock", device, text)
        self._publish_plans()

    def _publish_plans(self) -> None:
        for shown in self.published_plans.values():
            self._publish_plan(shown)

    def _execute(self, command: interface.CoordinatorCommand) -> None:
        if isinstance(command, Publish):
            self._publish(command.topic, command.payload, qos=command.qos, retain=command.retain)
        elif isinstance(command, interface.Answer):
            self._queue_answer(command)
        elif isinstance(command, interface.Solve):
            executor = self.short_searching if SEARCHES[command.kind].is_short else self.searching
            executor.submit_or_run("", partial(self._search, command))
        elif isinstance(command, interface.SendTiles):
            rate = self.session.fleet.estimates.link(command.device).down_bytes_per_s
            self.tiles.ask(command.model, command.device, command.hashes, rate, command.share)
        elif isinstance(command, interface.PublishPlan):
            self._publish_plan(command)
        else:
            self.log.info("%s: %s", command.kind, command.text)
            self._publish_event(command.kind, command.text)

    def _publish_event(self, kind: str, text: str) -> None:
        event = json.dumps({"kind": kind, "text": text, "time": time.time()})
        self._publish(self.topics.event(kind), event.encode())

    def _queue_answer(self, command: interface.Answer) -> None:
        client, answer = command.request.key.client, partial(self._answer, command)
        if isinstance(command, interface.AnswerRequest) and not command.request.wants_result:
            # The forecast is the answer.
            self.forecasts.call_when_ready(command.stats, partial(self.answering.submit_or_run, client, answer))
            return
        at_once = isinstance(command, interface.AnswerRequest) and command.is_small and self.inbox.empty()
        self.answering.submit_or_run(client, answer, at_once)

    def _publish_plan(self, shown: interface.PublishPlan) -> None:
        checkpoint = self.models[shown.model].checkpoint
        spec_and_path, unused = (checkpoint.spec, checkpoint.path.resolve()), self.session.fleet.unused_reasons()
        before = self.published_plans.get(shown.model)
        self.published_plans[shown.model], self.unused = shown, unused
        self.has_served = self.has_served or bool(shown.active or shown.pinned)
        if shown.active is not None and (before is None or _placement(before.active) != _placement(shown.active)):
            self._save_state(())  # KV caches only at the end, because they change with every request
        now = time.monotonic()
        evidence = self.session.fleet.estimates.describe(now)
        machines, zero_s = self.session.fleet.machines(), time.time() - now
        languages, card = checkpoint.languages, model_card(checkpoint)
        record = encode_record(
            spec_and_path, self.start.boot, shown, zero_s, unused, self.clocks, evidence, languages, machines, card
        )
        self._publish(self.topics.plan(shown.model), record, retain=True)
        if (shared := self.decoder.shared) is not None:
            self._publish(shared.plan(shown.model, self.config.site), record, retain=True)
            shown_plans = [self.published_plans.get(name) for name in self.models]
            # Take shared requests only with a plan for every model.
            self.channel.set_sharing(all(shown and shown.active for shown in shown_plans))

    def _save_state(self, texts: Iterable[HeldText]) -> None:
        """Save the plans for the next planner, including plans of models that have not served yet."""
        self.last_state = self.last_state._replace(plans={**self.last_state.plans, **self.session.last_plans()})
        save_state(self.state, self.last_state.plans, texts, self.checkpoints, self.log)

    def _connected(self) -> None:
        """Publish all retained messages again after each connection, because the broker may have lost them."""
        self.echoes.clear()
        if self.retained_status is None:  # devices need its public key before the first command
            self._publish_status("starting")
        self._handle(interface.BrokerState(online=True))
        self._announce("control")
        self.log.info(
            "planner of site %s, start %d, serves %s", self.config.site, self.start.term, ", ".join(self.models)
        )

    def _announce(self, connection: str) -> None:
        """Publish `online` if all connections are up; clients then resend their pending requests."""
        self.away.discard(connection)
        if not self.away:
            self._publish_status("online")

    def _publish_status(self, state: PlannerState) -> None:
        """Publish this planner's status, and remember it for repairs."""
        self.retained_status = self._status(state)
        self._repair_status()
        if (shared := self._shared(state)) is not None:
            self._publish(*shared)

    def _handle_planner_status(self, status: Status) -> None:
        if self.echoes and status == decode_status(self.echoes[0]):
            self.echoes.popleft()
            return
        verdict = self.name_holder.handle(status, time.monotonic())
        if verdict == "taken":
            self.failure = ConfigError(f"another planner has taken over site {self.config.site}; this planner stops")
        elif self.retained_status is not None and (
            verdict == "contradict" or status != decode_status(self.retained_status.payload)
        ):
            self._repair_status()  # a late will of an earlier planner or connection, or a forged status

    def _repair_status(self) -> None:
        if self.retained_status is not None:
            self.echoes.append(self.retained_status.payload)
            self._publish(*self.retained_status)

    def _note_dropped(self, payload: bytes) -> None:
        """Log messages dropped by the broker, and announce the planner so that clients resend pending requests."""
        if not payload.isdigit():
            return
        before, self.dropped = self.dropped, int(payload)
        if before is not None and self.dropped > before:
            self.log.warning(
                "The broker dropped %d messages because a client's queue was full: requests or answers may be lost. "
                "Raise max_queued_messages in mosquitto.conf to 1000000; see `hepti doctor`.",
                self.dropped - before,
            )
            self._announce("control")

    def _fail(self, error: HeptiError) -> None:
        self.failure = error

    def _refused(self, state: Refused) -> None:
        self.failure = RefusedError(
            f"the broker forbids the planner to subscribe to {', '.join(state.topics)}: {state.reason}; "
            "`hepti site` writes an access list that allows it"
        )

    def _shut_down(self) -> None:
        """Clear the retained plans and close; a replaced planner keeps its successor's plans."""
        replaced = isinstance(self.failure, ConfigError)
        if not replaced:
            for name in self.models:
                self._publish(self.topics.plan(name), b"", retain=True)
                if self.decoder.shared is not None:
                    self._publish(self.decoder.shared.plan(name, self.config.site), b"", retain=True)
            if (shared := self._shared("offline")) is not None:
                self._publish(*shared)
        self.bulk.close()
        self.heartbeats.close()
        if self.home_assistant is not None:
            self.home_assistant.close()
        self.control.close(None if replaced else self._status("offline"))
        self.channel.close()

    # -- any thread -------------------------------------------------------------------------------------------------

    def _publish(self, topic: str, payload: bytes, qos: int = 1, retain: bool = False) -> None:
        try:
            self.control.publish(topic, payload, qos, retain)
        except NetworkError as error:
            self.decoder.log.record("unpublished", f"not published to {topic}: {error}")

    def _status(self, state: PlannerState) -> Will:
        key = "" if state == "offline" else self.session.fleet.public_key
        status = Status(state, self.start.boot, version=__version__, public_key=key, term=self.start.term)
        return Will(self.topics.planner_status(), encode_status(status), 1, retain=True)

    def _shared(self, state: PlannerState) -> Will | None:
        """Return the planner's status at the site of the shared requests, None without sharing."""
        if self.decoder.shared is None:
            return None
        return Will(self.decoder.shared.planner_status(self.config.site), self._status(state).payload, 1, retain=True)
