"""Every method on 1 to 5 devices, for every small CNN: one device's answer, with the real kernels."""

from __future__ import annotations

import pytest
from nets_agree import BAR, METHODS, SHARES, SMALL, Net, variants
from sites import tensors

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.strategies import STRATEGIES

CASES = [
    pytest.param("tiny-convnet", SHARES[3:4], id="tiny-convnet on four devices"),
    *(pytest.param(kind, SHARES, id=kind, marks=pytest.mark.wide) for kind in SMALL),
]


@pytest.mark.parametrize(("kind", "shares"), CASES)
def test_answers_are_those_of_one_device(kind, shares):
    net = Net(spec_of_kind(kind), tensors(spec_of_kind(kind)))
    for name in METHODS:
        for weights in shares:
            for options in variants(net, STRATEGIES[name], len(weights)):
                assert net.off(name, options, weights) < BAR, (name, options, len(weights))
