"""The loader on its own thread: it answers, survives a mistake and holds a bounded queue."""

from collections import Counter
from queue import SimpleQueue

from device_agent_support import LOG, Model, check_weights

from device_agent.loader import AskAgain, LoaderThread, TileCache, TileIn, WeightLoader
from hepti_mqtt.ids import Epoch
from hepti_mqtt.runtime.worker.interface import Loaded, LoadProgress, Unload

MODEL = Model()


class Served:
    """A loader thread with a planner that answers at once."""

    def __init__(self, directory, model):
        self.events, self.ends = [], SimpleQueue()
        self.counters = Counter()
        loader = WeightLoader(TileCache(directory, 1 << 30, self.counters), self.emit, self.ask, self.counters)
        self.thread = LoaderThread(loader, self.counters, LOG)
        self.model = model
        self.thread.start()

    def emit(self, event):
        self.events.append(event)
        if not isinstance(event, LoadProgress):
            self.ends.put(event)

    def ask(self, _, hashes):
        for digest in hashes:
            self.answer(digest)

    def answer(self, digest):
        self.thread.post(TileIn(self.model.blobs[digest], True))

    def wait(self):
        return self.ends.get(timeout=30)


def test_the_thread_loads_and_ends(tmp_path):
    served = Served(tmp_path, MODEL)
    served.thread.post(AskAgain())
    served.thread.post(MODEL.load())
    served.wait()
    served.thread.post(Unload("m", Epoch(1, 1)))
    served.thread.post(MODEL.load(2))
    served.wait()
    served.thread.close()
    assert [type(e) for e in served.events if not isinstance(e, LoadProgress)] == [Loaded, Loaded]
    check_weights(MODEL, served.events[-1].weights)
    assert served.counters["tiles_asked"] == 1 + len(MODEL.needed())


def test_the_thread_survives_a_mistake(tmp_path, monkeypatch):
    def broken(self, job, manifest):
        raise RuntimeError("a mistake")

    served = Served(tmp_path, MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(WeightLoader, "_plan", broken)
        served.thread.post(MODEL.load(1))
        served.wait()
    assert "a mistake" in str(served.events[-1].error)
    served.thread.post(MODEL.load(2))
    served.wait()
    check_weights(MODEL, served.events[-1].weights)
    served.thread.close()


def test_after_a_mistake_the_next_load_comes_from_disk_without_a_further_word(tmp_path, monkeypatch):
    other = Model(seed=1)
    before = Served(tmp_path, other)
    before.thread.post(other.load())
    before.wait()
    before.thread.close()
    served, asked = Served(tmp_path, MODEL), SimpleQueue()
    served.answer = asked.put
    served.thread.post(MODEL.load(1))
    served.thread.post(other.load(2))
    served.thread.post(TileIn(MODEL.blobs[asked.get(timeout=30)], True))
    tile = MODEL.blobs[asked.get(timeout=30)]

    def broken(*_):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(TileCache, "put", broken)
    served.thread.post(TileIn(tile, True))
    assert "a mistake" in str(served.wait().error)
    check_weights(other, served.wait().weights)
    served.thread.close()


def test_a_load_that_cannot_be_given_up_does_not_end_the_thread(tmp_path, monkeypatch):
    served = Served(tmp_path, MODEL)
    tried = SimpleQueue()

    def broken(*what):
        tried.put(what)
        raise RuntimeError("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(WeightLoader, "_plan", broken)
        patch.setattr(WeightLoader, "abandon", broken)
        served.thread.post(MODEL.load(1))
        for _ in range(2):
            tried.get(timeout=30)
    served.thread.post(Unload("m", Epoch(1, 1)))
    served.thread.post(MODEL.load(2))
    check_weights(MODEL, served.wait().weights)
    served.thread.close()


def test_a_flood_of_tiles_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("device_agent.loader.QUEUED_BYTES", 1000)
    counters = Counter()
    cache = TileCache(tmp_path, 0, counters)
    thread = LoaderThread(WeightLoader(cache, lambda e: None, lambda m, h: None, counters), counters, LOG)
    for _ in range(5):
        thread.post(TileIn(bytes(400), True))
    assert counters["tiles_overflowed"] == 3
    thread.start()
    thread.close()
    assert counters["tiles_unneeded"] == 2
