"""The pages agree with the repository: links, files, commands and targets that they name exist."""

import functools
import importlib.util
import json
import operator
import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from hepti_mqtt.cli.main import build
from hepti_mqtt.protocol.topics import Kind

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(p for folder in ("docs", "broker", "benchmarks") for p in (ROOT / folder).rglob("*.md"))]
)
RESULTS = ROOT / "benchmarks" / "results"  # dated pages: what they name was there on that day
CURRENT = [page for page in PAGES if page.parent != RESULTS]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|yaml|yml|conf|sh|svg|csv|service|example))`")


def identity(page):
    return str(page.relative_to(ROOT))


def prose(page):
    """The page without its code blocks, whose brackets are no links."""
    return "\n".join(line for line in page.read_text("utf-8").splitlines() if not line.startswith("    "))


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).lower() for text in found]
    return {re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_links_lead_somewhere(page):
    for link in LINK.findall(prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} is not there"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", CURRENT, ids=identity)
def test_named_files_and_targets_exist(page):
    text, places = page.read_text("utf-8"), (ROOT, ROOT / "hepti_mqtt", page.parent)
    names = [name for name in NAMED.findall(text) if Path(name).stem not in {"NAME", "FAMILY"}]
    assert [name for name in names if not any((place / name).exists() for place in places)] == []
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^    |`)make (?:[A-Z]+=\S+ )*([a-z][\w-]*)", text, re.MULTILINE)) <= targets


def test_the_package_is_installed_from_a_checkout():
    """It is on no index."""
    index = re.compile(r"\binstall (?:-\S+ )*['\"]?hepti")
    sources = [file for folder in ("hepti_mqtt", "device_agent") for file in (ROOT / folder).rglob("*.py")]
    assert [file for file in (*CURRENT, *sources) if index.search(file.read_text("utf-8"))] == []


@pytest.mark.parametrize("page", CURRENT, ids=identity)
def test_commands_are_understood(page):
    joined = page.read_text("utf-8").replace("\\\n", " ")
    for line in re.findall(r"^    +(?:sudo )?((?:/opt/hepti/bin/)?hepti(?:-agent)? .*)$", joined, re.MULTILINE):
        program, *words = [w for w in shlex.split(re.sub(r"\.\.\.|…", "x", line), comments=True) if w != "&"]
        build().parse_args([*(["agent"] if program.endswith("-agent") else []), *words])


def generator(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize(("name", "command"), [("generate_cli", "cli-docs"), ("generate_asyncapi", "asyncapi")])
def test_generated_pages_are_those_of_the_code(name, command):
    for file, text in generator(name).pages().items():
        assert file.read_text("utf-8") == text, f"write it again: make {command}"


def test_every_topic_is_in_the_asyncapi_document_and_every_reference_leads_somewhere():
    found = generator("generate_asyncapi")
    document = found.document()
    parsed = {found.T.parse(c.topic).kind for name, c in found.CHANNELS.items() if not name.startswith("home_")}
    assert parsed == set(get_args(Kind))

    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document)):
        functools.reduce(operator.getitem, reference.split("/"), document)
    for channel in document["channels"].values():
        assert set(re.findall(r"{(\w+)}", channel["address"])) == set(channel["parameters"])
    assert all(operation["action"] in ("send", "receive") for operation in document["operations"].values())
    assert {"asyncapi", "info", "channels", "operations", "components"} <= document.keys()
