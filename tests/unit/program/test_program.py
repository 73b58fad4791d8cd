"""The rules of a Program are checked when it is built."""

import pytest
from program_builder import ProgramBuilder, validate

from hepti_mqtt.core.ids import ALL_DEVICES
from hepti_mqtt.core.program import Compute, Program, Recv, Send, SlotSpec, publish_targets
from hepti_mqtt.core.schedule import make_template

ONE = (SlotSpec((1,)),)


@pytest.mark.parametrize(
    "program",
    [
        Program("a", ONE * 2, (Compute("add", (0,), (1,)),)),
        Program("a", ONE, (Recv(0, "b", 1), Recv(0, "b", 2))),
        Program("a", ONE * 2, (Recv(0, "b", 1), Recv(1, "b", 1))),
        *(Program("a", ONE, (Recv(0, "b", 1), Send(0, to, 1))) for to in ((), (ALL_DEVICES, "c"), ("c", "c"))),
    ],
    ids=["read before written", "written twice", "received twice", "to nobody", "to all and one", "to one twice"],
)
def test_a_program_that_breaks_a_rule_is_refused(program):
    with pytest.raises(ValueError):
        validate(program)


def test_what_several_devices_need_is_one_publish():
    assert publish_targets(Send(0, ("b",), 1)) == ("b",)
    assert publish_targets(Send(0, ("b", "c"), 1)) == (ALL_DEVICES,)


def test_a_view_is_ready_when_what_it_is_of_is_and_is_never_written():
    b = ProgramBuilder("a")
    x = b.recv((4, 2), "b", 1)
    rows = b.view(x, 1, (2, 2))
    b.send(b.compute("add", (rows, rows), (2, 2), bias=False), ("b",), 2)
    program = b.build()
    assert program.reads(program.ops[1]) == (x,)
    assert make_template(program).reader_counts[x] == 1
    with pytest.raises(ValueError):
        validate(Program("a", program.slots, (program.ops[0], Recv(rows, "b", 3))))
