"""Format of all topics, and the size of a PUBLISH packet.

    hepti/v1/<site>/dev/<id>/status|caps|hb|cmd|up|probe|use
    hepti/v1/<site>/planner/status[/<group>]
    hepti/v1/<site>/plan/<model>[/<group>]
    hepti/v1/<site>/work/<model>/<first>
    hepti/v1/<site>/weights/<id>
    hepti/v1/<site>/x/<model>/<layer>/<from>/<to or all>
    hepti/v1/<site>/infer/<model>/req|text/<client>
    hepti/v1/<site>/infer/<model>/res/<client>[/<request>]
    hepti/v1/<site>/evt/<kind>
    hepti/v1/<site>/home/device|model|site/<name>

Topics contain the sender's name, so that a broker's access list can restrict it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from hepti_mqtt.core.errors import BadNameError, WireError
from hepti_mqtt.core.ids import ALL_DEVICES, PLANNER, check_model, check_name

Kind = Literal[
    "status",
    "caps",
    "heartbeat",
    "command",
    "up",
    "probe",
    "use",
    "planner_status",
    "plan",
    "work",
    "weights",
    "activation",
    "request",
    "text",
    "response",
    "event",
]

TOPIC_ROOT: Final = "hepti/v1"
DROPPED_TOPIC: Final = "$SYS/broker/publish/messages/dropped"  # Mosquitto's count since its start
SHARE: Final = "hepti"  # shared subscription of a site's groups
ANSWERS: Final = "answers"  # event with the outcomes of the last requests
MAX_LAYER: Final = 32_767
MAX_TOPIC_BYTES: Final = 512
MAX_PACKET_BYTES: Final = 268_435_460  # 5 bytes of fixed header and MQTT's largest remaining length


_DEVICE_TAILS: Final[Mapping[str, Kind]] = {
    "status": "status",
    "caps": "caps",
    "hb": "heartbeat",
    "cmd": "command",
    "up": "up",
    "probe": "probe",
    "use": "use",
}


@dataclass(frozen=True, slots=True)
class ParsedTopic:
    """A topic's kind and names; names without meaning for the kind are empty."""

    kind: Kind
    device: str = ""
    model: str = ""
    layer: int = 0
    source: str = ""  #: sender of an activation: a device or `planner`
    #: receiver of an activation (a device, `planner` or `all`) or of weights, or the first device of a run's plan
    to: str = ""
    client: str = ""
    request: str = ""
    event: str = ""
    group: str = ""  #: site of a planner that shares this site's requests


class Topics:
    """Builders, subscription filters and the parser for one site. Builders raise `BadNameError` for invalid names."""

    __slots__ = ("_root", "site")

    def __init__(self, site: str) -> None:
        self.site = check_name("site", site)
        self._root = f"{TOPIC_ROOT}/{site}"

    # -- topics of one device or of the planner ----------------------------------------------------------------------

    def status(self, device: str) -> str:
        """Return the topic of a device's retained starting | online | offline (its will)."""
        return self._device(device, "status")

    def caps(self, device: str) -> str:
        """Return the topic of a device's retained capabilities."""
        return self._device(device, "caps")

    def heartbeat(self, device: str) -> str:
        """Return the topic of a device's heartbeats."""
        return self._device(device, "hb")

    def command(self, device: str) -> str:
        """Return the topic on which the planner commands a device."""
        return self._device(device, "cmd")

    def reports(self, device: str) -> str:
        """Return the topic on which a device answers the planner."""
        return self._device(device, "up")

    def probe(self, device: str) -> str:
        """Return the topic on which a device measures the round trip through the broker."""
        return self._device(device, "probe")

    def use(self, device: str) -> str:
        """Return the topic of the retained on | off by which users exclude a device from plans."""
        return self._device(device, "use")

    def planner_status(self, group: str = "") -> str:
        """Return the topic of the retained online | offline (a will) of the site's planner, or of a group's planner."""
        return f"{self._root}/{PLANNER}/status{_group(group)}"

    # -- topics of one model -----------------------------------------------------------------------------------------

    def plan(self, model: str, group: str = "") -> str:
        """Return the topic of a model's retained plan, or of a group's plan."""
        return f"{self._root}/plan/{check_model(model)}{_group(group)}"

    def work(self, model: str, first: str) -> str:
        """Return the topic of work frames for a plan's devices; first: their first device."""
        return f"{self._root}/work/{check_model(model)}/{check_name('device', first)}"

    def weights(self, device: str) -> str:
        """Return the topic of weight tiles for one device."""
        return f"{self._root}/weights/{check_name('device', device)}"

    def activation(self, model: str, layer: int, source: str, to: str) -> str:
        """Return the topic of tensors from `source` to a device, to the planner or to `all` at a layer."""
        if not 0 <= layer <= MAX_LAYER:
            raise BadNameError(f"layer {layer} is outside 0 to {MAX_LAYER}")
        return f"{self._root}/x/{check_model(model)}/{layer}/{check_source(source)}/{_receiver(to, planner=True)}"

    def request(self, model: str, client: str) -> str:
        """Return the topic to which a client publishes its requests."""
        return f"{self._root}/infer/{check_name('model', model)}/req/{check_name('client', client)}"

    def text(self, model: str, client: str) -> str:
        """Return the topic to which a client publishes a bare text."""
        return f"{self._root}/infer/{check_name('model', model)}/text/{check_name('client', client)}"

    def text_response(self, model: str, client: str) -> str:
        """Return the topic of the answers to a client's bare texts."""
        return self._response_root(model, client).removesuffix("/")

    def response(self, model: str, client: str, request: str) -> str:
        """Return the topic of the answer to one request of a client."""
        return f"{self._response_root(model, client)}{check_name('request', request)}"

    def event(self, kind: str) -> str:
        """Return the topic of one kind of event."""
        return f"{self._root}/evt/{check_name('event', kind)}"

    def home(self, kind: Literal["device", "model", "site"], name: str) -> str:
        """Return the topic of a state in JSON for Home Assistant."""
        return f"{self._root}/home/{kind}/{check_name('device', name)}"

    # -- subscription filters ----------------------------------------------------------------------------------------

    def all_status(self) -> str:
        """Return the filter for every device's status."""
        return self._every_device("status")

    def all_caps(self) -> str:
        """Return the filter for every device's capabilities."""
        return self._every_device("caps")

    def all_heartbeats(self) -> str:
        """Return the filter for every device's heartbeats."""
        return self._every_device("hb")

    def all_reports(self) -> str:
        """Return the filter for every device's reports to the planner."""
        return self._every_device("up")

    def all_uses(self) -> str:
        """Return the filter for every device's on | off."""
        return self._every_device("use")

    def all_requests(self) -> str:
        """Return the filter for every client's requests to every model."""
        return f"{self._root}/infer/+/req/+"

    def request_root(self) -> str:
        """Return the prefix of all request topics."""
        return f"{self._root}/infer/"

    def all_texts(self) -> str:
        """Return the filter for every client's bare texts to every model."""
        return f"{self._root}/infer/+/text/+"

    def shared_requests(self) -> tuple[str, str]:
        """Return the filters of a shared subscription to requests and bare texts: each goes to one subscriber."""
        return f"$share/{SHARE}/{self.all_requests()}", f"$share/{SHARE}/{self.all_texts()}"

    def everything(self) -> str:
        """Return the filter for every topic of the site."""
        return f"{self._root}/#"

    def swept(self) -> tuple[str, ...]:
        """Return filters for all topics of the site that may have retained messages, except answers.

        A subscription to answers would make the broker report a subscriber for each answer.
        """
        branches = ("dev", PLANNER, "plan", "work", "weights", "x", "evt", "home", "infer/+/req", "infer/+/text")
        return tuple(f"{self._root}/{branch}/#" for branch in branches)

    def all_plans(self) -> str:
        """Return the filter for the plans of every model."""
        return f"{self._root}/plan/+"

    def every_group(self) -> tuple[str, str]:
        """Return the filters for status and plans of the site's planner and of every group's planner."""
        return f"{self._root}/{PLANNER}/status/#", f"{self._root}/plan/+/#"

    def activations_from(self, model: str, source: str, me: str) -> tuple[str, str]:
        """Return the filters for tensors from `source` to `me` and to `all`, at every layer of a model."""
        root = f"{self._root}/x/{check_model(model)}/+/{check_source(source)}"
        return f"{root}/{check_source(me)}", f"{root}/{ALL_DEVICES}"

    def responses(self, client: str, model: str | None = None) -> str:
        """Return the filter for every answer to a client, of one model or of all."""
        return self._response_root(model, client) + "+"

    # -- checking received topics ------------------------------------------------------------------------------------

    def response_allowed(self, reply_to: str, model: str, client: str) -> bool:
        """Return whether a request's `reply_to` is a topic below the client's own response topic."""
        root = self._response_root(model, client)
        if not reply_to.startswith(root) or not reply_to.isprintable():
            return False
        levels = reply_to[len(root) :].split("/")
        return all(levels) and not set("+#") & set(reply_to) and len(reply_to.encode()) <= MAX_TOPIC_BYTES

    def misaddressed(self, topic: str, request: str) -> tuple[str, BadNameError] | None:
        """Return (response topic, error) for a request with an invalid model or client name; None for other topics."""
        levels = topic.removeprefix(self._root + "/").split("/")
        if len(topic.encode()) > MAX_TOPIC_BYTES or not topic.isprintable():
            return None
        match levels:
            case ["infer", model, "req" | "text", client] if model and client:
                try:
                    check_name("model", model)
                    check_name("client", client)
                except BadNameError as error:
                    return f"{self._root}/infer/{model}/res/{client}/{check_name('request', request)}", error
        return None

    def parse(self, topic: str) -> ParsedTopic:
        """Return the kind and names of a topic of this site. Raises `WireError` for other topics."""
        return _parse(self._root, topic)

    def _device(self, device: str, tail: str) -> str:
        return f"{self._root}/dev/{check_name('device', device)}/{tail}"

    def _every_device(self, tail: str) -> str:
        return f"{self._root}/dev/+/{tail}"

    def _response_root(self, model: str | None, client: str) -> str:
        level = "+" if model is None else check_name("model", model)
        return f"{self._root}/infer/{level}/res/{check_name('client', client)}/"


def check_source(name: str) -> str:
    """Return the name of a device or the planner. Raises `BadNameError` for other names."""
    return name if name == PLANNER else check_name("device", name)


def _group(name: str) -> str:
    return f"/{check_name('site', name)}" if name else ""


def _receiver(name: str, *, planner: bool = False) -> str:
    return name if name == ALL_DEVICES or (planner and name == PLANNER) else check_name("device", name)


@lru_cache(maxsize=8192)
def _parse(root: str, topic: str) -> ParsedTopic:
    if not topic.startswith(root + "/") or len(topic) > MAX_TOPIC_BYTES:
        raise WireError(f"{topic[:80]!r} is not a topic below {root}/; another program publishes there")
    try:
        parsed = _parse_levels(topic[len(root) + 1 :].split("/"))
    except BadNameError as error:
        raise WireError(f"topic {topic!r}: {error}") from error
    if parsed is None:
        raise WireError(f"{topic!r} is not a topic of this protocol version ({TOPIC_ROOT})")
    return parsed


def _parse_levels(levels: list[str]) -> ParsedTopic | None:
    match levels:
        case ["dev", device, tail] if tail in _DEVICE_TAILS:
            return ParsedTopic(_DEVICE_TAILS[tail], device=check_name("device", device))
        case ["planner", "status"]:
            return ParsedTopic("planner_status")
        case ["planner", "status", group]:
            return ParsedTopic("planner_status", group=check_name("site", group))
        case ["plan", model]:
            return ParsedTopic("plan", model=check_model(model))
        case ["plan", model, group]:
            return ParsedTopic("plan", model=check_model(model), group=check_name("site", group))
        case ["work", model, first]:
            return ParsedTopic("work", model=check_model(model), to=check_name("device", first))
        case ["weights", to]:
            return ParsedTopic("weights", to=check_name("device", to))
        case ["x", model, layer, source, to]:
            return ParsedTopic(
                "activation",
                model=check_model(model),
                layer=_layer(layer),
                source=check_source(source),
                to=_receiver(to, planner=True),
            )
        case ["infer", model, "req", client]:
            return ParsedTopic("request", model=check_name("model", model), client=check_name("client", client))
        case ["infer", model, "text", client]:
            return ParsedTopic("text", model=check_name("model", model), client=check_name("client", client))
        case ["infer", model, "res", client]:
            return ParsedTopic("response", model=check_name("model", model), client=check_name("client", client))
        case ["infer", model, "res", client, request]:
            return ParsedTopic(
                "response",
                model=check_name("model", model),
                client=check_name("client", client),
                request=check_name("request", request),
            )
        case ["evt", kind]:
            return ParsedTopic("event", event=check_name("event", kind))
        case _:
            return None


def _layer(text: str) -> int:
    # Only the canonical spelling is valid: no sign, no leading zero, ASCII digits.
    if text.isascii() and text.isdigit() and len(text) <= 5 and str(int(text)) == text and int(text) <= MAX_LAYER:
        return int(text)
    raise BadNameError(f"layer {text!r} is not a number from 0 to {MAX_LAYER}")


def publish_bytes(topic: str, payload_bytes: int, qos: int) -> int:
    """Return the exact bytes of an MQTT 3.1.1 PUBLISH packet: fixed header, topic, packet id if `qos`, payload.

    An MQTT 5 packet without properties is one byte longer. Raises ValueError above MQTT's limit.
    """
    remaining = 2 + len(topic.encode()) + (2 if qos else 0) + payload_bytes
    length_bytes = 1 + (remaining > 127) + (remaining > 16_383) + (remaining > 2_097_151)
    total = 1 + length_bytes + remaining
    if total > MAX_PACKET_BYTES:
        raise ValueError(f"a payload of {payload_bytes} bytes does not fit an MQTT packet (limit {MAX_PACKET_BYTES})")
    return total
