"""Two groups of real processes behind one request topic: each request is answered once, also when a planner dies."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext

import pytest
from broker_kinds import broker_of
from site_processes import PATIENCE_S, Site, poll

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti
from hepti_mqtt.core.errors import NetworkError

CLUSTER, GROUPS, REQUESTS = "cluster", ("left", "right"), 12


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    directory = tmp_path_factory.mktemp("groups")
    model = make_model("tiny-bert", directory / "model", seed=5)
    with broker_of("mosquitto") as broker, ExitStack() as stack:
        sites_of_groups = {}
        for name in GROUPS:
            (directory / name).mkdir()
            site = stack.enter_context(Site(directory / name, broker, {"tiny": model}, name))
            site.planner("--shared", CLUSTER)
            site.agent(f"{name}-device")
            sites_of_groups[name] = site
        for name in GROUPS:
            with Hepti.connect(broker.url, site=name, client_id="looker") as own:
                own.wait_ready("tiny", PATIENCE_S)
        yield sites_of_groups


def group_of(answer):
    (device,) = answer.plan["devices"]
    return device.removesuffix("-device")


def test_each_request_is_answered_once_by_one_of_the_groups_that_are_there(groups):
    url = groups["left"].url
    with Hepti.connect(url, site=CLUSTER, client_id="me") as hepti:
        assert hepti.models(PATIENCE_S) == ["tiny"]

        def both():
            return len({group_of(hepti.infer("tiny", ids=[5, 6, 7], timeout_s=PATIENCE_S)) for _ in range(4)}) == 2

        poll(both, "an answer of both groups")
        with Hepti.connect(url, site="left", client_id="me") as own:
            assert group_of(own.infer("tiny", ids=[5, 6], timeout_s=PATIENCE_S)) == "left", "its own site is as it was"

        waiting = [hepti.submit("tiny", ids=[5, 6, 7 + i]) for i in range(REQUESTS)]
        groups["left"].kill("planner")
        waiting += [hepti.submit("tiny", ids=[5, 6, 40 + i]) for i in range(REQUESTS)]
        answers = [future.result(PATIENCE_S) for future in waiting]
        assert len({answer.id for answer in answers}) == 2 * REQUESTS
        assert {group_of(answer) for answer in answers[REQUESTS:]} == {"right"}

        waiting = [hepti.submit("tiny", ids=[5, 6, 7 + i]) for i in range(REQUESTS)]
        groups["right"].broker.stop()
        groups["right"].broker.start()
        assert len({future.result(PATIENCE_S).id for future in waiting}) == REQUESTS, "the broker has forgotten all"

        groups["right"].stop("planner")
        poll(lambda: not hepti.planner_online, "nobody there")
        with pytest.raises(NetworkError):
            hepti.infer("tiny", ids=[5], timeout_s=0.1)


@pytest.mark.parametrize(("shared", "broker"), [("lonely", None), (CLUSTER, "amqtt")])
def test_a_planner_shares_neither_its_own_site_nor_without_mqtt_5(tmp_path, groups, shared, broker):
    with (
        broker_of(broker) if broker else nullcontext(groups["left"].broker) as broker_of_group,
        Site(tmp_path, broker_of_group, groups["left"].models, name="lonely") as lonely,
    ):
        assert lonely.planner("--shared", shared).wait(PATIENCE_S) == 2
