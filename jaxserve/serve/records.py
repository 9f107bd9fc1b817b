"""From the bytes of a request's body to a checked record, or a refusal that names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from jaxserve.errors import InvalidRequest


class Record(BaseModel):
    """Types are exact (an int is a float, nothing else is converted), other names are refused.

    null stands for an absent field. ``ignored`` names fields that cannot change the output;
    ``neutral`` fields that are not implemented, with the values under which they change nothing;
    ``replaced`` fields that have another name here.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    replaced: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if item is not None}


RecordT = TypeVar("RecordT", bound=Record)


def parse_request(kind: type[RecordT], body: bytes) -> RecordT:
    """The record in a request's body. Raises InvalidRequest that says what is wrong, and where.

    A field that is known and not implemented passes with a value that changes nothing and is
    refused by name otherwise, and so is an unknown one.
    """
    known: dict[str, Any] = {}
    for name, value in _parse_object(body).items():
        if name in kind.model_fields:
            known[name] = value
        elif name in kind.neutral:
            if not (value is None or _is_one_of(value, kind.neutral[name])):
                _refuse_unimplemented(name, value, kind.neutral[name])
        elif name in kind.replaced:
            if value is not None:
                raise InvalidRequest(
                    f"{name} is not supported here: use {kind.replaced[name]}",
                    name,
                    "unsupported_field",
                )
        elif name not in kind.ignored:
            raise InvalidRequest(f"unknown field {name[:100]!r}", name[:100], "unknown_field")
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        raise _invalid(error) from None


def _parse_object(body: bytes) -> dict[str, Any]:
    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=refuse_constant)
        if b"\\u" in body:  # an escape may be a lone surrogate: valid JSON, and no text
            json.dumps(fields, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start}") from None
    except UnicodeEncodeError:
        raise InvalidRequest("the body holds a lone surrogate (\\ud800-\\udfff)") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    return fields


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    # False == 0 and True == 1 in Python, not in JSON.
    return any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
    )


def _refuse_unimplemented(name: str, value: Any, neutral: tuple[Any, ...]) -> NoReturn:
    wanted = " or ".join(json.dumps(item) for item in (*neutral, None))
    sized = isinstance(value, dict | list)
    shown = f"a {type(value).__name__} of {len(value)}" if sized else json.dumps(value)
    raise InvalidRequest(
        f"{name} is not supported here: leave it out or send {wanted}, not {shown[:100]}",
        name,
        "unsupported_field",
    )


# How pydantic labels the members of a union inside an error's path.
_UNION_LABELS = frozenset({"str", "list[str]", "list[TextPart]", "dict[str,any]"})


def _invalid(error: ValidationError) -> InvalidRequest:
    """The most specific fault, with its path as a client would write it."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    fault = max(faults, key=lambda fault: len(fault["loc"]))
    path = ""
    for step in fault["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in _UNION_LABELS:
            path += f".{step}" if path else step
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "missing":
        message = "is required"
    elif fault["type"] == "extra_forbidden":
        message = "is not supported here"
    return InvalidRequest(f"{path[:200]}: {message}", str(fault["loc"][0]))
