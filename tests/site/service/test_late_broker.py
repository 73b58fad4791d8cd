"""A planner that starts before its broker."""

import logging
import threading

from site_processes import Voice

from hepti_mqtt.config.options import PlannerOptions
from hepti_mqtt.embedded_broker import start_broker
from hepti_mqtt.protocol.messages import decode_status
from hepti_mqtt.protocol.topics import Topics
from hepti_mqtt.service.planner import run_planner
from hepti_mqtt.service.setup import PlannerConfig
from hepti_mqtt.transport.url import BrokerUrl


def test_a_planner_waits_for_its_broker(bert, tmp_path, free_tcp_port):
    url, stop = BrokerUrl.parse(f"mqtt://127.0.0.1:{free_tcp_port}"), threading.Event()
    waits, log = threading.Event(), logging.Logger("late")
    options = PlannerOptions({"bert": bert.path}, home_assistant=None)
    config = PlannerConfig(url, "late", options, state_dir=tmp_path, log=log)
    log.addFilter(lambda record: record.levelno < logging.WARNING or not waits.set())
    planner = threading.Thread(target=run_planner, args=(config, stop))
    planner.start()
    try:
        assert waits.wait(60.0), "it says that it waits"
        with start_broker(port=free_tcp_port), Voice(str(url), Topics("late").planner_status()) as ear:
            while decode_status(ear.next()[1]).state != "online":
                continue
    finally:
        stop.set()
        planner.join(60.0)
    assert not planner.is_alive()
