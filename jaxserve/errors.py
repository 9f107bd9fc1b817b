"""Every refusal of the project.

JaxserveError
├── BootError                     the process does not come up; one line, exit 1
│   ├── ConfigError               a flag or a config value that cannot be
│   ├── CheckpointError           a file or a name that cannot be loaded
│   │   └── UnsupportedModel      an architecture, tensor type or feature this engine lacks
│   ├── PoolTooSmall              the KV pool could not hold one request
│   ├── CaptureTooSmall           a list of executables that could not serve
│   └── BootUnsound               steps of the boot out of order, or a report that is not true
├── RequestRefused                one request is turned away; the engine goes on
│   ├── InvalidRequest            400: a field has a value that cannot be
│   │   └── InvalidWeights        400: an update of the weights does not fit the model
│   ├── UnknownModel              404
│   ├── QueueFull                 429
│   ├── RequestTimeout            504: it ran longer than a request may
│   ├── RequestFailed             500: it met a fault that is its own alone
│   └── NotReady                  503: starting, asleep or stopping
└── EngineError                   a fault of ours
    ├── IllegalTransition         a request was moved to a state it cannot reach
    ├── AuditFailed               the books of pool, rows and requests do not balance
    ├── NoExecutable              a step asked for a shape that was not compiled
    └── EngineDead                the loop ended; what ended it is the cause
"""

from __future__ import annotations


class JaxserveError(Exception):
    """Root of the tree."""


class BootError(JaxserveError):
    """The process does not come up."""


class ConfigError(BootError):
    """A flag or config value that cannot be."""


class CheckpointError(BootError):
    """A file or a name that cannot be loaded."""


class UnsupportedModel(CheckpointError):
    """An architecture, tensor type or feature this engine lacks."""


class PoolTooSmall(BootError):
    """The KV pool could not hold one request."""


class CaptureTooSmall(BootError):
    """A list of executables that could not serve."""


class BootUnsound(BootError):
    """Steps of the boot out of order, or a report that is not true."""


class RequestRefused(JaxserveError):
    """One request is turned away. ``param`` names the field, ``code`` is OpenAI's error code."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(RequestRefused):
    """A field has a value that cannot be."""


class InvalidWeights(InvalidRequest):
    """New weights do not fit the model that runs; nothing has changed."""


class UnknownModel(RequestRefused):
    """The model named in the request is not served here."""

    status = 404


class QueueFull(RequestRefused):
    """No more requests may wait."""

    status = 429
    type = "rate_limit_error"


class RequestTimeout(RequestRefused):
    """The request ran longer than a request may."""

    status = 504
    type = "timeout_error"


class RequestFailed(RequestRefused):
    """A fault of the request's own ended it, such as a grammar that became too complex."""

    status = 500
    type = "server_error"


class NotReady(RequestRefused):
    """The server is starting, asleep or stopping."""

    status = 503
    type = "service_unavailable_error"


class EngineError(JaxserveError):
    """A fault of ours."""


class IllegalTransition(EngineError):
    """A request was moved to a state it cannot reach."""


class AuditFailed(EngineError):
    """The books of pool, rows and requests do not balance."""


class NoExecutable(EngineError):
    """A step asked for a shape that was not compiled."""


class EngineDead(EngineError):
    """The loop ended."""
