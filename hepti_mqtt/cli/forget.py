"""`hepti site forget`: clear what the broker retains of a site, or of a device or a model that is gone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Final

from hepti_mqtt.cli import output
from hepti_mqtt.cli.shared import require_broker
from hepti_mqtt.core.errors import ConfigError, RefusedError
from hepti_mqtt.core.ids import PART_MARK, PLANNER, check_name
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.home_assistant import Payloads
from hepti_mqtt.service.retained import retained_topics
from hepti_mqtt.transport.name_claim import claim, new_boot
from hepti_mqtt.transport.url import BrokerUrl

SHOWN: Final = 10


def retained_of(
    topics: Topics, payloads: Payloads | None, retained: Iterable[str], device: str | None, model: str | None
) -> list[str]:
    """Return the retained topics of a device, of a model, or, without both, of the site.

    payloads: those of Home Assistant's discovery, None for none. Raises BadNameError.
    """
    root = topics.everything().removesuffix("#")
    if device is not None:
        heads: tuple[str, ...] = (f"{root}dev/{check_name('device', device)}/",)
        whole = {topics.home("device", device)}
    elif model is not None:
        heads = (f"{root}infer/{check_name('model', model)}/", f"{root}work/{model}/", f"{root}x/{model}/")
        heads += tuple(f"{root}{level}/{model}{PART_MARK}" for level in ("plan", "work", "x"))
        whole = {topics.plan(model), topics.home("model", model)}
    else:
        heads, whole = (root,), set[str]()
    named = ("device", device) if device else ("model", model) if model else None
    if payloads is not None:
        whole |= {t for t in retained if payloads.is_own(t)} if named is None else {payloads.config_topic(*named)}
    return sorted(topic for topic in retained if topic in whole or topic.startswith(heads))


def forget(args: argparse.Namespace) -> int:
    """Clear retained messages, after a question.

    Raises ConfigError while a planner, or the device, is online; RefusedError where the login may not clear everything.
    """
    url, topics = BrokerUrl.parse(require_broker(args)), Topics(args.site)
    _refuse_while_online(url, topics, args.device)
    payloads = None if args.home_assistant is None else Payloads(topics, args.home_assistant)
    filters = [*topics.swept(), *([payloads.all_configs()] if payloads else [])]
    messages = retained_of(topics, payloads, retained_topics(url, topics, filters), args.device, args.model)
    what = f"device {args.device}" if args.device else f"model {args.model}" if args.model else f"site {topics.site}"
    if messages and not _agreed(args, what, messages):
        return 1
    retained_topics(url, topics, filters, cleared=messages)
    left = retained_of(topics, payloads, retained_topics(url, topics, filters), args.device, args.model)
    if left:
        raise RefusedError(
            f"the broker still retains {_some(left)}: its access list does not let {url.user or 'an anonymous user'} "
            f"clear that; take the login of the {PLANNER}"
        )
    output.print_result(args.json, {"forgotten": messages}, [f"{what}: {len(messages)} retained messages are cleared"])
    return 0


def _refuse_while_online(url: BrokerUrl, topics: Topics, device: str | None) -> None:
    """Raise ConfigError while a process is online that would publish the messages again."""
    what = "a planner" if device is None else f"the agent of {device}"
    topic = topics.planner_status() if device is None else topics.status(device)
    if claim(url, topic, f"hepti-{topics.site}-forget", new_boot(), look=True).held:
        raise ConfigError(f"{what} is online at site {topics.site} and would publish everything again; stop it first")


def _agreed(args: argparse.Namespace, what: str, messages: list[str]) -> bool:
    if args.yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(f"say --yes to clear {len(messages)} retained messages of {what}: {_some(messages)}")
    output.err.print(f"This clears {len(messages)} retained messages of {what}: {_some(messages)}", markup=False)
    return input("Clear them? [y/N] ").strip().lower() in ("y", "yes")


def _some(topics: list[str]) -> str:
    more = f" and {len(topics) - SHOWN} more" if len(topics) > SHOWN else ""
    return ", ".join(topics[:SHOWN]) + more
