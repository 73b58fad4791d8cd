"""Commands in this process."""

from __future__ import annotations

import json

import pytest

from hepti_mqtt.cli.main import main


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
def ask(run):
    """Return the JSON object of `hepti ARGUMENTS --json`, which is all that stands on stdout."""

    def ask(*arguments, code=0):
        got, out, err = run(*arguments, "--json")
        assert got == code, out + err
        assert out.count("\n") == 1
        return json.loads(out)

    return ask
