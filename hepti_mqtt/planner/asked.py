"""Whether what a question pins can be had at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hepti_mqtt.errors import ConfigError, PlanError
from hepti_mqtt.models import storages
from hepti_mqtt.planner.price import Question
from hepti_mqtt.shares import Options
from hepti_mqtt.strategies import STRATEGIES, Method

_LISTED: Final = 8  # options that an error names
_CUT: Final = 80  # characters of what was given
_MANY: Final = 64  # devices, for which a method whose variants depend on their number has others than for one


def check_pins(question: Question) -> None:
    """Raise ConfigError for a method or options that there are not, PlanError for devices that are not online."""
    if question.strategy is not None and question.strategy not in STRATEGIES:
        raise ConfigError(f"unknown strategy {question.strategy!r}; there are: {', '.join(STRATEGIES)}")
    if question.options:
        _check_options(question)
    _check_storage(question)
    _check_count(question)
    unknown = set(question.devices or ()) - set(question.cluster.devices)
    if unknown:
        online = ", ".join(question.cluster.devices) or "none"
        raise PlanError(f"devices {', '.join(sorted(unknown))} are not online; online: {online}")
    if not question.cluster.devices:
        raise PlanError("no device is online; start one with: hepti agent --broker URL --id NAME")
    if question.strategy is not None and STRATEGIES[question.strategy].settles(question.options):
        _check_watts(question)


def _check_storage(question: Question) -> None:
    """Raise ConfigError for weights in another storage than the model, or the pinned variant, can multiply by."""
    able = storages(question.spec)
    if question.storage not in able:
        raise ConfigError(
            f"{question.spec.architecture} can keep its weights in {' or '.join(able)} alone, and {question.storage} "
            f"is asked for; leave out the weights, or ask for {able[0]}"
        )
    if question.strategy is None or not question.options:
        return
    able = STRATEGIES[question.strategy].storages(question.options)
    if question.storage not in able:
        raise ConfigError(
            f"{question.strategy} with {_words([question.options])} needs weights in {' or '.join(able)}, and "
            f"{question.storage} is asked for; leave out the option, or the weights"
        )


def _check_count(question: Question) -> None:
    """Raise ConfigError for more devices than the method that is pinned can use."""
    most = None if question.strategy is None else STRATEGIES[question.strategy].most_devices
    given = question.devices or ()
    if most is not None and len(given) > most:
        raise ConfigError(
            f"{question.strategy} runs on {most} device{'s' * (most > 1)} at the most, and {len(given)} are pinned: "
            f"{', '.join(given)}; name {most}, or leave devices out for the best choice"
        )


def _check_watts(question: Question) -> None:
    """Raise ConfigError if it is not known of every device what it draws."""
    names = question.devices or tuple(question.cluster.devices)
    dumb = ", ".join(name for name in names if question.cluster.devices[name].power is None)
    if dumb:
        raise ConfigError(
            f"the least energy of {question.strategy} needs the watts of every device, and none are known of {dumb}; "
            "give compute_watts and link_watts in a site file, for hepti simulate"
        )


def options_error(strategy: str | None, options: Options) -> str | None:
    """Return what is wrong with options that a method has on no number of devices, None if nothing is.

    strategy: None means that any method may have them.
    """
    if not options or any(m.knows(options) for m in STRATEGIES.values() if strategy in {None, m.name}):
        return None
    given = _words([options])[:_CUT]
    if strategy is None:
        return f"no strategy has the option {given}; name the strategy too, and one of its own options"
    method = STRATEGIES[strategy]
    known = [o for o in method.every().values() if o]
    more = " and so on, as the number of devices allows" if _varies(method) else ""
    return f"{strategy} has no option {given}; it has {_words(known[:_LISTED]) or 'none'}{more}"


def _check_options(question: Question) -> None:
    """Raise ConfigError for options that the method does not have, or not on so many devices."""
    method = None if question.strategy is None else STRATEGIES[question.strategy]
    if method is None or not _varies(method):
        if (error := options_error(question.strategy, question.options)) is not None:
            raise ConfigError(error)
        return
    count = len(question.devices or question.cluster.devices)
    sizes = (count,) if question.devices else range(1, count + 1)
    if not any(dict(question.options) == dict(o) for n in sizes for o in method.choices(n)):
        given, here = _words([question.options]), _words(method.choices(count)) or "none"
        raise ConfigError(f"{method.name} has no option {given} on {count} devices; there it has {here}")


def _varies(method: Method) -> bool:
    """Return whether a method's variants depend on the number of devices."""
    return method.choices(1) != method.choices(_MANY)


def _words(options: Iterable[Options]) -> str:
    return ", ".join(" ".join(f"{key}={value}" for key, value in o.items()) for o in options)
