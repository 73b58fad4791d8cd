"""The gateway against its own OpenAPI document: requests of every shape that it allows or forbids (schemathesis)."""

from __future__ import annotations

import pytest
from gateway_client import Client
from hypothesis import HealthCheck, settings

from hepti_mqtt.gateway.app import create_app
from hepti_mqtt.gateway.site import Site

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")
not_a_server_error = pytest.importorskip("schemathesis.checks").not_a_server_error
KEY = "a-key"
app = create_app(Site(Client(), 5.0, "any"), [KEY])
#: the client of these tests has no planner: 503
READS_PLANS = ("/api/show", "/api/tags", "/api/ps")
#: texts or documents; JSON within a text; a picture alone
ACROSS_KEYS = ("/rerank", "/predict", "/embeddings")
schema = schemathesis.openapi.from_asgi("/openapi.json", app).exclude(path="/events")  # which never ends


@schema.hook
def map_body(_context, body):
    """Give most bodies that name a model a served one, or no request would come further than that."""
    if isinstance(body, dict) and isinstance(name := body.get("model"), str) and len(name) != 1:
        return {**body, "model": "any"}
    return body


@schema.parametrize()
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_one_that_the_document_has(case):
    # What is in a file is no part of the document, and a form has no types. A schema has no rules across keys.
    unsaid = [checks.positive_data_acceptance] if case.path in ACROSS_KEYS else []
    if case.path.startswith("/v1/audio/"):
        unsaid = [checks.positive_data_acceptance, checks.negative_data_rejection]
    if case.path in READS_PLANS:
        unsaid = [not_a_server_error]
    if case.path == "/":  # GET is the page
        unsaid = [checks.unsupported_method, not_a_server_error]
    case.call_and_validate(headers={"Authorization": f"Bearer {KEY}"}, excluded_checks=unsaid)
