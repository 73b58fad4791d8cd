"""Long searches in a process of their own: what it finds, and what happens when it is no more."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from dataclasses import replace

import pytest
from scripted_site import Site

from hepti_mqtt import errors
from hepti_mqtt.errors import PlanError
from hepti_mqtt.plan import NARROW
from hepti_mqtt.runtime.planner.commands import Solve
from hepti_mqtt.service import searching
from hepti_mqtt.service.searcher import LEAST_PRIORITY
from hepti_mqtt.service.searching import Searches
from hepti_mqtt.service.solver import solve


class Known:
    """The accuracy of a model, of which all is worked out when it is asked for."""

    def __init__(self) -> None:
        self.known, self.measured = {}, []

    def measure(self, plan):
        self.measured.append(plan.method)
        return dict.fromkeys(NARROW, 1e-4)


@pytest.fixture
def command() -> Solve:
    site = Site(searches=False)
    site.join("a", "b", "c")
    site.tick(1.1)
    return site.solves[-1]


@pytest.fixture
def searches(monkeypatch):
    monkeypatch.setattr(searching, "LONG_S", 0.0)
    made = Searches({"m": Known()}, lambda: True, lambda _: None)
    yield made
    made.close()
    assert made._process is None


def same(found, expected) -> bool:
    ranking = [(c.name, c.plan, c.price.cost) for c in found.decision.ranking]
    return ranking == [(c.name, c.plan, c.price.cost) for c in expected.decision.ranking]


def test_a_process_finds_what_the_planner_would(searches, command) -> None:
    expected = searches.solve(command)
    assert searches._process is None, "how long it takes is not known yet"
    found = searches.solve(command)
    process = searches._process
    assert process is not None
    assert same(found, expected)
    running = replace(command, running=expected.decision.chosen.plan)
    assert searches.solve(running).running_s == pytest.approx(solve(running).running_s)
    assert searches._process is process
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == LEAST_PRIORITY


def test_what_the_process_cannot_do_is_the_error_that_the_planner_would_have(searches, command) -> None:
    searches.solve(command)
    poor = {n: replace(d, memory_bytes=1) for n, d in command.question.cluster.devices.items()}
    cluster = replace(command.question.cluster, devices=poor)
    impossible = replace(command, question=replace(command.question, cluster=cluster))
    found = searches.solve(impossible)
    assert searches._process is not None
    assert (type(found.error), str(found.error)) == (PlanError, str(solve(impossible).error))


def test_the_planner_measures_for_the_process_how_far_narrow_exchanges_move_answers(searches, command) -> None:
    searches.solve(command)
    question = replace(command.question, accuracy=1e-3, strategy="row", devices=("a", "b"))
    slow = {n: replace(link, up_bytes_per_s=1e5) for n, link in question.cluster.links.items()}
    question = replace(question, cluster=replace(question.cluster, links=slow))
    for _ in range(2):
        found = searches.solve(replace(command, question=question))
    assert searches._accuracy["m"].measured == [found.decision.chosen.plan.method], "once"
    assert found.decision.chosen.plan.wire_error == 1e-4


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_process_that_was_killed_leaves_no_model_without_a_plan(searches, command, when, monkeypatch, caplog) -> None:
    expected = searches.solve(command)
    searches.solve(command)
    killed = searches._process
    if when == "before":
        killed.kill()
        killed.wait()
    else:
        real = searching.put
        monkeypatch.setattr(searching, "put", lambda *what: (os.kill(killed.pid, signal.SIGKILL), real(*what)))
    assert same(searches.solve(command), expected)
    assert "the planner searches itself" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(searching, "LONG_S", 0.0)
    assert same(searches.solve(command), expected)
    assert searches._process not in (None, killed)


def test_nothing_is_started_where_nobody_is_served_or_a_search_is_short(command, monkeypatch) -> None:
    for served, long_s in ((False, 0.0), (True, 1e9)):
        monkeypatch.setattr(searching, "LONG_S", long_s)
        searches = Searches({"m": Known()}, lambda served=served: served, lambda _: None)
        for _ in range(2):
            assert searches.solve(command).decision is not None
        assert searches._process is None


def test_the_process_ends_where_nothing_is_wanted_for_long_and_with_the_planner(command, monkeypatch) -> None:
    monkeypatch.setattr(searching, "LONG_S", 0.0)
    monkeypatch.setattr(searching, "IDLE_S", 0.01)
    rested, found = threading.Event(), threading.Event()
    searches = Searches({"m": Known()}, lambda: True, lambda _: found.set())
    searches.solve(command)
    searches.solve(command)
    first = searches._process
    monkeypatch.setattr(searching, "_end", lambda process, end=searching._end: (end(process), rested.set()))
    thread = threading.Thread(target=searches.run)
    thread.start()
    assert rested.wait(60)
    assert first.returncode == -signal.SIGKILL
    searches.ask(command)
    assert found.wait(60)
    searches.close()
    thread.join(60)
    assert not thread.is_alive()
    assert searches.solve(command).error is not None, "what is asked for late starts nothing"


def test_the_process_ends_when_the_planner_is_killed(searches, command) -> None:
    searches.solve(command)
    searches.solve(command)
    process = searches._process
    process.stdin.close()  # all that it hears of it
    assert process.wait(60) == 0


def test_every_error_of_ours_comes_back_from_another_process() -> None:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.HeptiError):
            again = pickle.loads(pickle.dumps(kind("what it says")))
            assert (type(again), str(again)) == (kind, "what it says")
