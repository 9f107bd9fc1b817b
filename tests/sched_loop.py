"""A scheduler run as the engine runs it, with an audit after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.sched.audit import audit_scheduler
from jaxserve.sched.request import Request, RequestState
from jaxserve.sched.scheduler import Schedule, Scheduler
from tests.fakes import make_request

Z = 8


class Loop:
    """Runs a scheduler as the engine does, one iteration ahead; every token is 7."""

    def __init__(self, num_blocks: int = 100, **changes: Any) -> None:
        values: dict[str, Any] = {
            "max_model_len": 200,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "block_size": Z,
            "watermark": 0.0,
            "enable_prefix_caching": False,
        }
        self.scheduler = Scheduler(EngineConfig(**values | changes), num_blocks)
        self.requests: list[Request] = []
        self.flight: Schedule | None = None
        self.now = 0.0

    def add(self, prompt: int | Sequence[int], output: int = 50, **changes: Any) -> Request:
        """Queue a request of these tokens, or of that many times token 3."""
        tokens = [3] * prompt if isinstance(prompt, int) else prompt
        request = make_request(len(self.requests), tokens, max_output_tokens=output, **changes)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> Schedule | None:
        self.now += 1.0
        schedule = self.scheduler.schedule(self.now)
        for request in self.sampled():
            reason = request.commit(7, self.now)
            if reason is not None:
                self.scheduler.finish(request, reason)
        self.flight = schedule
        self.audit()
        return schedule

    def sampled(self) -> list[Request]:
        """Requests whose token the iteration in flight draws, those that ended left out."""
        if self.flight is None:
            return []
        drawn = self.flight.decode + [c.request for c in self.flight.chunks if c.samples]
        return [request for request in drawn if request.finish_reason is None]

    def audit(self) -> None:
        live = [r.request_id for r in self.requests if r.finish_reason is None]
        audit_scheduler(self.scheduler, live, Counter(r.request_id for r in self.sampled()))

    def run(self, until: RequestState | None = None, request: Request | None = None) -> None:
        for _ in range(2000):
            if request is not None and request.state is until:
                return
            if self.step() is None and not len(self.scheduler):
                return
        raise AssertionError("no end after 2000 steps")


def chunks_of(schedule: Schedule | None) -> list[tuple[str, int, int]]:
    assert schedule is not None
    return [(chunk.request.request_id, chunk.start, chunk.end) for chunk in schedule.chunks]
