"""One run on one device, and what is written once for all runs of its Program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hepti_mqtt.runtime.device.epochs import Key
from hepti_mqtt.runtime.device.executor import Array
from hepti_mqtt.wire.frames import Frame, Session, head


class Way(NamedTuple):
    """How what a Send sends leaves the device, in every run of its Program: what was checked and written once.

    about: the header but for the admission number. nbytes: of all PUBLISH packets. filled: whether there is a body.
    """

    about: bytes
    topics: tuple[str, ...]
    plane: Literal["mesh", "data"]
    nbytes: int
    filled: bool


@dataclass(slots=True)
class Run:
    """A request that is under way here.

    frame: what began it. inputs: what it brought, for tasks that are leased later. sends: of its Program. compute_s: of
    its ops so far. sent_bytes: of its PUBLISH packets. outputs: parts of the answer that were sent. key: the model and
    the epoch of its plan. number: its admission number, as the headers of its frames end with it.
    """

    frame: Frame
    started_s: float
    session: Session
    inputs: Array
    sends: dict[int, Way]
    compute_s: float = 0.0
    sent_bytes: int = 0
    outputs: int = 0
    key: Key = field(init=False)
    number: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.frame.model, self.frame.epoch
        self.number = head(b"", self.frame.admission)
