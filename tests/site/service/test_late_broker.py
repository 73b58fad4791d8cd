"""A planner that starts before its broker."""

import logging
import queue
import threading

from hepti_mqtt.config.options import PlannerOptions
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.protocol.messages import decode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.planner import run_planner
from hepti_mqtt.service.setup import PlannerConfig
from hepti_mqtt.transport import BrokerConnection, BrokerUrl


def test_a_planner_waits_for_its_broker(checkpoints, tmp_path, free_tcp_port):
    url, stop, said = BrokerUrl.parse(f"mqtt://127.0.0.1:{free_tcp_port}"), threading.Event(), queue.SimpleQueue()
    waits, log = threading.Event(), logging.Logger("late")
    config = PlannerConfig(
        url,
        "late",
        PlannerOptions({"bert": checkpoints["bert"].path}, home_assistant=None),
        state_dir=tmp_path,
        log=log,
    )
    log.addFilter(lambda record: record.levelno < logging.WARNING or not waits.set())
    planner = threading.Thread(target=run_planner, args=(config, stop))
    planner.start()
    try:
        assert waits.wait(60.0), "it says that it waits"
        with start_broker(port=free_tcp_port):
            ear = BrokerConnection(url, "ear", on_message=lambda _, payload: said.put(payload), on_state=lambda _: None)
            ear.subscribe([(Topics("late").planner_status(), 1)])
            ear.connect()
            while decode_status(said.get(timeout=60.0)).state != "online":
                continue
            ear.close()
            stop.set()
            planner.join(60.0)
    finally:
        stop.set()
        planner.join(60.0)
    assert not planner.is_alive()
