"""What of an engine is on the device: which weights, and whether the pool is there at all."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

from jaxserve.errors import InvalidRequest, InvalidWeights, NotReady
from jaxserve.runtime.flight import ModelRunner
from jaxserve.sched.scheduler import Scheduler

OnUpdate = Literal["keep", "recompute", "abort"]
"""What becomes of running requests when the weights change."""

OnSleep = Literal["keep", "refuse"]
"""What becomes of requests when the engine sleeps."""


class Residency:
    """Changes the weights, and sleeps and wakes, between two steps of one engine.

    ``hold`` does to the running requests what is asked; ``fatal`` is a context in which any failure
    but a refusal ends the engine.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        hold: Callable[[OnUpdate], None],
        fatal: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._hold = hold
        self._fatal = fatal
        self._asleep: OnSleep | None = None

    @property
    def asleep(self) -> OnSleep | None:
        """None awake, else what becomes of the requests that come."""
        return self._asleep

    @property
    def weight_version(self) -> int:
        """Which weights compute what is scheduled next."""
        return self._scheduler.prefix_cache.weight_version

    def update_params(self, tree: Any, version: int | None, requests: OnUpdate) -> int:
        """See ``Engine.update_params``."""
        if self._asleep is not None:
            raise NotReady("the engine sleeps; wake it before its weights are updated")
        old = self.weight_version
        version = old + 1 if version is None else operator.index(version)
        if version >= 2**53:  # metrics and JSON's readers hold it as a float
            raise InvalidWeights("the weight version must be below 2^53")
        if version <= old:
            raise InvalidWeights(f"weight version {version} must be above {old}, the one in use")
        if requests not in get_args(OnUpdate):
            raise InvalidRequest(f"requests={requests!r}, use one of {get_args(OnUpdate)}")
        fitting = self._runner.prepare_params(tree)
        with self._fatal("an update of the weights"):
            self._runner.update_params(fitting)
            self._hold(requests)
            self._scheduler.reset_prefix_cache(version)
        return version

    def sleep(self, level: int, requests: OnSleep, *, unfinished: bool) -> None:
        """See ``Engine.sleep``; ``unfinished``: a step has something to do."""
        if level not in (1, 2) or requests not in get_args(OnSleep):
            raise InvalidRequest(
                f"level={level!r}, requests={requests!r}: use 1 or 2, and one of "
                f"{get_args(OnSleep)}"
            )
        if self._asleep is not None:
            raise NotReady("the engine sleeps already")
        if requests == "refuse" and unfinished:
            raise NotReady(f"{len(self._scheduler)} requests are not finished; nothing sleeps")
        with self._fatal("falling asleep"):
            self._hold("recompute")
            self._scheduler.reset_prefix_cache()
            self._runner.sleep(weights=level == 2)
        self._asleep = requests

    def wake(self) -> None:
        """See ``Engine.wake``."""
        if self._asleep is None:
            raise NotReady("the engine does not sleep")
        with self._fatal("waking up"):
            self._runner.wake()
        self._asleep = None
