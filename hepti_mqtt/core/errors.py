"""The error tree: each class says who is at fault; the text says what failed, why, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, Self

BROKER_PACKET_SETTINGS: Final = (
    "max_packet_size in mosquitto.conf (2,000,000 by default since 2.1; message_size_limit must be 0), "
    "mqtt.max_packet_size of EMQX or max_payload_size of rumqttd"
)


class HeptiError(Exception):
    """An error that a user may see."""

    code: str = "failed"  #: name in JSON answers
    exit_code: ClassVar[int] = 1  #: of the command line
    detail: tuple[str, ...] = ()  #: further lines for `--explain`
    param: str | None = None  #: key of the request at fault


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
    """The weights of a served model differ from those hashed at the start."""

    code = "weights_changed"
    exit_code = 1


class UnsupportedModelError(ModelError):
    """Hepti does not support the architecture in config.json."""

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
    """A request has the id of another request, with an answer on its way or stored."""

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
    """The client has cancelled its request."""

    code = "cancelled"


class PlanError(HeptiError):
    """No feasible plan: the text says how much is missing where; detail says it for each candidate, closest first."""

    code = "no_plan"
    exit_code = 4

    def __init__(self, text: str = "", detail: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.detail = tuple(detail)


class WireError(HeptiError):
    """A peer's bytes are not a valid frame or message."""

    code = "wire"


class NetworkError(HeptiError):
    """The broker is unreachable, or the connection to it is lost."""

    code = "network"
    exit_code = 3


class CertificateDateError(NetworkError):
    """The broker's certificate is not valid at this machine's time, which may be wrong."""

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
    def of(cls, user: str, needed_bytes: int, broker: str, largest_bytes: int, *, narrows: bool = True) -> Self:
        """Return the error for a plan, message or model that needs larger packets than a broker accepts.

        narrows: a narrow wire dtype makes its packets smaller, as of tensors but not of weights.
        """
        fewer = ", or send fewer bytes with --wire f16" if narrows else ""
        return cls(
            f"{user} needs packets of {needed_bytes} bytes; {broker} accepts at most about {largest_bytes}. "
            f"Raise {BROKER_PACKET_SETTINGS}{fewer}."
        )


class RemoteError(HeptiError):
    """Another process of the site failed; the text carries its message."""

    code = "remote"
