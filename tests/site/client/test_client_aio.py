"""The asyncio client over a real broker, with a scripted planner; the steps themselves: test_client_hepti.py."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from client_support import A_PLAN, NO_PLAN, PATIENCE_S

from hepti_mqtt.client import AsyncHepti, Hepti
from hepti_mqtt.core.errors import DeadlineError, NetworkError, PlanError, RequestError, UnknownModelError


def connected(test):
    """Run a coroutine with a client whose planner is known, and its planner."""

    def run(broker, planner):
        async def inside():
            planner.online()
            planner.record("m", active=A_PLAN)
            async with AsyncHepti.connect(broker.url, site=planner.topics.site, client_id="me") as hepti:
                assert await hepti.models(PATIENCE_S) == ["m"]
                await asyncio.wait_for(test(hepti, planner), PATIENCE_S)

        asyncio.run(inside())

    run.__name__ = test.__name__
    return run


def next_request(planner):
    return asyncio.to_thread(planner.next)


def test_both_clients_have_the_same_methods_and_arguments():
    def shape(client):
        names = [name for name in dir(client) if not name.startswith("_") and callable(getattr(client, name))]
        return {name: list(inspect.signature(getattr(client, name)).parameters.values()) for name in names}

    assert shape(AsyncHepti) == shape(Hepti)


@connected
async def test_answers_come_to_who_asked(hepti, planner):
    first, second = asyncio.create_task(hepti.infer("m", text="x", timeout_s=PATIENCE_S)), hepti.submit("m", text="y")
    requests = {request[1]["text"]: request for request in [await next_request(planner) for _ in "xy"]}
    for text in "yx":
        planner.answer(requests[text])
    assert [(await first).result, (await second).result] == ["x", "y"]
    assert (await hepti.plan("m"))["active"] == A_PLAN
    assert (await hepti.wait_ready("m"))["active"] == A_PLAN
    assert await hepti.devices(wait_s=0.0) == []
    with pytest.raises(UnknownModelError):
        await hepti.plan("nothing")


@connected
async def test_errors_are_those_of_the_blocking_client(hepti, planner):
    pending = asyncio.create_task(hepti.infer("m", text="x", timeout_s=PATIENCE_S))
    planner.answer(await next_request(planner), **NO_PLAN)
    with pytest.raises(PlanError):
        await pending
    with pytest.raises(DeadlineError):
        await hepti.infer("m", text="x", timeout_s=0.01)
    with pytest.raises(RequestError):
        async for _ in hepti.generate("m", ids=[1], max_new_tokens=2, want="plan"):
            pass


@connected
async def test_tokens_come_in_order_and_the_lost_ones_with_the_answer(hepti, planner):
    async def generate():
        return [token async for token in hepti.generate("m", text="x", max_new_tokens=3, timeout_s=PATIENCE_S)]

    pending = asyncio.create_task(generate())
    request = await next_request(planner)
    for index in (0, 2, 0):  # the second is lost
        planner.part(request, index=index, token=7 + index, text="t")
    planner.answer(request, result={"ids": [7, 8, 9], "text": "ttt"})
    assert [token["token"] for token in await pending] == [7, 8, 9]


@connected
async def test_what_is_cancelled_is_held_no_longer(hepti, planner):
    """A planner that starts gets what still waits, so what was cancelled must not come again."""

    async def generate():
        async for _ in hepti.generate("m", text="tokens", max_new_tokens=3):
            pass

    pending = [
        asyncio.ensure_future(hepti.infer("m", text="x")),
        hepti.submit("m", text="y"),
        asyncio.create_task(generate()),
    ]
    for _ in pending:
        await next_request(planner)
    for one in pending:
        one.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    assert all(one.cancelled() for one in pending)
    planner.online(boot=2)
    last = hepti.submit("m", text="z")
    requests = [await next_request(planner) for _ in range(len(pending) + 1)]
    assert sum("cancel" in request[1] for request in requests) == len(pending), "each is taken back"
    requests = next(request for request in requests if "cancel" not in request[1])
    assert requests[1]["text"] == "z"
    planner.answer(requests)
    assert (await last).result == "z"


def test_what_still_waits_ends_with_the_client_and_no_broker_is_said(broker, planner):
    async def inside():
        hepti = await AsyncHepti.connect(broker.url, site=planner.topics.site)
        waiting = hepti.submit("m", text="x")
        await hepti.close()
        with pytest.raises(NetworkError):
            await waiting
        with pytest.raises(NetworkError):
            await AsyncHepti.connect("mqtt://127.0.0.1:1", timeout=2)

    asyncio.run(inside())
