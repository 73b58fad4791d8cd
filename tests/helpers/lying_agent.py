"""`hepti ARGUMENTS` of an agent that sends its peers wrong bytes for every tile."""

from __future__ import annotations

import sys

from device_agent import tile_peers
from device_agent.tile_cache import TileCache
from hepti_mqtt.cli.main import main


class Liar(tile_peers.TilePeers):
    def serve(self) -> None:
        right, TileCache.get = TileCache.get, lambda *_: b"not what was asked for"
        try:
            super().serve()
        finally:
            TileCache.get = right


if __name__ == "__main__":
    sys.modules["device_agent.agent"].TilePeers = Liar
    sys.exit(main(sys.argv[1:]))
