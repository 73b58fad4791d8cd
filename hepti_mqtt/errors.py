"""The error tree: each class says whose fault it is; the text says what, why and what to do next."""

from __future__ import annotations

from typing import ClassVar


class HeptiError(Exception):
    """An error that a user may see; `code` names it in JSON answers, `exit_code` is the command line's."""

    code: ClassVar[str] = "failed"
    exit_code: ClassVar[int] = 1


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


class UnsupportedModelError(ModelError):
    """The architecture in config.json is not one that Hepti computes."""

    code = "unsupported_model"


class RequestError(HeptiError):
    """A user's request is wrong: malformed JSON, empty text, a picture that is none, ..."""

    code = "bad_request"


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
            f"id {request} belongs to another request of yours, with another body; give each request an id of its "
            "own, or none: an id comes again only to have the same answer again"
        )


class DeadlineError(RequestError):
    """A request's deadline has passed."""

    code = "deadline"
    exit_code = 5


class PlanError(HeptiError):
    """No feasible plan: the text says how much is missing where."""

    code = "no_plan"
    exit_code = 4


class WireError(HeptiError):
    """A peer's bytes are not a valid frame or message."""

    code = "wire"


class NetworkError(HeptiError):
    """The broker cannot be reached, or the connection to it was lost."""

    code = "network"
    exit_code = 3


class RefusedError(HeptiError):
    """The broker refused the credentials or, by its ACL, the action."""

    code = "refused"
    exit_code = 6


class PacketLimitError(NetworkError):
    """The broker limits packets below what the plan needs; the text names the setting."""

    code = "packet_limit"
    exit_code = 1


class RemoteError(HeptiError):
    """Another process of the site failed; the text carries its words."""

    code = "remote"
