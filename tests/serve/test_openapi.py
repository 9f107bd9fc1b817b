"""The OpenAPI document is true: what it says is what every route does, whatever it is sent."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from jaxserve.serve.admin import engine_actions
from jaxserve.serve.app import create_app
from jaxserve.serve.async_engine import AsyncEngine
from tests.serve_fakes import ScriptedEngine, app_parts

KEY = {"Authorization": "Bearer k"}


class Resettable(ScriptedEngine):
    def reset_prefix_cache(self) -> None:
        pass


def build():
    engine = Resettable(script=[5])
    bridge = AsyncEngine(engine, max_requests=64)
    admin = engine_actions(
        bridge,
        start_profile=lambda: "/tmp/a",
        stop_profile=lambda: "/tmp/b",
        read_weights=lambda path: None,
    )
    return create_app(app_parts(engine, engine=bridge, admin=admin, api_keys=("k",)))


document = schemathesis.openapi.from_asgi("/openapi.json", build(), headers=KEY)


# After a pause nothing would be answered, and this engine holds no weights.
@document.exclude(path_regex="pause|/sleep|wake_up|weights").parametrize()
@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_no_request_is_answered_otherwise_than_the_document_says(case):
    # A schema cannot say what fits a vocabulary, a context or another field.
    case.validate_response(case.call(headers=KEY), excluded_checks=[positive_data_acceptance])


def test_the_document_lists_every_route_with_its_body_and_its_errors():
    whole = document.raw_schema
    assert set(whole["paths"]) == {
        *("/", "/health", "/ping", "/ready", "/is_sleeping", "/metrics", "/version"),
        *("/tokenize", "/detokenize"),
        *("/v1/models", "/v1/models/{model}", "/v1/completions", "/v1/chat/completions"),
        *("/reset_prefix_cache", "/pause", "/resume", "/start_profile", "/stop_profile"),
        *("/sleep", "/wake_up", "/update_weights"),
    }
    for path, operations in whole["paths"].items():
        for method, operation in operations.items():
            assert ("requestBody" in operation) == (method == "post")
            refused = {status for status in operation["responses"] if status >= "4"}
            assert ("401" in refused) == (operation.get("security") != [])
            if path.startswith("/v1/c"):
                assert refused == {"400", "401", "404", "413", "429", "500", "503", "504"}
                accepted = operation["requestBody"]["content"]["application/json"]["schema"]
                assert {"user", "temperature", "max_tokens"} <= accepted["properties"].keys()
                assert accepted["additionalProperties"] is False
