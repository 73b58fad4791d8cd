"""A connection that mends itself, against a broker that is cut off, slow, absent, old or mad."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest
from broker_kinds import needs_mosquitto

from hepti_mqtt.errors import NetworkError
from hepti_mqtt.transport import BrokerUrl, Connected, Disconnected, PahoTransport, Subscribed, Will
from hepti_mqtt.transport.link import Link
from hepti_mqtt.transport.wake import Wake

PATIENCE_S = 20.0

pytestmark = pytest.mark.broker


@pytest.fixture(params=[4, pytest.param(5, marks=needs_mosquitto)], ids=["3.1.1", "5"])
def protocol(request):
    return request.param


def transport_to(port, **options):
    options = {"on_message": lambda *_: None, "on_state": lambda _: None} | options
    return PahoTransport(BrokerUrl("127.0.0.1", port, user="u", password="s3cret"), "me", **options)


@pytest.fixture
def closed_port():
    """A port that nobody listens on, and that nobody else gets meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def test_an_absent_broker_is_named_and_connect_may_be_tried_again(closed_port):
    transport = transport_to(closed_port)
    for _ in range(2):
        with pytest.raises(NetworkError, match=f"no broker answers at 127.0.0.1:{closed_port}.*HEPTI_BROKER") as caught:
            transport.connect()
    assert "s3cret" not in str(caught.value)
    transport.close()


def test_a_host_that_does_not_exist_is_a_network_error():
    transport = PahoTransport(
        BrokerUrl("host.invalid", 1883), "me", on_message=lambda *_: None, on_state=lambda _: None
    )
    with pytest.raises(NetworkError, match=r"host\.invalid:1883"):
        transport.connect()
    transport.close()


def test_the_will_is_published_when_the_connection_breaks(protocol, proxy, mosquitto, peers):
    watcher = peers(mosquitto.url)
    watcher.subscribe(f"will/{protocol}")
    dying = peers(proxy.url, protocol=protocol, will=Will(f"will/{protocol}", b"lost", 1, retain=False))
    proxy.cut()
    assert watcher.message() == (f"will/{protocol}", b"lost")
    assert dying.await_state(Disconnected).reason


def test_what_is_published_while_disconnected_is_counted_or_kept(protocol, proxy, mosquitto, peers):
    watcher = peers(mosquitto.url)
    watcher.subscribe("kept/+")
    sender = peers(proxy.url, protocol=protocol)
    proxy.refusing = True
    proxy.cut()
    sender.await_state(Disconnected)
    sender.transport.publish("kept/0", b"lost")
    for n in range(50):
        sender.transport.publish("kept/1", b"%d" % n, 1)
    assert sender.transport.counts().lost == 1
    proxy.refusing = False
    assert [watcher.message() for _ in range(50)] == [("kept/1", b"%d" % n) for n in range(50)]
    sender.await_state(Connected)


def test_what_the_broker_has_not_acknowledged_is_sent_again(protocol, proxy, mosquitto, peers):
    watcher = peers(mosquitto.url)
    watcher.subscribe("again/+")
    sender = peers(proxy.url, protocol=protocol)
    proxy.flowing.clear()  # what is sent now stays in the relay and goes down with it
    for n in range(200):
        sender.transport.publish("again/1", b"%d" % n, 1)
    proxy.cut()
    sender.await_state(Disconnected)
    proxy.flowing.set()
    sender.await_state(Connected)
    seen = set()
    while len(seen) < 200:
        seen.add(watcher.message()[1])
    assert seen == {b"%d" % n for n in range(200)}


def test_a_subscription_made_while_disconnected_comes_with_the_connection(proxy, mosquitto, peers):
    early = peers(mosquitto.url, connect=False)
    token = early.transport.subscribe([("early", 1)])
    early.transport.connect()
    assert [early.state(), type(early.state())] == [Subscribed(token), Connected]
    early.transport.publish("early", b"yes", 1)
    assert early.message() == ("early", b"yes")


def test_the_queue_is_bounded_when_the_broker_does_not_read(proxy, peers):
    sender = peers(proxy.url, max_queued_bytes=2_000_000)
    proxy.flowing.clear()
    while sender.transport.counts().lost == 0:
        sender.transport.publish("full", bytes(500_000))
    with pytest.raises(NetworkError, match="wait for the broker at 127"):
        for_ever(sender.transport.publish, "full", bytes(500_000), 1)


def test_one_message_may_be_larger_than_the_queue(mosquitto, peers):
    peer = peers(mosquitto.url, max_queued_bytes=1000)
    peer.subscribe("large")
    for _ in range(3):
        peer.transport.publish("large", bytes(1_000_000))
        assert len(peer.message()[1]) == 1_000_000


def test_more_messages_than_the_brokers_window_arrive_in_order(protocol, mosquitto, peers):
    peer = peers(mosquitto.url, protocol=protocol)
    peer.subscribe("window")
    for n in range(500):
        peer.transport.publish("window", b"%d" % n, 1)
    assert [int(peer.message()[1]) for _ in range(500)] == list(range(500))


class Listener:
    """Hears what a link hears."""

    def __init__(self):
        self.acknowledged = []

    def on_acknowledged(self, mid, refusal, heard):
        self.acknowledged.append(mid)


@pytest.fixture
def link(mosquitto):
    wake = Wake()
    url = BrokerUrl.parse(mosquitto.url)
    link = Link(url, "link", protocol=4, will=None, clean=True, listener=Listener(), wake=wake)
    link.open(PATIENCE_S, lambda: False)
    yield link
    link.disconnect(1.0)
    wake.close()


def test_packet_ids_go_round_and_leave_out_those_that_wait(link):
    sent = []
    for _ in range(2):
        link._client._last_mid = 65_533  # as after so many publishes
        sent += [link.publish("round", b"", 1, False) for _ in range(3)]
    assert sent == [65_534, 65_535, 1, 2, 3, 4]
    while len(link._listener.acknowledged) < len(sent):
        link.flush()
        link.turn(PATIENCE_S)
    assert link._listener.acknowledged == sent


def test_a_broker_is_local_where_both_ends_have_one_address(link):
    assert link.local
    real = link._client.socket
    elsewhere = SimpleNamespace(getpeername=lambda: ("192.0.2.1", 1883), getsockname=lambda: ("192.0.2.2", 50_000))
    with socket.socket() as unconnected:
        for sock in (elsewhere, unconnected, None):
            link._client.socket = lambda sock=sock: sock
            assert not link.local
    link._client.socket = real


def test_nagles_algorithm_is_off(link):
    sock = link._client.socket()
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    link.disconnect(1.0)
    assert sock.fileno() == -1


def test_a_callback_that_fails_does_not_end_the_connection(mosquitto, peers, caplog):
    peer = peers(mosquitto.url)
    peer.subscribe("callback")
    healthy, failures = peer.transport._hear, [ZeroDivisionError("mine"), KeyError("mine")]
    peer.transport._hear = lambda topic, payload: _raise(failures.pop()) if failures else healthy(topic, payload)
    for payload in (b"1", b"2", b"3"):
        peer.transport.publish("callback", payload)
    assert peer.message() == ("callback", b"3")
    assert peer.transport.counts().bad == 2
    assert "a callback failed" in caplog.text


def for_ever(call, *arguments):
    while True:
        call(*arguments)


def _raise(error):
    raise error


def test_a_transport_may_be_closed_from_its_own_callback(mosquitto, peers):
    done = threading.Event()
    peer = peers(mosquitto.url)
    peer.transport._hear = lambda *_: (peer.transport.close(), done.set())
    peer.subscribe("closing")
    peer.transport.publish("closing", b"")
    assert done.wait(PATIENCE_S)
    peer.transport._thread.join(PATIENCE_S)
    assert not peer.transport._thread.is_alive()
    with pytest.raises(NetworkError, match="closed"):
        peer.transport.publish("closing", b"")
    with pytest.raises(ValueError, match="once"):
        peer.transport.connect()


def test_closing_while_the_broker_is_away_ends_at_once_and_counts_what_is_lost(proxy, peers):
    sender = peers(proxy.url)
    proxy.close()
    sender.await_state(Disconnected)
    sender.transport.publish("away", b"", 1)
    sender.transport.close(Will("away", b"last"))
    assert sender.transport.counts().lost == 2
    assert not sender.transport._thread.is_alive()


@pytest.mark.parametrize("topic", ["", "a/+", "a/#", "a\0b"])
def test_a_topic_that_cannot_be_published_to_is_refused(mosquitto, peers, topic):
    with pytest.raises(ValueError, match="cannot publish"):
        peers(mosquitto.url).transport.publish(topic, b"")


@pytest.mark.parametrize("wrong", ["", "a/#/b", "a#", "a+/b", "a\0"])
def test_a_filter_that_mqtt_does_not_allow_is_refused(mosquitto, peers, wrong):
    peer = peers(mosquitto.url)
    with pytest.raises(ValueError, match="cannot subscribe"):
        peer.transport.subscribe([("fine/#", 0), (wrong, 0)])
    with pytest.raises(ValueError, match="at least one"):
        peer.transport.subscribe([])


def test_a_payload_that_is_not_bytes_is_refused_to_its_sender(mosquitto, peers):
    with pytest.raises(TypeError, match="not memoryview"):
        peers(mosquitto.url).transport.publish("a", memoryview(b"x"))


def test_nobody_waits_for_a_connection_attempt_that_nothing_interrupts(mosquitto, peers, monkeypatch):
    peer = peers(mosquitto.url)
    transport, attempt, reached = peer.transport, threading.Event(), threading.Event()

    def hang(_timeout_s):
        reached.set()
        attempt.wait(PATIENCE_S)
        raise NetworkError("away")

    monkeypatch.setattr(transport, "_open", hang)
    mosquitto.restart()
    assert reached.wait(PATIENCE_S)
    joined = []
    thread = transport._thread
    transport._thread = SimpleNamespace(join=joined.append)
    transport.close()
    attempt.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert joined
    assert joined[0] < 0.5


def test_a_link_that_comes_after_the_end_is_closed(mosquitto, peers, monkeypatch):
    peer = peers(mosquitto.url)
    transport, links, closing = peer.transport, [], threading.Event()
    honest = transport._open

    def late(timeout_s):
        links.append(honest(timeout_s))
        closing.wait(PATIENCE_S)
        return links[-1]

    monkeypatch.setattr(transport, "_open", late)
    mosquitto.restart()
    peer.await_state(Disconnected)
    while not links:
        threading.Event().wait(0.01)
    thread = transport._thread
    transport.close(timeout_s=0.0)
    closing.set()
    thread.join(PATIENCE_S)
    assert links[0]._client.socket() is None
