"""Requests on their way: a user's request is a job of one or more chunks, a run is one packed batch of chunks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hepti_mqtt.cost.profiles import Cluster
from hepti_mqtt.errors import RemoteError
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan import Objective, Plan, Route, Storage, WireDtype
from hepti_mqtt.protocol.frames import Frame, Session
from hepti_mqtt.spec import RequestShape, Spec
from hepti_mqtt.task_queue import Bag

Array = NDArray[Any]
UNREPORTED: Final = 4  # runs on a device whose reports alone are missing, and that take no room of others


@dataclass(frozen=True, slots=True)
class Chunk:
    """A packed batch that runs as one: its shape and token ids [m] i32 or pixels [B, C, S, S] u8."""

    shape: RequestShape
    inputs: Array


@dataclass(frozen=True, slots=True)
class RequestKey:
    """What makes a user's request one and the same: model, client and the client's own id."""

    model: str
    client: str
    request: str


@dataclass(frozen=True, slots=True)
class Pins:
    """What is fixed of a model's plans; what is None the planner chooses.

    accuracy: how far narrow numbers on the wire may move an answer, relative to f32; the wire is the planner's then.
    """

    strategy: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] | None = None
    wire: WireDtype = "f32"
    storage: Storage = "f32"
    route: Route | None = None
    objective: Objective = "latency"
    accuracy: float | None = None

    @property
    def free(self) -> bool:
        """Return whether strategy, variant and devices are the planner's choice."""
        return self.strategy is None and not self.options and self.devices is None

    def __str__(self) -> str:
        words = [self.strategy, *self.options.values(), self.devices and "on " + " ".join(self.devices)]
        words += [f"wire {self.wire}" if self.wire != "f32" else "", self.storage if self.storage != "f32" else ""]
        words += [f"route {self.route}" if self.route else ""]
        words += [f"for {self.objective}" if self.objective != "latency" else ""]
        words += [f"accuracy {self.accuracy:g}" if self.accuracy is not None else ""]
        return ", ".join(word for word in words if word) or "auto"


@dataclass(slots=True)
class Generation:
    """Tokens that come one after the other: the prompt, what was generated, and the session that has them cached.

    most: tokens to generate; end: the token after which there are no more, if any. shape: of the prompt's run.
    session: its number, 0 before it begins; epoch: under which it was begun; rows: cached so far. told: tokens that the
    user knows and that were taken back, to be computed again.
    """

    prompt: tuple[int, ...]
    most: int
    shape: RequestShape
    end: int | None = None
    tokens: list[int] = field(default_factory=list)
    session: int = 0
    epoch: Epoch | None = None
    rows: int = 0
    told: tuple[int, ...] = ()

    @property
    def done(self) -> bool:
        """Return whether the last token is there."""
        return len(self.tokens) >= self.most or (bool(self.tokens) and self.tokens[-1] == self.end)

    def begin(self, epoch: Epoch, session: int) -> None:
        """Begin anew under an epoch: the next run computes the prompt and all tokens so far."""
        self.epoch, self.session, self.rows = epoch, session, 0

    def next(self) -> tuple[Chunk, Session]:
        """Return the next run: the tokens that are not cached, and whether it is the session's last."""
        ids = (*self.prompt, *self.tokens)[self.rows :]
        chunk = Chunk(self.shape.step(len(ids)), np.array([self.rows, *ids], np.int32))
        return chunk, Session(self.session, final=len(self.tokens) + 1 >= self.most)

    def take(self, logits: Array) -> int:
        """Take the logits [1, V] of the run that `next` gave; return the token that follows, the likeliest one."""
        self.rows = len(self.prompt) + len(self.tokens)
        self.tokens.append(likeliest(logits))
        return self.tokens[-1]

    def take_back(self, place: int) -> None:
        """Take back the tokens from a place on; what is cached of them may be wrong, so a new session begins."""
        self.told = max(self.told, tuple(self.tokens), key=len)
        del self.tokens[place:]
        self.epoch = None


@dataclass(slots=True)
class Job:
    """A user's request; `token` is the shell's own handle for writing the answer.

    pins: the request runs only under a plan that was searched under them; None: under the planner's own. computes:
    False for a request that only wants a plan to be up, and its forecast. attempts: how often each chunk was lost.
    generation: of a job that generates tokens, run by run; its chunk is the prompt. digest: of what the user asked, by
    which a repetition is told from another request under the same id. number: its place in the order of arrival.
    came_s: when it came. report: the answer waits for what the devices counted. disturbed_s: when a lost connection
    between devices last counted as an attempt. apart: chunks that run with no other request's, because a run with them
    has failed.
    """

    key: RequestKey
    chunks: tuple[Chunk, ...]
    token: object
    deadline_s: float | None
    pins: Pins | None = None
    computes: bool = True
    outputs: dict[int, Array] = field(default_factory=dict)
    stats: list[RunStats] = field(default_factory=list)
    attempts: Counter[int] = field(default_factory=Counter)
    over: bool = False
    generation: Generation | None = None
    digest: bytes = b""
    number: int = 0
    came_s: float = 0.0
    report: bool = True
    disturbed_s: float = -inf
    apart: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Return the bytes of what the request brings."""
        return sum(chunk.inputs.nbytes for chunk in self.chunks)

    def shapes(self) -> list[RequestShape]:
        """Return the shape of every run that the job may take: of one that generates, the prompt's and each step's."""
        chunks = [chunk.shape for chunk in self.chunks]
        if self.generation is None:
            return chunks
        return chunks + [self.generation.shape.step(1)] * (self.generation.most - 1)

    def next_shapes(self, chunk: int) -> list[RequestShape]:
        """Return the shapes of the runs that a waiting chunk leads to, should the plan change before the first."""
        if self.generation is None:
            return [self.chunks[chunk].shape]
        rows = len(self.generation.prompt) + len(self.generation.tokens)
        return [self.generation.shape.step(rows), self.generation.shape.step(1)]

    def output(self) -> Array:
        """Return the outputs of all chunks, one below the other; the tokens [n] i32 of a job that generates."""
        if self.generation is not None:
            return np.array(self.generation.tokens, np.int32)
        return np.concatenate([self.outputs[i] for i in range(len(self.chunks))])


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One chunk of a job, the same one as it waits and runs."""

    job: Job
    chunk: int

    @property
    def part(self) -> Chunk:
        """Return its own batch; of a job that generates, the prompt."""
        return self.job.chunks[self.chunk]

    @property
    def tokens(self) -> int:
        """Return the tokens of its own batch."""
        return self.part.shape.size

    @property
    def packable(self) -> bool:
        """Return whether it may run together with others."""
        return self.job.computes and self.job.generation is None and self.chunk not in self.job.apart


@dataclass(slots=True)
class RunStats:
    """One run as its devices counted it: microseconds and bytes by device, and the planner's own bytes.

    cluster: devices and links as they were when the plan was chosen. requests: how many it was the run of. reported:
    every device has said what it counted. begun_s: when it was dispatched, None if it never was. learned: how many
    times as long as predicted such runs took before it.
    """

    plan: Plan
    cluster: Cluster
    shape: RequestShape
    compute_us: dict[str, int]
    wait_us: dict[str, int]
    sent_bytes: dict[str, int]
    dispatch_bytes: int
    requests: int = 1
    reported: bool = True
    begun_s: float | None = None
    learned: float = 1.0


@dataclass(slots=True)
class Run:
    """A chunk of each of one or more jobs in one packed batch, dispatched under an epoch and an admission number.

    learned: as in `RunStats`. expected_s: what it should take. doubt_s: when its devices are asked for a word,
    probed_s: when they were. overdue_s: when it is issued again. until_s: when it should be over, with what runs before
    it on its devices. cut: the broker was lost meanwhile, and with it whatever was on its way. early: what was known
    when the output was there and some devices had not reported; None before, or if they had. place: of the token that
    was taken then. bag: of tasks that are leased one by one. gone: devices without which it goes on.
    """

    admission: int
    items: tuple[Item, ...]
    shape: RequestShape
    plan: Plan
    cluster: Cluster
    begun_s: float
    overdue_s: float
    dispatch_bytes: int
    alone: bool  # no other run at any time
    parts: dict[tuple[str, int, int], tuple[int, Array]] = field(default_factory=dict)  # of the output, with first rows
    done: dict[str, tuple[int, ...]] = field(default_factory=dict)
    learned: float = 1.0
    expected_s: float = 0.0
    doubt_s: float = inf
    probed_s: float | None = None
    until_s: float = 0.0
    cut: bool = False
    early: RunStats | None = None
    place: int | None = None
    bag: Bag | None = None
    gone: set[str] = field(default_factory=set)

    @property
    def epoch(self) -> Epoch:
        """Return the epoch to which the run is pinned."""
        return self.plan.epoch

    @property
    def jobs(self) -> list[Job]:
        """Return the jobs that still wait for it."""
        return [item.job for item in self.items if not item.job.over]

    @property
    def computes(self) -> bool:
        """Return whether devices may still compute for it; of a session's run with an output none does."""
        return self.place is None

    @property
    def open(self) -> list[Item]:
        """Return the chunks whose output nobody has taken."""
        if not self.computes:
            return []
        return [item for item in self.items if not item.job.over and item.chunk not in item.job.outputs]

    def contradicts(self, device: str, frame: Frame) -> bool:
        """Return whether a device has sent the same part of the output, or counted its parts, in another way before."""
        if frame.kind == "output":
            first, array = self.parts.get((device, frame.node, frame.part), (frame.row_start, None))
            return array is not None and (first != frame.row_start or not _same(array, frame.array()))
        if frame.kind == "done" and len(frame.numbers) == 4:
            return self.done.get(device, frame.numbers)[3] != frame.numbers[3]
        return False

    def _mine(self) -> list[tuple[int, Array]]:
        """Return first row and numbers of each part, in order; those of devices that say they sent none left out."""
        said = {device: numbers[3] > 0 for device, numbers in self.done.items()}
        mine = [part for (device, _, _), part in self.parts.items() if said.get(device, True)]
        return sorted(mine, key=lambda part: part[0])

    def whole(self, shape: tuple[int, int]) -> bool:
        """Return whether the parts that are here are an output of this shape, each row of it once."""
        end, mine = 0, self._mine()
        for first, array in mine:
            if first != end or array.shape[1:] != shape[1:] or array.ndim != len(shape):
                return False
            end += len(array)
        return bool(mine) and end == shape[0]

    def complete(self) -> bool:
        """Return whether every device has reported, and every part of the output that one says it has sent is here."""
        if self.done.keys() | self.gone < set(self.plan.devices) or not any(n[3] for n in self.done.values()):
            return False
        here = Counter(device for device, _, _ in self.parts)
        return all(here[device] >= numbers[3] for device, numbers in self.done.items())

    def unannounced(self) -> int:
        """Return how many parts came from devices that say they sent none."""
        return sum(not self.done[device][3] for device, _, _ in self.parts)

    def output(self) -> Array:
        """Return the parts of the output, one below the other."""
        mine = [array for _, array in self._mine()]
        return mine[0] if len(mine) == 1 else np.concatenate(mine)

    def stats(self) -> RunStats:
        """Return what the devices reported."""
        return RunStats(
            self.plan,
            self.cluster,
            self.shape,
            {d: n[0] for d, n in self.done.items()},
            {d: n[1] for d, n in self.done.items()},
            {d: n[2] for d, n in self.done.items()},
            self.dispatch_bytes,
            len(self.items),
            reported=self.done.keys() | self.gone >= set(self.plan.devices),
            begun_s=self.begun_s,
            learned=self.learned,
        )


def _same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def likeliest(logits: Array) -> int:
    """Return the token that follows from logits [1, V]."""
    return int(logits[0].argmax())


def longer(plan: Plan, tokens: int) -> float:
    """Return how many times as long as the request that a plan was made for one of so many tokens may take."""
    return max(tokens / max(plan.predicted_tokens, 1), 1.0)


# ----------------------------------------------------------------------------------------------------------------------
# Runs of several requests: which of those that wait go into one, its packed batch, and the answer of each.


MICRO: Final = 64  # tokens: with fewer rows kernels stream weights instead of computing


@dataclass(frozen=True, slots=True)
class Batching:
    """How requests that wait run together: of so many at the most; delay_s: how long one waits for others to come."""

    requests: int = 16
    delay_s: float = 0.0


def choose(
    turns: Iterator[Item], batching: Batching, max_tokens: int, share: int | None = None
) -> tuple[tuple[Item, ...], float]:
    """Return what runs next of all that waits, in the order of its turns, and when.

    That is the first, and what can run with it: a power of two of requests, so that few shapes come again and again,
    sorted by length, so that equal lengths are equal shapes whatever their order. Chunks of one request run apart, as
    it was told what they cost. A batch that has room for more is due when the first of it has waited for the delay, any
    other at once, and what was lost before too. share: no more than so many, the others run elsewhere.
    """
    first = next(turns)
    chosen, jobs, tokens = [first], {id(first.job)}, first.tokens
    full = not first.packable or first.job.attempts[first.chunk] > 0
    for item in turns if first.packable else ():
        if len(chosen) == batching.requests:
            break
        if not item.packable or item.part.shape.want != first.part.shape.want or id(item.job) in jobs:
            continue
        if tokens + item.tokens > max_tokens:
            full = True
            continue
        chosen.append(item)
        jobs.add(id(item.job))
        tokens += item.tokens
    full = full or len(chosen) == batching.requests or tokens == max_tokens
    due_s = -inf if full else min(map(partial(_waits_until, batching.delay_s), chosen))
    size = 1 << (min(len(chosen), share or len(chosen)).bit_length() - 1)
    return tuple(sorted(chosen[:size], key=lambda item: item.part.shape.sizes)), due_s


def _waits_until(delay_s: float, item: Item) -> float:
    """Return how long a request may wait for others, with as much time left until its deadline."""
    deadline_s = inf if item.job.deadline_s is None else item.job.deadline_s
    return min(item.job.came_s + delay_s, deadline_s - delay_s)


def packed(chunks: Sequence[Chunk]) -> Chunk:
    """Return the batch of several chunks one behind the other; they ask for the same."""
    if len(chunks) == 1:
        return chunks[0]
    first, *others = (chunk.shape for chunk in chunks)
    return Chunk(first.joined(others), np.concatenate([chunk.inputs for chunk in chunks]))


def micro_batches(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Return chunks cut into batches of consecutive items of size `MICRO` or a little more, in their order."""
    return tuple(part for chunk in chunks for part in _cut(chunk))


def _cut(chunk: Chunk) -> Iterator[Chunk]:
    shape = chunk.shape
    first, taken, left = 0, 0, shape.size
    for stop, size in enumerate(shape.sizes, 1):
        taken, left = taken + size, left - size
        if left and (taken < MICRO or left < MICRO):
            continue
        part, where = shape.part(first, stop)
        yield Chunk(part, chunk.inputs[where])
        first, taken = stop, 0


def parted(spec: Spec, chunks: Sequence[Chunk], output: Array) -> list[Array]:
    """Return the rows of each chunk in the output of their packed batch; raises RemoteError if they do not add up."""
    if len(chunks) == 1:
        return [output]
    rows = [spec.output_shape(chunk.shape)[0] for chunk in chunks]
    if len(output) != sum(rows):
        raise RemoteError(f"the devices answered with {len(output)} rows instead of {sum(rows)}; use one version")
    return np.split(output, np.cumsum(rows[:-1]).tolist())


# ----------------------------------------------------------------------------------------------------------------------
# Requests that wait for a run, fair between clients: next is whoever has had the fewest tokens of late.


class Waiting:
    """The queue of a slot: a line for each client, and one before all for what goes on or was lost.

    A client that begins to wait starts even with whoever is next, so that nobody saves turns up.
    """

    def __init__(self) -> None:
        self._before: deque[Item] = deque()
        self._lines: dict[str, deque[Item]] = {}
        self._had: dict[str, int] = {}  # tokens of clients that wait
        self._least = 0  # tokens that the last client in turn had had

    def copy(self) -> Waiting:
        """Return a queue of its own with the same items."""
        made = Waiting()
        made._before, made._had, made._least = deque(self._before), dict(self._had), self._least
        made._lines = {client: deque(line) for client, line in self._lines.items()}
        return made

    def __len__(self) -> int:
        return len(self._before) + sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Item]:
        """Yield all that waits, client by client."""
        return chain(self._before, *self._lines.values())

    def turns(self) -> Iterator[Item]:
        """Yield what waits in the order of its turns, as if it was taken one by one."""
        yield from self._before
        # Of clients that are even the one whose request came first, then as they began to wait.
        turns = [(self._had[c], line[0].job.number, i, c) for i, (c, line) in enumerate(self._lines.items())]
        heapify(turns)
        places = dict.fromkeys(self._lines, 0)
        while turns:
            had, _, i, client = heappop(turns)
            line, place = self._lines[client], places[client]
            yield line[place]
            places[client] = place + 1
            if place + 1 < len(line):
                heappush(turns, (had + line[place].tokens, line[place + 1].job.number, i, client))

    def first(self) -> float:
        """Return the number of the request that came first, infinity if none waits."""
        heads = [item.job.number for item in self._before]
        return min([*heads, *(line[0].job.number for line in self._lines.values())], default=inf)

    def add(self, items: Iterable[Item]) -> None:
        """Take what has come to the end of its client's line."""
        for item in items:
            client = item.job.key.client
            self._lines.setdefault(client, deque()).append(item)
            self._had.setdefault(client, self._least)

    def add_first(self, items: Iterable[Item]) -> None:
        """Take what comes before all others, in its order; no turn of its client's is counted for it."""
        self._before.extendleft(reversed(list(items)))

    def take(self, items: Iterable[Item]) -> None:
        """Take items out, which count as their clients' turns."""
        for item in items:
            if item in self._before:
                self._before.remove(item)
                continue
            client = item.job.key.client
            self._lines[client].remove(item)
            self._least = max(self._least, self._had[client])
            self._had[client] += item.tokens
            self._forget(client)

    def forget_over(self) -> None:
        """Take out those requests that have ended while they waited."""
        if not any(item.job.over for item in self):
            return
        self._before = deque(item for item in self._before if not item.job.over)
        for client in list(self._lines):
            self._lines[client] = deque(item for item in self._lines[client] if not item.job.over)
            self._forget(client)

    def _forget(self, client: str) -> None:
        """Forget a client of whom nothing waits."""
        if not self._lines[client]:
            del self._lines[client], self._had[client]
