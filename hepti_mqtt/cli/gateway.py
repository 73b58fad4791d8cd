"""`hepti gateway`: HTTP interfaces of OpenAI, TEI and Ollama to a site."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import socket
from typing import Final

from hepti_mqtt.cli import output
from hepti_mqtt.cli.shared import add_listener_arguments, connect_to_site, require_broker
from hepti_mqtt.config.options import NO_ANNOUNCE_HELP, positive_seconds
from hepti_mqtt.config.process import requires_extra
from hepti_mqtt.core.errors import ConfigError, HeptiError

PORT: Final = 8091
KEYS: Final = "HEPTI_GATEWAY_KEYS"
CONNECTIONS: Final = 2048  # at once; further ones get 503
HEADER_BYTES: Final = 64 << 10
TIMEOUT_S: Final = 60.0
TEXT_TIMEOUT_S: Final = 600.0  # a small board reads a long prompt for minutes
IDLE_S: Final = 75  # a keep-alive connection without a request


def arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of `hepti gateway`."""
    add_listener_arguments(sub, PORT)
    sub.add_argument("--model", metavar="NAME", help="model of requests that name none (default: the only one served)")
    sub.add_argument("--truncate", action="store_true", help="cut texts that are too long, instead of refusing them")
    sub.add_argument(
        "--timeout",
        type=positive_seconds,
        help=f"seconds to wait for an answer (default {TIMEOUT_S:g}, of generated text {TEXT_TIMEOUT_S:g})",
    )
    sub.add_argument("--no-announce", dest="announce", action="store_false", help=NO_ANNOUNCE_HELP)
    sub.add_argument(
        "--no-keys", action="store_true", help=f"listen beyond loopback without keys (else set {KEYS}=KEY,..)"
    )
    sub.add_argument(
        "--cors", metavar="ORIGIN", action="append", default=[], help="origin of pages that may ask, such as "
        "https://chat.lan, or * for all (may be repeated)",
    )  # fmt: skip
    sub.add_argument(
        "--host", metavar="NAME", action="append", default=[], help="public name of a gateway without keys (may be "
        "repeated); its addresses and local names need none",
    )  # fmt: skip


def gateway(args: argparse.Namespace) -> int:
    """Serve until interrupted; raises ConfigError, or HeptiError if the port is taken. Waits for a broker."""
    from hepti_mqtt.transport.broker_limits import is_loopback
    from hepti_mqtt.transport.url import BrokerUrl  # here: other commands begin without NumPy

    keys = tuple(filter(None, (key.strip() for key in os.environ.get(KEYS, "").split(","))))
    if not (keys or args.no_keys or is_loopback(args.bind)):
        raise ConfigError(f"{args.bind} can be reached by others: set {KEYS}=KEY,.. (or say --no-keys)")
    with requires_extra("gateway", "the gateway"):
        import uvicorn

        from hepti_mqtt.gateway.app import create_app
        from hepti_mqtt.gateway.connections import Connection, Server
    from hepti_mqtt.client.discovery import Announcement
    from hepti_mqtt.gateway.site import Site

    _allow_connections()
    listener = listen(args.bind, args.port)
    with listener, connect_to_site(args) as hepti:
        hepti.answers()  # from now on they are remembered for the dashboard
        text_s = args.timeout or TEXT_TIMEOUT_S
        site = Site(hepti, args.timeout or TIMEOUT_S, args.model, truncate=args.truncate, text_timeout_s=text_s)
        server: Server
        config = uvicorn.Config(
            create_app(site, keys, lambda: server.should_exit, origins=args.cors, names=[args.bind, *args.host]),
            http=Connection,
            log_config=None,
            access_log=args.verbose,
            lifespan="off",
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=IDLE_S,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        server = Server(config)
        output.err.print(f"listening on http://{args.bind}:{args.port} (dashboard: /, OpenAI: /v1)", markup=False)
        with contextlib.ExitStack() as stack:
            if args.announce:
                where = 0 if is_loopback(args.bind) else args.port
                broker = BrokerUrl.parse(require_broker(args))
                stack.callback(Announcement("gateway", args.site, broker, where, args.bind).close)
            server.run(sockets=[listener])
    return 0


def _allow_connections() -> None:
    """Raise the limit of open files (1,024 on many systems) up to the permitted maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * CONNECTIONS if hard == resource.RLIM_INFINITY else min(2 * CONNECTIONS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket; raises HeptiError if the port is taken."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=CONNECTIONS)
    except OSError as error:
        why = error.strerror or error
        raise HeptiError(f"cannot listen on {address} port {port}: {why}; choose another --port") from None
    # Head and body are two writes; a delayed acknowledgement between them would cost 40 ms. Accepted sockets inherit
    # this; asyncio sets it only if the listener was created with the protocol's number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
