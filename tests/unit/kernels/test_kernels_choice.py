from __future__ import annotations

from collections import Counter

import pytest

from hepti_mqtt.kernels import Workers
from hepti_mqtt.kernels.choice import Choice
from hepti_mqtt.kernels.threads import ranges


class Machine:
    """Runs an op whose seconds are given by its number of threads; `took` is the time of all runs."""

    def __init__(self, *threads: int) -> None:
        self.threads, self.choice, self.took = threads, Choice(threads), 0.0

    def run(self, count: int, seconds, woke=False) -> Counter[int]:
        """Return how often the op ran on how many threads."""
        used: Counter[int] = Counter()
        for _ in range(count):
            place = self.choice.next
            threads = self.threads[place]
            used[threads] += 1
            self.took += seconds[threads]
            if self.choice.skips:
                self.choice.skips -= 1
            else:
                self.choice.note(place, seconds[threads], woke and threads > 1)
        return used


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 40e-6, 2: 90e-6, 4: 120e-6}, 1),  # a hand-over costs more than the op
        ({1: 90e-6, 2: 50e-6, 4: 30e-6}, 4),
        ({1: 90e-6, 2: 50e-6, 4: 70e-6}, 2),  # two cores read all that memory gives
        ({1: 90e-6, 2: 50e-6, 4: 49e-6}, 2),  # not worth two more cores
        ({1: 2e-6, 2: 9e-6, 4: 30e-6}, 1),
        ({1: 900e-6, 2: 500e-6, 4: 400e-6}, 4),
        ({1: 17e-3, 2: 9e-3, 4: 5e-3}, 4),
    ],
)
def test_the_best_number_of_threads_is_found_and_looking_for_it_costs_little(seconds, best):
    machine = Machine(4, 2, 1)
    machine.run(200, seconds)
    before = machine.took
    used = machine.run(10_000, seconds)
    assert used.most_common(1)[0][0] == best
    assert machine.took - before <= 1.02 * 10_000 * seconds[best] + 4e-3


def test_what_changes_is_found_out():
    free, busy = {1: 100e-6, 2: 60e-6}, {1: 100e-6, 2: 400e-6}  # others compute on the second core
    machine = Machine(2, 1)
    assert machine.run(5000, free)[2] > 4500
    machine.run(1, {1: 100e-6, 2: 1.0})
    machine.run(200, free)
    assert machine.run(1000, free)[2] > 900, "a run that was held up says little"
    machine.run(200, busy)
    assert machine.run(5000, busy)[1] > 4500
    machine.run(10_000, free)
    assert machine.run(5000, free)[2] > 4500


def test_threads_that_had_to_be_woken_are_tried_again():
    machine = Machine(2, 1)
    machine.run(3, {1: 100e-6, 2: 500e-6}, woke=True)  # asleep since the last request
    machine.run(100, {1: 100e-6, 2: 60e-6})
    assert machine.run(1000, {1: 100e-6, 2: 60e-6})[2] > 900
    always = Machine(2, 1)  # an op that comes so seldom that they are asleep each time
    always.run(200, {1: 100e-6, 2: 500e-6}, woke=True)
    assert always.run(1000, {1: 100e-6, 2: 500e-6}, woke=True)[1] > 900


def test_ops_that_are_alike_share_what_they_learn():
    workers = Workers(4)
    parts = ranges(8, 8)
    one, other = (workers.choice("op", parts) for _ in range(2))
    assert one is other is not workers.choice("another", parts)
    assert one.threads == 4
    assert workers.choice("op of one part", ranges(8, 1)) is None
    workers.close()
