"""`hepti health`: whether the planner, or a device, is online; for health checks of containers and services."""

from __future__ import annotations

import argparse
import queue
import uuid

from hepti_mqtt.cli import output
from hepti_mqtt.cli.shared import require_broker
from hepti_mqtt.config.options import host_name
from hepti_mqtt.errors import NetworkError, WireError
from hepti_mqtt.ids import check_name
from hepti_mqtt.protocol.messages import Status, decode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.transport import BrokerConnection, BrokerUrl


def health(args: argparse.Namespace) -> int:
    """Print the retained word of the planner or a device; return 0 if it is online, else 1.

    It imports no kernels and asks only the broker, so it costs a fraction of a second.
    """
    topics = Topics(args.site)
    topic = (
        topics.planner_status()
        if args.part == "planner"
        else topics.status(check_name("device", args.id or host_name()))
    )
    said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    name = f"hepti-{args.site}-health-{uuid.uuid4().hex[:12]}"
    transport = BrokerConnection(
        BrokerUrl.parse(require_broker(args)),
        name,
        on_message=lambda _, payload: said.put(payload),
        on_state=lambda _: None,
        name="health",
    )
    try:
        transport.subscribe([(topic, 1)])
        transport.connect(args.timeout)
        status = decode_status(said.get(timeout=args.timeout))
    except queue.Empty:
        raise NetworkError(f"no status on {topic}: is the {args.part} running?") from None
    except WireError:
        status = Status("offline", 0)
    finally:
        transport.close()
    told = {"status": status.state, "doing": status.doing, "done": status.done, "total": status.total}
    if args.json:
        output.print_json(told)
    else:
        output.print_lines([output.status_text(told)])
    return 0 if status.state == "online" else 1
