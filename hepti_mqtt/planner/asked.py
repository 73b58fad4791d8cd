"""Whether what a question pins can be had at all."""

from __future__ import annotations

from hepti_mqtt.errors import ConfigError, PlanError
from hepti_mqtt.planner.price import Question
from hepti_mqtt.strategies import STRATEGIES, Method


def check_pins(question: Question) -> None:
    """Raise ConfigError for a method or options that there are not, PlanError for devices that are not online."""
    if question.strategy is not None and question.strategy not in STRATEGIES:
        raise ConfigError(f"unknown strategy {question.strategy!r}; there are: {', '.join(STRATEGIES)}")
    if question.strategy is not None and question.options:
        _check_options(question, STRATEGIES[question.strategy])
    unknown = set(question.devices or ()) - set(question.cluster.devices)
    if unknown:
        online = ", ".join(question.cluster.devices) or "none"
        raise PlanError(f"devices {', '.join(sorted(unknown))} are not online; online: {online}")
    if not question.cluster.devices:
        raise PlanError("no device is online; start one with: hepti agent --broker URL --id NAME")
    if question.strategy is not None and STRATEGIES[question.strategy].settles(question.options):
        _check_watts(question)


def _check_watts(question: Question) -> None:
    """Raise ConfigError if it is not known of every device what it draws."""
    names = question.devices or tuple(question.cluster.devices)
    dumb = ", ".join(name for name in names if question.cluster.devices[name].power is None)
    if dumb:
        raise ConfigError(
            f"the least energy of {question.strategy} needs the watts of every device, and none are known of {dumb}; "
            "give compute_watts and link_watts in a site file, for hepti simulate"
        )


def _check_options(question: Question, method: Method) -> None:
    """Raise ConfigError for options that the method does not have, or not on so many devices."""
    count = len(question.devices or question.cluster.devices)
    given = " ".join(f"{key}={value}" for key, value in question.options.items())
    known = [" ".join(f"{key}={value}" for key, value in o.items()) for o in method.every().values() if o]
    if not method.knows(question.options):
        raise ConfigError(f"{method.name} has no option {given}; it has {', '.join(known[:12]) or 'none'}")
    sizes = (count,) if question.devices else range(1, count + 1)
    if not any(dict(question.options) == dict(o) for n in sizes for o in method.choices(n)):
        here = (" ".join(f"{k}={v}" for k, v in o.items()) for o in method.choices(count))
        raise ConfigError(f"{method.name} has no option {given} on {count} devices; there it has {', '.join(here)}")
