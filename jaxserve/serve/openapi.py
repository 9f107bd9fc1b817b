"""The OpenAPI document: every route with its body, its answers and its errors."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field

from jaxserve.serve.http import OPEN_PATHS
from jaxserve.serve.records import Record

_REFERENCE = "#/components/schemas/{model}"
_WHY = {
    400: "A field has a value that cannot be.",
    401: "No known api key.",
    403: "Not from here.",
    404: "Not served here.",
    413: "The body is too large.",
    429: "The queue is full.",
    500: "The engine failed.",
    503: "Starting, stopping, paused, asleep or dead.",
    504: "It took longer than a request may.",
}


class ErrorObject(BaseModel):
    """What went wrong, and in which field."""

    message: str
    type: str
    param: str | None = Field(...)
    code: str | None = Field(...)


class ErrorBody(BaseModel):
    """Every refusal, as OpenAI writes it."""

    error: ErrorObject


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that may be refused with these."""
    return {status: {"model": ErrorBody, "description": _WHY[status]} for status in statuses}


def answers(schema: Mapping[str, Any], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The 200 of a route: a JSON object, and events where the request asks for a stream."""
    content: dict[str, Any] = {"application/json": {"schema": dict(schema)}}
    if streams:
        content["text/event-stream"] = {}
    return {200: {"description": "OK", "content": content}}


def record(**properties: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object that has at least these."""
    return {"type": "object", "required": list(properties), "properties": properties}


STRING = {"type": "string"}
INTEGER = {"type": "integer"}
USAGE = record(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER)
MODEL = record(
    id=STRING,
    object={"const": "model"},
    created=INTEGER,
    owned_by=STRING,
    root=STRING,
    parent={"type": "null"},
    max_model_len=INTEGER,
)


def generated(kind: str, **choice: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a generation's whole answer, ``choice`` being what its kind adds to one."""
    return record(
        id=STRING,
        object={"const": kind},
        created=INTEGER,
        model=STRING,
        choices={
            "type": "array",
            "minItems": 1,
            "items": record(index=INTEGER, finish_reason=STRING, **choice),
        },
        usage=USAGE,
    )


COMPLETION = generated("text_completion", text=STRING)
CHAT_COMPLETION = generated(
    "chat.completion", message=record(role={"const": "assistant"}, content={})
)


def body(kind: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that reads its body itself."""
    content = {"application/json": {"schema": _schemas(kind)[0]}}
    return {"requestBody": {"required": required, "content": content}}


@functools.cache  # dear, and the same for every app
def _schemas(kind: type[BaseModel]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a body, and those it refers to, by name.

    pydantic does not know that null stands for an absent field, nor the fields that are accepted
    with values that change nothing.
    """
    schema = kind.model_json_schema(ref_template=_REFERENCE)
    parts = schema.pop("$defs", {})
    for part in (schema, *parts.values()):
        for name, value in part.get("properties", {}).items():
            if name not in part.get("required", ()):
                part["properties"][name] = {"anyOf": [value, {"type": "null"}]}
    if issubclass(kind, Record):
        schema["properties"] |= {name: {} for name in sorted(kind.ignored)}
        for name, values in kind.neutral.items():
            schema["properties"].setdefault(name, {"enum": [*values, None]})
    return schema, parts


def document(app: FastAPI, bodies: Mapping[str, type[BaseModel]], keyed: bool) -> dict[str, Any]:
    """The whole document; ``bodies`` are the records that bodies refer to.

    ``keyed``: all but the open paths ask for an api key.
    """
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = found.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for kind in bodies.values():
        schemas |= _schemas(kind)[1]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for path, operations in found["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own; ours are 400
            if path in OPEN_PATHS:
                operation["security"] = []
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found
