"""`hepti wyoming`: the site as a speech-to-text service of Home Assistant."""

from __future__ import annotations

import argparse
import contextlib
from typing import Final

from hepti_mqtt.cli import output
from hepti_mqtt.cli.shared import add_listener_arguments, connect_to_site
from hepti_mqtt.config.options import positive_seconds

PORT: Final = 10300


def arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of `hepti wyoming`."""
    add_listener_arguments(sub, PORT, "; Wyoming knows no keys")
    sub.add_argument("--model", metavar="NAME", help="the model of speech (default: the only one served)")
    sub.add_argument(
        "--language", metavar="CODE", action="append", default=[], help="a language that is spoken; of several, it is "
        "detected which one (may be repeated; default: any)",
    )  # fmt: skip
    sub.add_argument("--prompt", metavar="TEXT", help="names to expect, such as those of rooms and devices")
    sub.add_argument(
        "--timeout", type=positive_seconds, default=60.0, help="seconds to wait for an answer (default 60)"
    )


def wyoming(args: argparse.Namespace) -> int:
    """Serve until interrupted; raises NetworkError if the port is taken. Waits for a broker."""
    import asyncio  # here: other commands begin without it

    from hepti_mqtt.gateway.site import Site
    from hepti_mqtt.gateway.wyoming import Wyoming, serve, speech_models

    with connect_to_site(args) as hepti, contextlib.suppress(KeyboardInterrupt):
        site = Site(hepti, args.timeout, args.model)
        service = Wyoming(site, speech_models(site, hepti), args.model, args.language, args.prompt)

        def listening() -> None:
            output.err.print(f"listening on tcp://{args.bind}:{args.port} (Wyoming)", markup=False)

        asyncio.run(serve(service, args.bind, args.port, hepti.site, listening))
    return 0
