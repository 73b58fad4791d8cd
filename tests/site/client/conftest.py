"""A scripted planner at a real broker, with a site of the test's own, so that nothing retained is shared."""

from __future__ import annotations

import pytest
from client_support import Planner


@pytest.fixture
def site(request):
    return "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[:60].strip("-")


@pytest.fixture
def planner(broker, site):
    with Planner(broker.url, site) as one:
        yield one
