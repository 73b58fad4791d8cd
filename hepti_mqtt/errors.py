"""The error tree: each class says whose fault it is; the text says what, why and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, Self

BROKER_PACKET_SETTINGS: Final = (
    "max_packet_size in mosquitto.conf (2,000,000 by default since 2.1; message_size_limit must be 0), "
    "mqtt.max_packet_size of EMQX or max_payload_size of rumqttd"
)


class HeptiError(Exception):
    """An error that a user may see; `code` names it in JSON answers, `exit_code` is the command line's.

    detail: further lines for who asks for an explanation. param: the key of the request at fault, if it is one.
    """

    code: str = "failed"
    exit_code: ClassVar[int] = 1
    detail: tuple[str, ...] = ()
    param: str | None = None


class ConfigError(HeptiError):
    """The user's command, file or name is wrong."""

    code = "config"
    exit_code = 2


class BadNameError(ConfigError):
    """A device, client, site or model name would break a topic."""

    code = "bad_name"


class ModelError(HeptiError):
    """A model directory, its config.json or its tensors cannot be used."""

    code = "model"
    exit_code = 2


class WeightsChangedError(ModelError):
    """The weights of a served model are no longer those that were hashed at the start."""

    code = "weights_changed"
    exit_code = 1


class UnsupportedModelError(ModelError):
    """The architecture in config.json is not one that Hepti computes."""

    code = "unsupported_model"


class RequestError(HeptiError):
    """A user's request is wrong: malformed JSON, empty text, an unreadable picture, ..."""

    code = "bad_request"

    def __init__(self, text: str = "", param: str | None = None) -> None:
        super().__init__(text)
        self.param = param


class ContextLengthError(RequestError):
    """A prompt has more tokens than the model reads."""

    code = "context_length_exceeded"


class UnknownModelError(RequestError):
    """A request names a model that no planner serves."""

    code = "unknown_model"


class OverloadedError(RequestError):
    """The bounded queue of requests is full; try again later."""

    code = "overloaded"


class IdInUseError(RequestError):
    """A request has the id of another one, of which the answer is still on its way or remembered."""

    code = "id_in_use"

    @classmethod
    def of(cls, request: str) -> IdInUseError:
        """Return the error for a request of this id."""
        return cls(
            f"Id {request} belongs to another of your requests, with a different body. "
            "Use a new id for each request, or none."
        )


class DeadlineError(RequestError):
    """A request's deadline has passed."""

    code = "deadline"
    exit_code = 5


class CancelledRequestError(RequestError):
    """The client has taken its request back."""

    code = "cancelled"


class PlanError(HeptiError):
    """No feasible plan: the text says how much is missing where; detail: the same of each candidate, closest first."""

    code = "no_plan"
    exit_code = 4

    def __init__(self, text: str = "", detail: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.detail = tuple(detail)


class WireError(HeptiError):
    """A peer's bytes are not a valid frame or message."""

    code = "wire"


class NetworkError(HeptiError):
    """The broker cannot be reached, or the connection to it was lost."""

    code = "network"
    exit_code = 3


class CertificateDateError(NetworkError):
    """The broker's certificate is not valid at the time of this machine, which may be wrong and be put right."""

    code = "certificate_date"


class RefusedError(HeptiError):
    """The broker refused the credentials or, by its ACL, the action."""

    code = "refused"
    exit_code = 6


class PacketLimitError(NetworkError):
    """The broker limits packets below what the plan needs; the text names the setting."""

    code = "packet_limit"
    exit_code = 1

    @classmethod
    def of(cls, what: str, needed_bytes: int, broker: str, largest_bytes: int, *, narrows: bool = True) -> Self:
        """Return the error for `what` that needs larger packets than a broker accepts.

        narrows: a smaller wire dtype makes them smaller, which does not hold for weights.
        """
        fewer = ", or send fewer bytes with --wire f16" if narrows else ""
        return cls(
            f"{what} needs packets of {needed_bytes} bytes; {broker} accepts at most about {largest_bytes}. "
            f"Raise {BROKER_PACKET_SETTINGS}{fewer}."
        )


class RemoteError(HeptiError):
    """Another process of the site failed; the text carries its words."""

    code = "remote"
