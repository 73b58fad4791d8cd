"""A broker for the tests of one file, and commands in this process."""

from __future__ import annotations

import json

import pytest

from hepti_mqtt.cli.main import main
from hepti_mqtt.embedded_broker import start_broker


@pytest.fixture(scope="module")
def broker():
    with start_broker() as running:
        yield running


@pytest.fixture
def run(capsys):
    """Return exit code, stdout and stderr of `hepti ARGUMENTS`."""

    def run(*arguments):
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        said = capsys.readouterr()
        assert "\x1b" not in said.out + said.err
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return run


@pytest.fixture
def run_at_site(run, site, monkeypatch):
    """The same, with broker and site of the fixture `site` in the environment."""
    monkeypatch.setenv("HEPTI_BROKER", site.url)
    monkeypatch.setenv("HEPTI_SITE", site.name)
    return run


@pytest.fixture
def ask(run):
    """Return the JSON object of `hepti ARGUMENTS --json`, which is all that stands on stdout."""

    def ask(*arguments, code=0):
        got, out, err = run(*arguments, "--json")
        assert got == code, out + err
        assert out.count("\n") == 1
        return json.loads(out)

    return ask
