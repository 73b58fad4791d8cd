"""`galaxy` in a ring: what goes to whom, what is computed meanwhile, and shares that follow speed and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sites import FAMILIES, plan, request
from swarm import profile_curve

from hepti_mqtt.cost.profiles import Cluster, DeviceProfile, Link
from hepti_mqtt.cost.simulator import Naming
from hepti_mqtt.ids import Epoch
from hepti_mqtt.plan_programs import programs
from hepti_mqtt.planner import Question, decide
from hepti_mqtt.program import Compute, Recv, Send

SPEC = replace(FAMILIES["bert-embedding"], layers=6)
RING = ("galaxy", {"exchange": "ring"})
DEVICES, TOKENS, LAYER = 4, 16, 3  # a layer in the middle
SHAPE, _ = request(SPEC, (TOKENS,), "hidden")


def of_a_layer(kind, method=RING):
    """Return the ops of each device in the middle layer."""
    found = programs(SPEC, plan(SPEC, method, (1.0,) * DEVICES), SHAPE)
    return {d: [op for op in p.ops if isinstance(op, kind) and op.layer == LAYER] for d, p in found.items()}, found


def test_each_device_sends_to_its_neighbour_alone_what_a_reduce_scatter_and_an_all_gather_are():
    sends, found = of_a_layer(Send)
    names = list(found)
    for i, (device, ops) in enumerate(sends.items()):
        assert {op.to for op in ops} == {(names[(i + 1) % DEVICES],)}
        assert len(ops) == 4 * (DEVICES - 1)
        sizes = {found[device].slots[op.slot].shape for op in ops}
        assert sizes == {(TOKENS // DEVICES, SPEC.hidden)}


def test_a_chunk_of_a_sum_leaves_before_the_matmul_is_done_and_own_rows_come_last():
    for device, program in of_a_layer(Compute)[1].items():
        ops = list(program.ops)
        down = [i for i, op in enumerate(ops) if isinstance(op, Compute) and "3.down" in program.node(op.node)]
        matmuls = [i for i in down if ops[i].weights]
        sent = [i for i, op in enumerate(ops) if isinstance(op, Send) and program.node(op.node) == "3.down"]
        assert len(matmuls) == DEVICES, device
        assert [sum(at < i for at in matmuls) for i in sent] == [1, 2, 3]
        heard = [i for i, op in enumerate(ops) if isinstance(op, Recv) and program.node(op.node) == "3.down"]
        assert len(heard) == DEVICES - 1


def cluster(*devices):
    """Return devices (GFLOP/s, bytes) behind good links."""
    profiles = {
        f"d{i}": DeviceProfile(f"d{i}", profile_curve(speed * 1e9), speed * 1e8, 4e9, memory_bytes=memory)
        for i, (speed, memory) in enumerate(devices)
    }
    return Cluster(profiles, {name: Link(0.2e-3, 1e8, 1e8) for name in profiles})


def planned(site, options):
    names = tuple(site.devices)
    asked = Question(
        Naming("home", "m"), SPEC, site, SHAPE, Epoch(1, 1), strategy="galaxy", options=options, devices=names
    )
    return decide(asked).chosen


@pytest.mark.parametrize("options", [{"exchange": "direct"}, {"exchange": "ring"}], ids=str)
def test_shares_follow_speed_and_what_memory_leaves(options):
    fast = planned(cluster((30.0, 1e9), (10.0, 1e9), (10.0, 1e9)), options)
    widths = [z - a for a, z in fast.plan.ranges["mlp"]]
    assert widths[0] > widths[1]
    assert dict(fast.plan.options) == options
    room = 0.5 * fast.price.needs["d0"]
    tight = planned(cluster((30.0, room), (10.0, 1e9), (10.0, 1e9)), options)
    assert tight.price.feasible
    assert tight.price.needs["d0"] <= room
    assert tight.plan.ranges["mlp"][0] != fast.plan.ranges["mlp"][0]
