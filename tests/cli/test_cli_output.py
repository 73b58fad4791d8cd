"""What is printed is what was given."""

from __future__ import annotations

import pytest

from hepti_mqtt.cli import output


def test_codes_of_emoji_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    said = '{"text": "who :id: is [bold] :warning:"}'
    output.print_lines([said])
    output.print_text(said)
    assert capsys.readouterr().out == f"{said}\n{said}"
