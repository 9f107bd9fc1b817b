"""The forms an answer can be bound to, as OpenAI and as vLLM write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jaxserve.errors import InvalidRequest
from jaxserve.serve.records import Record
from jaxserve.serve.structured import Constraint


class JsonSchema(Record):
    """OpenAI's wrapper of a JSON schema. Every schema is kept to, ``strict`` or not."""

    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool = False


class ResponseFormat(Record):
    """The form an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_belongs_to_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest(
                "response_format: json_schema comes with type json_schema, and with no other",
                "response_format",
            )
        return self

    def constraint(self) -> Constraint | None:
        """What an answer must match; None for any text."""
        if self.json_schema is not None:
            return Constraint("json_schema", self.json_schema.schema_)
        return Constraint("json_schema", {"type": "object"}) if self.type == "json_object" else None


class StructuredOutputs(Record):
    """vLLM's constraints on an answer, of which one is given."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        given = sum(value is not None for value in self.model_dump().values())
        if given != 1:
            raise InvalidRequest(
                f"structured_outputs holds {given} constraints, must be one of json, regex, "
                "choice, grammar, json_object",
                "structured_outputs",
            )
        return self

    def constraint(self) -> Constraint:
        """What an answer must match."""
        if self.json_ is not None:
            return Constraint("json_schema", self.json_)
        if self.regex is not None:
            return Constraint("regex", self.regex)
        if self.choice is not None:
            return Constraint("choice", self.choice)
        if self.grammar is not None:
            return Constraint("grammar", self.grammar)
        return Constraint("json_schema", {"type": "object"})
