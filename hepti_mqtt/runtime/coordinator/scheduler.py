"""Which replica of a plan runs what waits: each request goes where it is answered first, behind those before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from typing import Final, NamedTuple

import numpy as np

from hepti_mqtt.errors import DeadlineError, HeptiError, IdInUseError, OverloadedError, RemoteError
from hepti_mqtt.plan import Plan
from hepti_mqtt.plan_programs import tasks
from hepti_mqtt.protocol import messages
from hepti_mqtt.protocol.frames import MAX_SESSION, Session, encode_work
from hepti_mqtt.protocol.topics import Topics, publish_bytes
from hepti_mqtt.runtime.coordinator.interface import Answer, CoordinatorCommand, Note, Refuse, Token, UpFrame
from hepti_mqtt.runtime.coordinator.models import ModelState, Slots
from hepti_mqtt.runtime.coordinator.requests import (
    MICRO,
    UNREPORTED,
    Array,
    Generation,
    Item,
    Job,
    Run,
    RunStats,
    Waiting,
    likeliest,
    longer,
    micro_batches,
    packed,
    parted,
)
from hepti_mqtt.runtime.machinery import Publish
from hepti_mqtt.schedule import deal
from hepti_mqtt.task_queue import Bag

SHORTEST_S: Final = 1e-6  # of a run


class Lane(NamedTuple):
    """A replica: until when it is busy by prediction, the seconds of a token there, whether it has room for a run."""

    plan: Plan
    busy_s: float
    token_s: float
    has_room: bool


class Hand(NamedTuple):
    """What goes next: under which plan, and of what waits how many at the most, None for as many as run together."""

    plan: Plan
    share: int | None = None


def next_hand(now: float, lanes: Sequence[Lane], queue: Waiting) -> Hand | None:
    """Return what goes next to a replica that has room; None if all that waits is answered sooner by busy ones."""
    if len(lanes) < 2:
        return Hand(lanes[0].plan) if lanes and lanes[0].has_room else None
    sizes = (float(max(item.tokens, _least(lanes[0].plan))) for item in queue.turns())
    dealt = list(deal(now, [(lane.busy_s, lane.token_s) for lane in lanes], sizes))
    first = next((i for i in dealt if lanes[i].has_room), None)
    return None if first is None else Hand(lanes[first].plan, dealt.count(first))


def token_s(plan: Plan) -> float:
    """Return the seconds of a token, by what the plan was made for; never none, or one replica would get all."""
    return max(plan.predicted_s, SHORTEST_S) / max(plan.predicted_tokens, 1)


def likely_s(plan: Plan, tokens: int) -> float:
    """Return the seconds that a run of so many tokens likely takes."""
    return token_s(plan) * max(tokens, _least(plan))


def _least(plan: Plan) -> int:
    """Return for how many tokens a run of fewer takes as long."""
    return min(MICRO, max(plan.predicted_tokens, 1))


# ----------------------------------------------------------------------------------------------------------------------
# The bags of runs: tasks are leased to devices that are free, and again where one is lost or slow.


class Bags:
    """Leases of all runs that have a bag."""

    def __init__(self, topics: Topics, slots: Slots) -> None:
        self._topics, self._slots = topics, slots

    @property
    def due_s(self) -> float:
        """Return when a free device would take over a lease, infinity if none would."""
        bags = (run.bag for run in self._runs() if run.plan.head not in run.done)
        return min((bag.due_s for bag in bags if bag is not None), default=inf)

    def done(self, device: str, message: messages.TaskDone, now: float) -> list[CoordinatorCommand]:
        """A device has computed a task: lease it the next one, or say that none is left."""
        model = self._slots.running(message.model, message.admission)
        run = None if model is None else model.runs[message.admission]
        if run is None or run.bag is None or run.epoch != message.epoch:
            return []
        if run.plan.head in run.done:  # it began when all others were told that none is left
            return [self._lease(run, device, ())]
        run.bag.done(device, message.task, now)
        return self.lease(run, now)

    def close(self, run: Run) -> list[CoordinatorCommand]:
        """The head device has all tasks and is done, so nothing is left for the others.

        Not before: what a device has computed may be lost with it on its way, and is leased anew then.
        """
        return [self._lease(run, d, ()) for d in run.plan.devices if d != run.plan.head and d not in run.gone]

    def lease(self, run: Run, now: float) -> list[CoordinatorCommand]:
        """Lease what waits, or is late, to the devices of a run that are free."""
        if run.bag is None or run.plan.head in run.done:
            return []
        return [self._lease(run, d, (task,)) for d, task in run.bag.leases(now)]

    def tick(self, now: float) -> list[CoordinatorCommand]:
        """Lease anew what has become late."""
        return [command for run in self._runs() for command in self.lease(run, now)]

    def without(self, run: Run, device: str, now: float) -> list[CoordinatorCommand] | None:
        """Go on without a device; None where a run cannot: without its bag, or without the head device."""
        if run.bag is None or device == run.plan.head:
            return None
        run.gone.add(device)
        run.done.pop(device, None)
        run.bag.lost(device)
        return self.lease(run, now)

    def _runs(self) -> Iterable[Run]:
        return (run for slot in self._slots for run in slot.runs.values())

    def _lease(self, run: Run, device: str, tasks: tuple[int, ...]) -> CoordinatorCommand:
        lease = messages.Lease(run.plan.model, run.epoch, run.admission, tasks)
        return Publish(self._topics.command(device), messages.encode(lease), 1)


# ----------------------------------------------------------------------------------------------------------------------
# Requests that generate: a token as soon as a run's output is there, the next run at once, the reports as they come.
#
# An output needs every op of every device of its run (a test of all methods says so). So whoever has it knows that all
# of
# them have cached their rows, and the next run finds them; what is still on its way are reports. They are counted when
# they come. A token that was told cannot be taken back: if its run turns out to have been forged it is computed again,
# and another one in its place is an error.


class Generating:
    """The steps of requests that generate. cancel: takes a run back; end: refuses a request."""

    def __init__(
        self,
        cancel: Callable[[ModelState, Run], list[CoordinatorCommand]],
        end: Callable[[ModelState, Job, HeptiError], list[CoordinatorCommand]],
    ) -> None:
        self._cancel, self._end = cancel, end

    def early(self, model: ModelState, run: Run) -> list[CoordinatorCommand]:
        """Go on with the output of a run some of whose reports are missing; no token follows from some outputs."""
        if not run.jobs or not _usable(run.output()):
            return []
        generation = run.items[0].job.generation
        assert generation is not None
        run.early, run.place = run.stats(), len(generation.tokens)
        return self._step(model, run, run.early)

    def reported(self, model: ModelState, run: Run, stats: RunStats, tries: int) -> list[CoordinatorCommand]:
        """Take the reports of a run that is over, and its output if nothing went on with it before."""
        job = run.items[0].job
        generation = job.generation
        assert generation is not None
        if job.over:
            return []
        if run.place is None:
            return self._step(model, run, stats)
        if likeliest(run.output()) != generation.tokens[run.place]:  # the reports say that a part of it was forged
            return self.doubt(model, run, RemoteError("parts of an answer are not those that devices have sent"), tries)
        job.stats[run.place] = stats
        return self.answer(model, run)

    def answer(self, model: ModelState, run: Run) -> list[CoordinatorCommand]:
        """Answer the request of a run if all tokens are there, and nothing that it waits for."""
        job = run.items[0].job
        if job.over or job.generation is None or not job.generation.done:
            return []
        if job.report and any(other.items[0].job is job for other in model.runs.values()):
            return []
        job.over = True
        return [Answer(job, model.plans.whole(job.stats[-1].plan), tuple(job.stats))]

    def doubt(self, model: ModelState, run: Run, error: HeptiError, tries: int) -> list[CoordinatorCommand]:
        """Take back what followed from a run's output, which may be forged, and compute it again.

        The request ends with the error after so many tries.
        """
        item = run.items[0]
        job, place = item.job, run.place
        assert job.generation is not None
        assert place is not None
        if job.over:
            return self._cancel(model, run)
        job.generation.take_back(place)
        del job.stats[place:]
        out: list[CoordinatorCommand] = []
        for later in [r for r in model.runs.values() if r.items[0] is item and r.admission >= run.admission]:
            out += self._cancel(model, later)
        if any(waiting is item for waiting in model.queue):
            model.queue.take([item])
        job.attempts[item.chunk] += 1
        if job.attempts[item.chunk] >= tries:
            return out + self._end(model, job, error)
        model.queue.add_first([item])
        return out

    def _step(self, model: ModelState, run: Run, stats: RunStats) -> list[CoordinatorCommand]:
        """Take a token; queue the next run of its session before all others, so that few sessions are open at once."""
        item, logits = run.items[0], run.output()
        job, generation = item.job, item.job.generation
        assert generation is not None
        if not _usable(logits):
            error = RemoteError(f"the devices answered with {list(logits.shape)} numbers that no token follows from")
            return self._end(model, job, error)
        place, told = len(generation.tokens), generation.told
        token = generation.take(logits)
        job.stats.append(stats)
        out: list[CoordinatorCommand] = []
        if place >= len(told):
            job.attempts.clear()
            out.append(Token(job, place, tuple(generation.tokens)))
        elif token != told[place]:
            text = f"token {place} was told as {told[place]} and is {token} by a second answer; ask again"
            return self._end(model, job, RemoteError(f"{text}, and see `hepti devices` for devices that lie"))
        if not generation.done:
            model.queue.add_first([item])
        return out + self.answer(model, run)


def taking_room(runs: list[Run], plan: Plan) -> list[Run]:
    """Return those of a model's runs that take room on devices of a plan: that compute, or lack reports beyond a few.

    What lacks reports alone takes no room on devices any more; but it is remembered here, so there is a bound.
    """
    here = [run for run in runs if not set(run.plan.devices).isdisjoint(plan.devices)]
    return [run for run in here if run.computes] + [run for run in here if not run.computes][UNREPORTED:]


def _usable(logits: Array) -> bool:
    return logits.ndim == 2 and len(logits) == 1 and bool(np.isfinite(logits).all())


# ----------------------------------------------------------------------------------------------------------------------
# Requests on their way: taken in, run under a plan, answered or refused, and run again when a run is lost.


QUEUE: Final = 64  # requests of one client that wait, per model
QUEUE_ALL: Final = 256  # and of all clients
QUEUE_BYTES: Final = 256 << 20  # of what all of them bring
ATTEMPTS: Final = 4
DISTURBED_S: Final = 5.0  # one connection between two devices that is lost and comes back may cost a request four runs
DOUBT_FACTOR: Final = 6.0  # times what a run should take: then its devices are asked for a word
DOUBT_LEAST_S: Final = 0.5
DOUBT_MOST_S: Final = 30.0
OVERDUE_S: Final = 3.0
OVERDUE_FACTOR: Final = 20.0
OVERDUE_MOST_S: Final = 300.0  # whatever is predicted: what devices tell of themselves may be wrong by any factor


class Dispatcher:
    """Queues, runs and answers of every slot; which plan is active is the coordinator's.

    in_flight: runs of a model at once on a device, whatever their pins: devices count on no more. counters: what was
    not understood or came too late, by name.
    """

    def __init__(self, topics: Topics, slots: Slots, in_flight: int, counters: Counter[str]) -> None:
        self._topics, self._slots, self._in_flight, self._counters = topics, slots, in_flight, counters
        self._held: dict[str, float] = {}  # until when requests for a model wait for others
        self._number = 0
        self._admission = 0
        self._session = 0
        self._generating = Generating(self._cancel, self.end)
        self.bags = Bags(topics, slots)

    @property
    def due_s(self) -> float:
        """Return when the first request is due that waits for others to run with, or a lease; infinity if none is."""
        return min([*self._held.values(), self.bags.due_s])

    def turned_away(self, job: Job) -> list[CoordinatorCommand] | None:
        """Return what follows from a request that no queue takes; None if one does."""
        name = job.key.model
        same = next((j for j in self._slots.jobs(name) if j.key == job.key), None)
        if same is not None and same.digest != job.digest:
            return [Refuse(job, IdInUseError.of(job.key.request))]
        if same is not None:
            self._counters["repeated_request"] += 1
            return []
        waiting = list({id(item.job): item.job for slot in self._slots.of(name) for item in slot.queue}.values())
        if (of_client := sum(j.key.client == job.key.client for j in waiting)) >= QUEUE:
            text = f"{of_client} requests of {job.key.client} wait for {name} already; send more when some are answered"
            return self.overloaded(job, text)
        nbytes = sum(j.nbytes for j in waiting)
        if len(waiting) >= QUEUE_ALL or (waiting and nbytes + job.nbytes > QUEUE_BYTES):
            text = f"{len(waiting)} requests of {nbytes} bytes wait for {name} already; try again later, or add devices"
            return self.overloaded(job, text)
        return None

    @staticmethod
    def overloaded(job: Job, text: str) -> list[CoordinatorCommand]:
        """Refuse a request that there is no room for."""
        return [Note("overloaded", text), Refuse(job, OverloadedError(text))]

    def submit(self, model: ModelState, job: Job, now: float) -> list[CoordinatorCommand]:
        """Take a request into the queue of its slot, or refuse it if there is no plan and none to come."""
        model.asked_s = now
        if model.error is not None and not model.plans.hopeful():
            return [Refuse(job, model.error)]
        self._number += 1
        job.number, job.came_s = self._number, now
        longest = max(c.shape.size for c in job.chunks)
        model.recent.append(longest + (job.generation.most if job.generation else 0))
        if model.active is not None and model.active.replicas and job.computes and job.generation is None:
            job.chunks = micro_batches(job.chunks)  # each goes to the replica that is free first
        model.queue.add(Item(job, i) for i in range(len(job.chunks) if job.computes else 1))
        return []

    def pump(self, name: str, now: float) -> list[CoordinatorCommand]:
        """Dispatch what waits for a model, as far as there are plans for it and room beside what runs."""
        out: list[CoordinatorCommand] = []
        held: dict[int, float] = {}  # slots whose requests wait for others, and until when
        while True:
            slots = (s for s in self._slots.of(name) if s.active and s.queue and self._slots.may_run(s))
            able = [slot for slot in slots if id(slot) not in held]
            if not able:
                break
            model = min(able, key=lambda slot: slot.queue.first())
            hand = next_hand(now, self._lanes(model, now), model.queue)
            if hand is None:
                held[id(model)] = inf
                continue
            items, due_s = model.next(hand.share)
            if now < due_s:
                held[id(model)] = due_s
                continue
            plan = self._where_it_began(model, items[0].job.generation) or hand.plan
            if not self._has_room(model, plan):
                held[id(model)] = inf
                continue
            assert model.active is not None
            model.queue.take(items)
            if items[0].job.computes:
                out += self._dispatch(model, plan, items, now)
            else:
                out += self._foretell(model, model.active, items[0].job, now)
        self._held[name] = min(held.values(), default=inf)
        return out

    def _beside(self, name: str, plan: Plan) -> list[Run]:
        """Return the runs of a model, whatever their pins, that a run under a plan would share its devices with."""
        return taking_room([run for slot in self._slots.of(name) for run in slot.runs.values()], plan)

    def _has_room(self, model: ModelState, plan: Plan) -> bool:
        return len(self._beside(model.name, plan)) < self._in_flight

    def _lanes(self, model: ModelState, now: float) -> list[Lane]:
        """Return the replicas of the active plan, or the plan itself."""
        assert model.active is not None
        learned, out = model.learned(now, model.active), list[Lane]()
        for plan in model.able:
            beside = self._beside(model.name, plan)
            # What runs longer than predicted still keeps it busier than one where nothing runs.
            busy_s = max([now, *(run.until_s for run in beside)]) + len(beside) * SHORTEST_S
            out.append(Lane(plan, busy_s, token_s(plan) * learned, self._has_room(model, plan)))
        return out

    @staticmethod
    def _where_it_began(model: ModelState, generation: Generation | None) -> Plan | None:
        """Return the replica that has a session's cache, None if none has."""
        return None if generation is None else next((p for p in model.able if p.epoch == generation.epoch), None)

    def frame(self, event: UpFrame, now: float) -> list[CoordinatorCommand]:
        """Take an output, or what a device counted of a run; the last one of a job's answers it."""
        frame = event.frame
        model = self._slots.running(frame.model, frame.admission)
        run = None if model is None else model.runs[frame.admission]
        if model is None or run is None or run.epoch != frame.epoch or event.device not in run.plan.devices:
            self._counters["late"] += 1
            return []
        out: list[CoordinatorCommand] = []
        if run.contradicts(event.device, frame):  # one of both is forged
            self._counters["contradicted"] += 1
            return self._again_or_end(model, run, RemoteError(f"two answers of {event.device} differ"), ATTEMPTS)
        if frame.kind == "output":
            run.parts[event.device, frame.node, frame.part] = (frame.row_start, frame.array())
        elif frame.kind == "done" and len(frame.numbers) == 4:
            run.done[event.device] = frame.numbers
            if run.bag is not None and event.device == run.plan.head:
                out = self.bags.close(run)
        else:
            self._counters["foreign_frame"] += 1
        if run.complete():
            return [*out, *self._complete(model, run, now)]
        return [*out, *self._early(model, run)] if run.early is None else out

    def failed(self, device: str, message: messages.RequestFailed, now: float) -> list[CoordinatorCommand]:
        """Run again what was lost on the wire, and once what a device could not compute; other failures are answers."""
        model = self._slots.running(message.model, message.admission)
        run = None if model is None else model.runs[message.admission]
        if model is None or run is None or run.epoch != message.epoch or device not in run.plan.devices:
            self._counters["late"] += 1
            return []
        out: list[CoordinatorCommand] = [Note("request_failed", f"{device}: {message.text}")]
        if message.code in ("wire", "session", "link"):
            return out + self.again(model, run, blameless=message.code == "link" and self._disturbed(run, now))
        # What reached the device may have been forged, as this may be, or its memory short.
        return out + self._again_or_end(model, run, RemoteError(message.text), 2)

    def _again_or_end(self, model: ModelState, run: Run, error: RemoteError, tries: int) -> list[CoordinatorCommand]:
        """Run a request again that has failed, with no other; it ends with the error after so many tries."""
        if not run.computes:
            return self._generating.doubt(model, run, error, tries)
        tried = 1 + max((item.job.attempts[item.chunk] for item in run.open), default=0)
        if len(run.items) == 1 and tried < tries:
            return self.again(model, run)
        out = self._cancel(model, run)
        if len(run.items) == 1 and run.open:
            return out + self.end(model, run.items[0].job, error)
        for item in run.open:  # whose fault it was shows when each runs by itself
            item.job.apart.add(item.chunk)
        model.queue.add_first(run.open)
        return out

    @staticmethod
    def _disturbed(run: Run, now: float) -> bool:
        """Take it that a connection between devices cost a run; return whether that belongs to an earlier loss."""
        before = max(item.job.disturbed_s for item in run.items)
        if now - before < DISTURBED_S:
            return True
        for item in run.items:
            item.job.disturbed_s = now
        return False

    def again(self, model: ModelState, run: Run, blameless: bool = False) -> list[CoordinatorCommand]:
        """Take a run back and queue it first; its job fails after too many attempts.

        blameless: no device had a part in the loss, so it is no attempt.
        """
        out = self._cancel(model, run)
        back: list[Item] = []
        for item in run.open:
            job, lost = item.job, item.job.attempts
            if job.over:
                continue
            lost[item.chunk] += not blameless
            if lost[item.chunk] >= ATTEMPTS:
                error: HeptiError = RemoteError(
                    f"the request was lost {lost[item.chunk]} times (devices left, or exchanges never arrived: "
                    "a broker drops what is over its max_queued_messages); see `hepti devices`, `hepti doctor` and "
                    "the planner's log"
                )
                out += self.end(model, job, error)
            elif model.error is not None and not model.plans.hopeful():
                out += self.end(model, job, model.error)
            else:
                back.append(item)
        for item in back:
            if item.job.generation is not None:
                item.job.generation.epoch = None  # some device may have cached less than others: it begins anew
            if item.job.attempts[item.chunk] > 1:  # it may be what brings runs to nothing
                item.job.apart.add(item.chunk)
        model.queue.add_first(back)
        return out

    def lost(self, model: ModelState, run: Run, device: str, now: float) -> list[CoordinatorCommand]:
        """A device of a run is gone: others take over its tasks, or the run is issued again."""
        left = self.bags.without(run, device, now)
        if left is None:
            return self.again(model, run)
        return [*left, *self._complete(model, run, now)] if run.complete() else left

    def cut(self) -> None:
        """The broker was lost, and with it whatever was on its way."""
        for run in [run for slot in self._slots for run in slot.runs.values()]:
            run.cut = True

    def cut_short(self, back: Callable[[Collection[str]], bool]) -> list[CoordinatorCommand]:
        """Issue again what was cut short, as soon as all of its devices are back."""
        cut = [(slot, run) for slot in self._slots for run in slot.runs.values() if run.cut]
        again = [self.again(slot, run, blameless=True) for slot, run in cut if back(run.plan.devices)]
        return [command for commands in again for command in commands]

    def end(self, model: ModelState, job: Job, error: HeptiError) -> list[CoordinatorCommand]:
        """Refuse a job and cancel the runs that nobody else waits for; one that is over already is left alone."""
        if job.over:
            return []
        job.over = True
        out: list[CoordinatorCommand] = []
        for run in [r for r in model.runs.values() if not r.jobs and r.early is None]:
            out += self._cancel(model, run)
        return [*out, Refuse(job, error)]

    def expire(self, model: ModelState, now: float) -> list[CoordinatorCommand]:
        """Refuse the jobs whose deadline has passed."""
        late = {id(j): j for j in model.jobs() if j.deadline_s is not None and now > j.deadline_s}
        out: list[CoordinatorCommand] = []
        for job in late.values():
            out += self.end(model, job, DeadlineError("the deadline passed before the answer was ready"))
        model.queue.forget_over()
        return out

    def _dispatch(self, model: ModelState, plan: Plan, items: tuple[Item, ...], now: float) -> list[CoordinatorCommand]:
        self._admission += 1
        part, session = packed([item.part for item in items]), Session()
        generation = items[0].job.generation
        if generation is not None:
            if generation.epoch != plan.epoch:
                self._session = self._session % MAX_SESSION + 1
                generation.begin(plan.epoch, self._session)
            part, session = generation.next()
        model.dispatched(part.shape)
        bag = tasks(model.served.spec, plan)
        payload = encode_work(plan.model, plan.epoch, self._admission, part.shape, part.inputs, session)
        topic = self._topics.work(plan.model, plan.devices[0])
        beside = self._beside(model.name, plan)
        learned = model.learned(now, plan)
        expected_s = plan.predicted_s * learned * longer(plan, part.shape.size) * max(len(beside), 1)
        until_s = max([now, *(run.until_s for run in beside)]) + learned * likely_s(plan, part.shape.size)
        doubt = now + min(max(DOUBT_FACTOR * expected_s, DOUBT_LEAST_S), DOUBT_MOST_S)
        # Twice as long after each loss: a machine that is merely busy must not lose a request by being asked again.
        patience_s = OVERDUE_S * 2 ** max(i.job.attempts[i.chunk] for i in items) + OVERDUE_FACTOR * expected_s
        overdue = now + min(patience_s, OVERDUE_MOST_S)
        sent = publish_bytes(topic, len(payload), 1)
        others = [run for slot in self._slots for run in slot.runs.values() if run.computes]
        for run in others:
            run.alone = False
        model.runs[self._admission] = Run(
            self._admission,
            items,
            part.shape,
            plan,
            model.cluster(),
            now,
            overdue,
            sent,
            alone=not others,
            learned=learned,
            expected_s=expected_s,
            doubt_s=doubt,
            until_s=until_s,
            bag=Bag(bag, plan.devices, now) if bag else None,
        )
        return [Publish(topic, payload, 1)]

    def _foretell(self, model: ModelState, plan: Plan, job: Job, now: float) -> list[CoordinatorCommand]:
        """Answer a request that only wants the plan: as if its runs had taken nothing."""
        job.over = True
        learned, cluster = model.learned(now, plan), model.cluster()
        runs = (RunStats(plan, cluster, shape, {}, {}, {}, 0, learned=learned) for shape in job.shapes())
        return [Answer(job, plan, tuple(runs))]

    def _complete(self, model: ModelState, run: Run, now: float) -> list[CoordinatorCommand]:
        del model.runs[run.admission]
        self._counters["foreign_frame"] += run.unannounced()
        # Of a decoder plans are made for its steps, of others for a request that runs by itself.
        if run.alone and len(run.items) == 1 and (not run.shape.session_rows or run.shape.size == 1):
            model.ran(run.plan, run.shape.size, now - run.begun_s, now)
        if not run.whole(model.served.spec.output_shape(run.shape)):  # other versions' parts, or one that is forged
            error = RemoteError("the devices' outputs do not fit together; use one version")
            return self._again_or_end(model, run, error, ATTEMPTS)
        stats = run.stats()
        if run.items[0].job.generation is not None:
            return self._generating.reported(model, run, stats, ATTEMPTS)
        out: list[CoordinatorCommand] = []
        outputs = parted(model.served.spec, [item.part for item in run.items], run.output())
        for item, output in zip(run.items, outputs, strict=True):
            if run.early is None or item.job.report:
                out += self._taken(model, run, item, stats, output)
            else:  # it has the output, and perhaps waits for that of other runs
                item.job.stats = [stats if known is run.early else known for known in item.job.stats]
        return out

    def _early(self, model: ModelState, run: Run) -> list[CoordinatorCommand]:
        """Give its output to whoever waits for nothing else, once it is there.

        The run goes on until all devices have reported, as if nothing had happened; if they do not, it is overdue.
        """
        generates = run.items[0].job.generation is not None
        takers = [item for item in run.items if generates or not item.job.report]
        if not takers or not run.whole(model.served.spec.output_shape(run.shape)):
            return []
        if generates:
            return self._generating.early(model, run)
        run.early, out = run.stats(), []
        outputs = parted(model.served.spec, [item.part for item in run.items], run.output())
        for item, output in zip(run.items, outputs, strict=True):
            out += self._taken(model, run, item, run.early, output) if item in takers else []
        return out

    @staticmethod
    def _taken(model: ModelState, run: Run, item: Item, stats: RunStats, output: Array) -> list[CoordinatorCommand]:
        """Give a job the output of one of its chunks; the last one is the answer."""
        job = item.job
        if job.over:
            return []
        job.stats.append(stats)
        job.outputs[item.chunk] = output
        if len(job.outputs) < len(job.chunks):
            return []
        job.over = True
        return [Answer(job, model.plans.whole(run.plan), tuple(job.stats))]

    def _cancel(self, model: ModelState, run: Run) -> list[CoordinatorCommand]:
        model.runs.pop(run.admission, None)
        payload = messages.encode(messages.Cancel(run.plan.model, run.epoch, run.admission))
        out: list[CoordinatorCommand] = [Publish(self._topics.command(d), payload, 1) for d in run.plan.devices]
        return out + self._generating.answer(model, run)  # which may have waited for its reports alone
