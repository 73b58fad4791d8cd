"""Leases: every task is computed, whoever is slow or lost."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from hepti_mqtt.strategies.task_queue import TaskQueue


@given(st.integers(1, 12), st.lists(st.integers(1, 50), min_size=1, max_size=5), st.data())
def test_every_task_is_computed_whoever_is_lost(tasks, took, data):
    devices = [f"d{i}" for i in range(len(took))]
    lost = data.draw(st.dictionaries(st.sampled_from(devices[1:]), st.integers(0, 60))) if devices[1:] else {}
    bag = TaskQueue(tasks, devices, 0.0)
    ends = {d: (t, float(took[t])) for t, d in enumerate(devices[:tasks])}
    for now in range(5000):
        for device in [d for d, when in lost.items() if when == now]:
            bag.remove_device(device)
            ends.pop(device, None)
            bag.assert_invariants()
        for device, (task, end) in list(ends.items()):
            if end <= now:
                del ends[device]
                bag.complete_task(device, task, now)
        for device, task in bag.lease_tasks(now):
            assert device not in ends
            ends[device] = (task, now + float(took[devices.index(device)]))
        bag.assert_invariants()
        if len(bag.completed_by) == tasks and now > max(lost.values(), default=0):
            break
    assert bag.completed_by.keys() == set(range(tasks))


def test_a_late_lease_is_taken_over_once_and_the_first_result_counts():
    bag = TaskQueue(2, ["fast", "slow", "third"], 0.0)
    assert bag.lease_tasks(0.0) == []
    bag.complete_task("fast", 0, 1.0)
    assert bag.next_takeover_s == 1.0
    assert bag.lease_tasks(1.0) == [("fast", 1)]
    assert bag.lease_tasks(9.0) == []
    assert bag.next_takeover_s == inf
    bag.complete_task("fast", 1, 2.0)
    bag.complete_task("slow", 1, 3.0)
    assert bag.completed_by == {0: "fast", 1: "fast"}
