"""A real planner announces a real site to whoever listens as Home Assistant does."""

from __future__ import annotations

import json

from PIL import Image
from site_processes import SITE, Voice, poll, site_of

from hepti_mqtt.client import Hepti
from hepti_mqtt.protocol.topics import Topics

TOPICS = Topics(SITE)


class Home(Voice):
    """What is retained, as Home Assistant would have it after a start."""

    def __init__(self, url):
        self.kept, self.came = {}, 0
        super().__init__(url, "homeassistant/device/+/config", TOPICS.home("site", "state").rsplit("/", 2)[0] + "/+/+")

    def hear(self, topic, payload):
        self.came += 1
        if payload:
            self.kept[topic] = bytes(payload)
        else:
            self.kept.pop(topic, None)

    def configs(self):
        return sorted(topic for topic in list(self.kept) if topic.endswith("/config"))

    def state(self, kind, name):
        return json.loads(self.kept.get(TOPICS.home(kind, name), b"{}"))


site = site_of({"cat": "tiny-convnet"}, {"a": "100MiB"})


def config(kind, name):
    return f"homeassistant/device/hepti_{SITE}_{kind}_{name}/config"


def test_a_site_appears_and_its_ghosts_go(site):
    with Home(site.url) as home:
        ghost = config("MODEL", "old")
        home.say(ghost, b'{"device": {}}', retain=True)
        wanted = [config("DEVICE", "a"), config("MODEL", "cat"), config("SITE", "state")]
        poll(lambda: home.configs() == wanted, "the site's three entries")
        with Hepti.connect(site.url, SITE) as hepti:
            labels = hepti.infer("cat", image=Image.new("RGB", (32, 32), (200, 100, 50))).labels
        poll(lambda: home.state("model", "cat").get("label") == labels[0]["label"], "the label")
        assert home.state("model", "cat")["requests_per_minute"] == 1
        assert home.state("device", "a")["share_percent"] == 100.0
        came, lost = home.came, list(home.kept)
        for topic in lost:  # the broker has lost what it kept
            home.say(topic, b"", retain=True)
        home.say("homeassistant/status", b"online")
        poll(lambda: home.came >= came + 2 * len(lost), "everything again after the birth message")
        poll(lambda: home.configs() == wanted, "the site's three entries, again")
        site.kill("a")  # else it publishes its status again
        home.say(TOPICS.status("a"), b"", retain=True)
        poll(lambda: config("DEVICE", "a") not in home.configs(), "the end of a forgotten device")
