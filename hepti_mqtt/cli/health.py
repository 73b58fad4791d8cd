"""`hepti health`: whether the planner, or a device, is online; for health checks of containers and services."""

from __future__ import annotations

import argparse

from hepti_mqtt.cli import output
from hepti_mqtt.cli.shared import require_broker
from hepti_mqtt.config.options import host_name
from hepti_mqtt.core.errors import NetworkError
from hepti_mqtt.core.ids import check_name
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport.name_claim import StatusReader
from hepti_mqtt.transport.url import BrokerUrl


def health(args: argparse.Namespace) -> int:
    """Print the retained word of the planner or a device; return 0 if it is online, else 1.

    It imports no kernels and asks only the broker, so it costs a fraction of a second.
    """
    topics = Topics(args.site)
    device = None if args.part == "planner" else check_name("device", args.id or host_name())
    topic = topics.planner_status() if device is None else topics.status(device)
    url = BrokerUrl.parse(require_broker(args))
    with StatusReader(url, topic, f"hepti-{args.site}-health") as reader:
        status = reader.connect(args.timeout).status(args.timeout)
    if status is None:
        raise NetworkError(f"no status on {topic}: is the {args.part} running?")
    state = {"status": status.state, "doing": status.doing, "done": status.done, "total": status.total}
    output.print_result(args.json, state, [output.status_text(state)])
    return 0 if status.state == "online" else 1
