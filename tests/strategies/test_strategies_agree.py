"""Every method on 1 to 5 devices, for every small CNN: one device's answer, with the real kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from nets_agree import BAR, METHODS, SHARES, SMALL, Net, variants
from sites import tensors

from hepti_mqtt.checkpoint import spec_of_kind
from hepti_mqtt.models.cnn.torchvision import Stack
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


def test_residuals_between_dense_layers_are_no_maps():
    stack = Stack(17)
    stack.conv("conv", 6, 3, 2, 1, function="relu")
    stack.conv("mix", 6, 3, pad=1)
    stack.classifier("up", 24)
    first = stack.activation("relu")
    stack.linear("mid", 24)
    second = stack.add("sum", first, "relu")
    stack.linear("more", 24)
    stack.add("more sum", second)
    stack.linear("classifier", 5)
    spec = replace(spec_of_kind("tiny-convnet"), nodes=tuple(stack.nodes))
    net = Net(spec, tensors(spec))
    for name in METHODS:
        for weights in (SHARES[1], SHARES[3]):
            for options in variants(net, STRATEGIES[name], len(weights)):
                assert net.off(name, options, weights) < BAR, (name, options, len(weights))
