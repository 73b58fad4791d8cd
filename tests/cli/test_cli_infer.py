"""What `hepti infer` makes of its arguments, without a site."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from cli_onnx import small_net

from hepti_mqtt.checkpoint import Checkpoint
from hepti_mqtt.cli import infer
from hepti_mqtt.cli.infer import check, request_body
from hepti_mqtt.cli.main import build, main
from hepti_mqtt.client.described import reference
from hepti_mqtt.errors import ConfigError, WireError
from hepti_mqtt.spec import Spec

NO_SPEC = cast(Spec, None)  # what only --tokens asks


@pytest.mark.parametrize("ids", ["", "1,", "1,b"])
def test_ids_that_are_none_are_told_so(ids: str) -> None:
    args = build().parse_args(["infer", "tiny", "--ids", ids])
    with pytest.raises(ConfigError, match="--ids takes whole numbers"):
        request_body(args, NO_SPEC)


def test_a_model_of_another_version_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Found:
        def __enter__(self) -> Found:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def plan(self, model: str, timeout: float) -> dict[str, Any]:
            return {"spec": {"family": "new"}}

        def wait_ready(self, model: str, timeout: float, patience_s: float) -> dict[str, Any]:
            return self.plan(model, timeout)

    monkeypatch.setattr(infer.Hepti, "connect", lambda *_, **__: Found())
    assert main(["infer", "m", "--text", "x", "--broker", "mqtt://nowhere"]) == WireError.exit_code
    assert "the planner is of another version than this program; update one of them" in capsys.readouterr().err


def test_an_onnx_file_is_checked_with(tmp_path: Path) -> None:
    path = small_net(tmp_path / "net.onnx")
    args = build().parse_args(["infer", "net", "--tokens", "1", "--check"])
    with Checkpoint.open(path) as checkpoint:
        body = request_body(args, checkpoint.spec)
        hidden = reference(checkpoint, body)
    hepti: Any = SimpleNamespace(infer=lambda *_, **asked: SimpleNamespace(hidden=hidden + np.float32(0.5)))
    assert check(hepti, args, body, str(path)) == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="--model-dir"):
        check(hepti, args, body, tmp_path / "none.onnx")
