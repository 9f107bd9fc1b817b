"""The checks between the steps of a boot, and of a process that serves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import AuditFailed, BootUnsound, CaptureTooSmall, ConfigError, NoExecutable
from jaxserve.plan.buckets import DecodeBuckets, DecodeShape
from jaxserve.plan.capture import CapturePlan


@dataclass(frozen=True)
class DecodeRead:
    """The attention read decode uses: ``tile`` keys at a time, or the whole rectangle (None)."""

    tile: int | None

    @property
    def name(self) -> str:
        """The read's name as --attention-backend spells it."""
        return "rectangle" if self.tile is None else "streamed"


def check_switches(*, bucket_decode: bool, persist_inputs: bool, capture_decode: bool) -> None:
    """Refuse two switches out of three, and a capture on its own.

    A list of executables needs a closed set of shapes and inputs that stay where they are; over an
    open set it is not a slower engine but a wrong one. Raises ConfigError naming what is missing.
    """
    switches = {
        "bucket_decode": bucket_decode,
        "persist_inputs": persist_inputs,
        "capture_decode": capture_decode,
    }
    on = [name for name, is_on in switches.items() if is_on]
    off = [name for name, is_on in switches.items() if not is_on]
    if len(on) == 2 or on == ["capture_decode"]:
        raise ConfigError(
            f"{' and '.join(on)} without {' and '.join(off)}: set all three, or one of "
            "bucket_decode and persist_inputs alone, or none"
        )


def check_read_matches(buckets: DecodeBuckets, read: DecodeRead) -> None:
    """Refuse a bucket set that makes a claim about another read than the one that runs.

    A streamed set under a rectangle read is silent and ruinous: every width is max_model_len, so
    the first step of every request gathers and scores the full rectangle. The reverse pads and
    compiles for a width axis the read does not have.
    """
    if buckets.streamed and read.tile is None:
        raise BootUnsound(
            f"streamed decode buckets under the {read.name} read: each step would gather "
            f"{buckets.max_model_len} keys a row; use --attention-backend streamed, or build the "
            "buckets with streamed=False"
        )
    if not buckets.streamed and read.tile is not None:
        raise BootUnsound(
            f"rectangle decode buckets under the {read.name} read: {buckets.count} shapes where "
            f"{len(buckets.rows)} would do; build the buckets with streamed=True, tile={read.tile}"
        )
    if buckets.tile != read.tile:
        raise BootUnsound(
            f"decode buckets priced for tiles of {buckets.tile} keys, the read walks tiles of "
            f"{read.tile}: build both from one tile"
        )


def check_capture_ready(
    *,
    bucket_decode: bool,
    persist_inputs: bool,
    capture_decode: bool,
    buckets: DecodeBuckets,
    read: DecodeRead,
) -> None:
    """Refuse to plan a list unless all three switches are on and the buckets are the read's."""
    check_switches(
        bucket_decode=bucket_decode, persist_inputs=persist_inputs, capture_decode=capture_decode
    )
    if not capture_decode:
        raise BootUnsound("a capture list with capture_decode off: nothing would run it")
    check_read_matches(buckets, read)


def check_warm_before_serving(*, serving: bool) -> None:
    """Refuse to warm while the engine loop runs: both would write the same decode state.

    The symptom would be a wrong token, not a traceback.
    """
    if serving:
        raise BootUnsound("warm-up while the engine loop is serving: warm first, then start it")


def check_capture_matches_cache(plan: CapturePlan, buckets: DecodeBuckets) -> None:
    """Refuse a list planned for other buckets than those of the cache that will be stepped."""
    strangers = [
        s for s in plan.shapes if s.rows not in buckets.rows or s.width not in buckets.widths
    ]
    if strangers:
        raise BootUnsound(
            f"capture list: {len(strangers)} of {plan.count} shapes are no bucket of the cache, "
            f"e.g. {_shape(strangers[0])} (cache: up to {buckets.max_num_seqs} rows x "
            f"{buckets.max_model_len} tokens); plan the list from the cache's buckets"
        )
    if plan.full_count != buckets.count:
        raise BootUnsound(
            f"capture list planned out of {plan.full_count} shapes, the cache has {buckets.count}: "
            "plan the list from the cache's buckets"
        )
    if plan.tile != buckets.tile:
        raise BootUnsound(
            f"capture list priced for tile {plan.tile}, the cache reads with tile {buckets.tile}: "
            "plan the list from the cache's buckets"
        )


def check_capture_limit(plan: CapturePlan, limit: int) -> None:
    """Refuse a list longer than the ``limit`` executables the process holds.

    Asked here it is a comparison; asked by the warm-up it is a boot that dies on shape limit + 1.
    """
    if plan.count > limit:
        raise CaptureTooSmall(
            f"capture list of {plan.count} shapes, and the process holds {limit} executables: "
            f"plan the list with limit={limit}"
        )


def check_boot_info(
    info: Mapping[str, Any], plan: CapturePlan, ready: Collection[DecodeShape]
) -> None:
    """Refuse a /health payload that does not say what was decided and what is ``ready``.

    A cold shape is no error anywhere else: it is a compile that waits for whoever first needs it.
    """
    said = info.get("capture")
    if said is None:
        raise BootUnsound(f"boot info without a capture section, and {plan.count} shapes planned")
    for key, value in plan.as_dict().items():
        if key not in said or said[key] != value:
            raise BootUnsound(
                f"boot info says capture.{key}={said.get(key)!r}, the plan says {value!r}"
            )
    cold = [s for s in plan.shapes if s not in ready]
    if said.get("warm") and cold:
        raise BootUnsound(
            f"boot info says the capture is warm while {len(cold)} of {plan.count} shapes are "
            f"cold, e.g. {_shape(cold[0])}; warm every planned shape"
        )


def check_all_shapes_captured(plan: CapturePlan, captured: Collection[DecodeShape]) -> None:
    """Refuse, in a running process, a planned shape that has no executable."""
    missing = [s for s in plan.shapes if s not in captured]
    if missing:
        raise NoExecutable(
            f"{len(missing)} of {plan.count} planned shapes have no executable, e.g. "
            f"{_shape(missing[0])}"
        )


def check_replays_dominate(*, replays: int, late_compiles: int, fall_throughs: int) -> None:
    """Refuse a running process most of whose steps did not call a planned executable.

    ``fall_throughs`` ran without an executable, ``late_compiles`` compiled one first. A process
    that has not stepped yet passes.
    """
    others = late_compiles + fall_throughs
    if others and others >= replays:
        raise AuditFailed(
            f"{replays} decode steps called a planned executable, {others} did not "
            f"({late_compiles} late compiles, {fall_throughs} fall-throughs): the list does not "
            "cover what is served; raise --warm-rows and --warm-width"
        )


def _shape(shape: DecodeShape) -> str:
    return f"{shape.rows} rows x {shape.width}"
