"""`hepti wyoming`: the site as a speech-to-text service of Home Assistant."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Mapping, Sequence
from typing import Final

from hepti_mqtt.cli import output
from hepti_mqtt.cli.shared import require_broker
from hepti_mqtt.client import Hepti
from hepti_mqtt.config.options import positive_seconds, tcp_port
from hepti_mqtt.errors import HeptiError, NetworkError

PORT: Final = 10300


def arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of `hepti wyoming`."""
    sub.add_argument(
        "--bind",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address to listen on (default 127.0.0.1; Wyoming knows no keys)",
    )
    sub.add_argument("--port", type=tcp_port, default=PORT, help=f"port to listen on (default {PORT})")
    sub.add_argument("--model", metavar="NAME", help="the model of speech (default: the only one served)")
    sub.add_argument("--language", metavar="CODE", help="what is spoken where a client does not say (default: found)")
    sub.add_argument(
        "--timeout", type=positive_seconds, default=60.0, help="seconds to wait for an answer (default 60)"
    )
    sub.add_argument("--client", metavar="NAME", help="name in topics (default: that of the broker's user)")


def wyoming(args: argparse.Namespace) -> int:
    """Serve until interrupted; raises NetworkError if the port is taken or no broker answers."""
    with Hepti.connect(require_broker(args), args.site, args.client) as hepti, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(args, hepti))
    return 0


async def _serve(args: argparse.Namespace, hepti: Hepti) -> None:
    from hepti_mqtt.gateway.site import Site
    from hepti_mqtt.gateway.wyoming import MAX_LINE, Wyoming

    site = Site(hepti, args.timeout, args.model)

    async def speech() -> Mapping[str, Sequence[str]]:
        found = {}
        for name in await site.models():
            with contextlib.suppress(HeptiError):  # a model that has just gone
                if languages := (await asyncio.to_thread(hepti.plan, name)).get("languages"):
                    found[name] = languages
        return found

    service = Wyoming(site, speech, args.model, args.language)
    try:
        server = await asyncio.start_server(service.serve, args.bind, args.port, limit=MAX_LINE)
    except OSError as error:
        why = error.strerror or error
        raise NetworkError(f"cannot listen on {args.bind} port {args.port}: {why}; choose another --port") from None
    output.err.print(f"listening on tcp://{args.bind}:{args.port} (Wyoming)", markup=False)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with server:
        await stopped.wait()
