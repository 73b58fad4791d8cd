"""The dashboard of a real site in a real browser; HEPTI_SCREENSHOTS=DIR keeps what it looked like."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from site_processes import PATIENCE_S, ask_http, client_of, poll, running_site, site_of

from hepti_mqtt.checkpoint import make_model
from hepti_mqtt.client import Hepti

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


# Every text of the site is markup, also where today's rules for names would not let it be.
HOSTILE = """
site = JSON.parse(JSON.stringify(site), (key, value) =>
  typeof value === "string" ? value + `"><img src=x onerror="stolen=1"><script>stolen=1</script>` : value);
draw();
"""


AGENTS = dict.fromkeys(("kitchen", "attic", "livingroom"), "100MiB")
METHOD = ("--strategy", "megatron", "--devices", ",".join(AGENTS))
site = site_of({"sentiment": "tiny-bert-classifier"}, AGENTS, planner=METHOD)
hepti = client_of(online=True)


def test_a_text_is_sent_by_keyboard_and_its_answer_seen(site, hepti, tmp_path):
    port = site.serve("gateway")
    hepti.wait_ready("sentiment", PATIENCE_S)
    kept = Path(os.environ.get("HEPTI_SCREENSHOTS", tmp_path))
    with Browser() as browser:
        browser.show(f"http://127.0.0.1:{port}/", 1240, 900, dark=False)
        poll(lambda: browser.run("document.querySelectorAll('#devices tbody tr').length") == 3, "devices")
        poll(lambda: browser.run("!document.querySelector('#ask button')?.disabled && site?.models.length"), "a model")
        for text in ("the light is warm", "the door is cold", "a camera"):
            browser.run("document.getElementById('text').focus(), document.getElementById('text').select()")
            browser.call("Input.insertText", text=text)
            for kind in ("keyDown", "keyUp"):  # on to the picture, or past it if the model reads none
                browser.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
            assert browser.run("document.activeElement.textContent") == "Send"
            browser.run("document.getElementById('answer').replaceChildren()")
            for kind, typed in (("keyDown", "\r"), ("keyUp", "")):
                browser.call(
                    "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text=typed
                )
            poll(lambda: browser.run("document.querySelector('#answer .bar-row')?.textContent"), "the answer")
        poll(lambda: browser.run("document.querySelectorAll('#latency circle').length") == 3, "the history")
        assert browser.run("document.querySelectorAll('#shares .bar-row').length") == 3
        for name, width, dark in (("light", 1240, False), ("dark", 1240, True), ("phone", 390, True)):
            browser.show(f"http://127.0.0.1:{port}/", width, 844, dark)
            poll(lambda: browser.run("document.querySelectorAll('#latency circle').length") == 3, "the page")
            assert browser.run("document.documentElement.scrollWidth <= innerWidth"), f"{name} is too wide"
            browser.screenshot(kept / f"dashboard-{name}.png")
        assert browser.messages == []
        browser.run(HOSTILE)
        assert browser.run("document.body.textContent.includes('<img')")
        assert browser.run("document.querySelectorAll('img, b script, main script').length") == 0
        assert browser.run("window.stolen") is None
    site.stop("gateway")  # although a page watched until just now


def test_a_decoders_text_streams_and_requests_under_way_are_seen(tmp_path):
    kept = Path(os.environ.get("HEPTI_SCREENSHOTS", tmp_path))
    kinds = {"other": "tiny-bert", "writer": "tiny-llama"}
    served = {name: make_model(kind, tmp_path / name) for name, kind in kinds.items()}
    agents = dict.fromkeys(("kitchen", "attic"), "200MiB")
    pins = ("--devices", ",".join(agents))
    with contextlib.contextmanager(running_site)(tmp_path, served, agents, planner=pins) as site:
        port = site.serve("gateway")
        body = {"model": "writer", "prompt": "a warm room", "max_tokens": 60}
        with Hepti.connect(site.url, site.name) as hepti:
            hepti.wait_ready("writer", PATIENCE_S)
        stop = threading.Event()

        def keep_busy():
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    ask_http(port, "/v1/completions", body)

        busy = [threading.Thread(target=keep_busy) for _ in range(4)]
        for thread in busy:
            thread.start()
        try:
            with Browser() as browser:
                browser.show(f"http://127.0.0.1:{port}/", 1240, 900, dark=False)
                under_way = "Number(document.querySelectorAll('#summary dd')[1]?.textContent)"
                poll(lambda: browser.run(under_way), "a request under way")
                poll(lambda: browser.run("document.getElementById('model').value") == "writer", "the model in use")
                browser.run("document.getElementById('ask').requestSubmit()")
                answer = "document.querySelector('#answer .chat')?.textContent"
                poll(lambda: browser.run(answer), "a streamed text")
                for name, width in (("busy", 1240), ("busy-phone", 390)):
                    browser.call(
                        "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False
                    )
                    browser.screenshot(kept / f"dashboard-{name}.png")
                    assert browser.run("document.documentElement.scrollWidth <= innerWidth"), f"{name} is too wide"
                assert browser.messages == []
        finally:
            stop.set()
            for thread in busy:
                thread.join()
        site.stop("gateway")
