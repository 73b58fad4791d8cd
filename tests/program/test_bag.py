"""Leases: every task is computed, whoever is slow or lost."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.task_queue import Bag


@given(st.integers(1, 12), st.lists(st.integers(1, 50), min_size=1, max_size=5), st.data())
def test_every_task_is_computed_whoever_is_lost(tasks: int, took: list[int], data: st.DataObject) -> None:
    devices = [f"d{i}" for i in range(len(took))]
    lost = data.draw(st.dictionaries(st.sampled_from(devices[1:]), st.integers(0, 60))) if devices[1:] else {}
    bag = Bag(tasks, devices, 0.0)
    ends = {d: (t, float(took[t])) for t, d in enumerate(devices[:tasks])}
    for now in range(5000):
        for device in [d for d, when in lost.items() if when == now]:
            bag.lost(device)
            ends.pop(device, None)
            bag.check()
        for device, (task, end) in list(ends.items()):
            if end <= now:
                del ends[device]
                bag.done(device, task, now)
        for device, task in bag.leases(now):
            assert device not in ends
            ends[device] = (task, now + float(took[devices.index(device)]))
        bag.check()
        if bag.empty and now > max(lost.values(), default=0):
            break
    assert bag.empty
    assert sum(bag.counts().values()) == tasks


def test_a_late_lease_is_taken_over_once_and_the_first_result_counts() -> None:
    bag = Bag(2, ["fast", "slow", "third"], 0.0)
    assert bag.leases(0.0) == []
    bag.done("fast", 0, 1.0)
    assert bag.due_s == 1.0
    assert bag.leases(1.0) == [("fast", 1)]
    assert bag.leases(9.0) == []
    assert bag.due_s == inf
    bag.done("fast", 1, 2.0)
    bag.done("slow", 1, 3.0)
    assert bag.counts() == {"fast": 2, "slow": 0, "third": 0}
