"""What `hepti infer` makes of its arguments, without a site."""

from __future__ import annotations

from typing import cast

import pytest

from hepti_mqtt.cli.infer import request_body
from hepti_mqtt.cli.parser import build
from hepti_mqtt.errors import ConfigError
from hepti_mqtt.spec import Spec

NO_SPEC = cast(Spec, None)  # what only --tokens asks


@pytest.mark.parametrize("ids", ["", "1,", "1,b"])
def test_ids_that_are_none_are_told_so(ids: str) -> None:
    args = build().parse_args(["infer", "tiny", "--ids", ids])
    with pytest.raises(ConfigError, match="--ids takes whole numbers"):
        request_body(args, NO_SPEC)
