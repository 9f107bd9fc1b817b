"""Whether pool, rows and requests tell the same story, asked between steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxserve.errors import AuditFailed
from jaxserve.sched.request import Request, RequestState
from jaxserve.sched.scheduler import Scheduler

_STATES = {
    "waiting": {RequestState.WAITING, RequestState.PREEMPTED},
    "running": {RequestState.PREFILLING, RequestState.DECODING},
    "draining": {RequestState.DRAINING},
}


def audit_scheduler(
    scheduler: Scheduler, expected: Iterable[str], in_flight: Mapping[str, int]
) -> None:
    """Raise AuditFailed, naming the request, unless the books balance.

    ``expected``: ids of the requests added and not yet finished. ``in_flight``: tokens drawn for
    each request by steps that are not read back; absent means none. Call it after a step's commit.
    """
    places = {
        "waiting": scheduler.waiting,
        "running": scheduler.running,
        "draining": scheduler.draining,
    }
    seen: dict[str, str] = {}
    for name, requests in places.items():
        for request_id, request in requests.items():
            if request_id in seen:
                _fail(request, f"is both {seen[request_id]} and {name}")
            seen[request_id] = name
            if request.request_id != request_id or request.state not in _STATES[name]:
                _fail(request, f"is listed as {name}, id {request_id}")
            if name != "running":
                _check_holds_nothing(request)
            _check_counts(request, scheduler.pool.block_size, in_flight.get(request_id, 0))
            scheduler.prefix_cache.audit(request)
    lost = set(expected) ^ set(seen)
    if lost:
        raise AuditFailed(f"requests {sorted(lost)} are lost or should be gone")
    scheduler.pool.audit({r.request_id: r.block_ids for r in scheduler.running.values()})
    _check_rows(scheduler)
    _check_order(scheduler)


def _fail(request: Request, what: str) -> None:
    raise AuditFailed(f"request {request.request_id} ({request.state.name}) {what}")


def _check_holds_nothing(request: Request) -> None:
    if request.block_ids:
        _fail(request, f"holds blocks {request.block_ids}")
    if request.row is not None:
        _fail(request, f"sits in row {request.row}")


def _check_counts(request: Request, block_size: int, in_flight: int) -> None:
    if request.num_in_flight != in_flight:
        _fail(request, f"counts {request.num_in_flight} tokens in flight, the steps {in_flight}")
    known, computed = request.num_tokens, request.num_computed
    match request.state:
        case RequestState.WAITING | RequestState.PREEMPTED:
            right = computed == 0 and in_flight == 0
        case RequestState.PREFILLING:
            right = 0 < computed < known and in_flight == 0
        case _:
            # The token drawn last has no K/V yet.
            right = computed == known + in_flight - 1
    if not right:
        _fail(request, f"has {computed} tokens computed, {known} known and {in_flight} in flight")
    if request.state is RequestState.DRAINING and request.num_output_left:
        _fail(request, f"has {request.num_output_left} tokens left to generate")
    if request.state in _STATES["running"]:
        needed = -(-computed // block_size)
        if len(request.block_ids) != needed:
            _fail(request, f"holds {len(request.block_ids)} blocks, its tokens need {needed}")


def _check_rows(scheduler: Scheduler) -> None:
    seated = scheduler.rows.active()
    decoding = [r for r in scheduler.running.values() if r.state is RequestState.DECODING]
    for request in decoding:
        if request.row is None or scheduler.rows.at(request.row) is not request:
            _fail(request, f"claims row {request.row}, which is not its own")
    for request in seated:
        if request not in decoding:
            _fail(request, "sits in a row but is not decoding")
    if len(seated) != len(decoding):
        raise AuditFailed(f"{len(seated)} rows are taken by {len(decoding)} decoding requests")


def _check_order(scheduler: Scheduler) -> None:
    arrivals = [r.arrival for r in (*scheduler.running.values(), *scheduler.waiting.values())]
    if arrivals != sorted(set(arrivals)):
        raise AuditFailed(f"requests run or wait out of their order of arrival: {arrivals}")
