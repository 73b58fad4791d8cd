"""The rules of a Program are checked when it is built."""

from __future__ import annotations

import pytest

from hepti_mqtt.ids import ALL
from hepti_mqtt.program import Builder, Compute, Program, Recv, Send, SlotSpec, addresses, check
from hepti_mqtt.schedule import template


def test_reading_before_writing_is_refused():
    program = Program("a", (SlotSpec((1,)), SlotSpec((1,))), (Compute("add", (0,), (1,)),))
    with pytest.raises(ValueError):
        check(program)


def test_writing_twice_is_refused():
    recv = Recv(0, "b", 1)
    with pytest.raises(ValueError):
        check(Program("a", (SlotSpec((1,)),), (recv, Recv(0, "b", 2))))


def test_two_receives_of_the_same_exchange_are_refused():
    b = Builder("a")
    b.recv((1,), "b", 1)
    b.recv((1,), "b", 1)
    with pytest.raises(ValueError):
        b.build()


@pytest.mark.parametrize("to", [(), (ALL, "c"), ("c", "c")])
def test_a_send_names_each_device_once(to):
    slots = (SlotSpec((1,)),)
    with pytest.raises(ValueError):
        check(Program("a", slots, (Recv(0, "b", 1), Send(0, to, 1))))


def test_what_several_devices_need_is_one_publish():
    assert addresses(Send(0, ("b",), 1)) == ("b",)
    assert addresses(Send(0, ("b", "c"), 1)) == (ALL,)


def test_a_view_is_ready_when_what_it_is_of_is_and_is_never_written():
    b = Builder("a")
    x = b.recv((4, 2), "b", 1)
    rows = b.view(x, 1, (2, 2))
    b.send(b.compute("add", (rows, rows), (2, 2), bias=False), ("b",), 2)
    program = b.build()
    assert program.reads(program.ops[1]) == (x,)
    assert template(program).uses[x] == 1
    with pytest.raises(ValueError):
        check(Program("a", program.slots, (program.ops[0], Recv(rows, "b", 3))))


def test_sending_to_nobody_is_no_op():
    b = Builder("a")
    b.send(b.recv((1,), "b", 1), (), 1)
    assert [type(op) for op in b.build().ops] == [Recv]


def test_template_counts_a_slot_read_twice_by_one_op_once():
    b = Builder("a")
    x = b.recv((1, 1), "b", 1)
    b.compute("add", (x, x), (1, 1), bias=False)
    t = template(b.build())
    assert t.pending == (0, 1)
    assert t.uses[x] == 1
    assert t.runnable == 1
