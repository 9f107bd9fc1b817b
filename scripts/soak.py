"""A mixed load on a full server for minutes, and whether the server keeps count of everything.

python scripts/soak.py [flags] [flags of serve.py]

It starts a server of --streams slots and more clients than that, so that its queue is full all the
time. A client sends one request after another, each of a kind drawn from --seed; one that is
refused comes back when it is told to. When --minutes are over the
requests under way are answered to their end. What is checked, and ends the run when it is not so:

* no request fails, and every stream's tokens are those of its usage;
* the server counts the tokens and the requests that the clients saw;
* nothing is compiled, every block is free a second after the last answer, and the process does not
  grow after its first third.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from figures import percentile, write_csv
from load_client import BenchError
from server_process import ServerDied, serving
from soak_client import KINDS, Tally, soak

from jaxserve.plan.report import format_table

# Rows and queue are the slots. The pool is small: blocks that stay taken are soon missed.
_FLAGS = "--max-num-seqs 16 --max-model-len 512 --max-num-batched-tokens 128"
_BLOCKS = "--num-gpu-blocks-override 97"
_ROWS = 16
_MORE = 1.2  # clients for a slot; and slots for a stream, as some requests take two
_GROWTH = 1.05  # of the resident memory, from a third of the time to the end
HEADER = ("kind", "requests", "tokens", "TTFT p50 ms", "p99", "ITL p50 ms", "p99")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One kind of request; the CSV's columns. None: it has no such figure.

    ``ttft_*`` of refused requests is the time to the refusal: the clients' clock, and in a line of
    its own the server's, from reading the request to its answer. ``*_mb`` are the server's resident
    memory, what is not of a kind stands in every line.
    """

    kind: str
    requests: int
    tokens: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    tokens_per_s: float
    seconds: float
    peak_streams: int
    preemptions: int
    cached_tokens: int
    dropped_tokens: int
    ready_mb: float
    third_mb: float
    end_mb: float
    load_average: float

    def row(self) -> tuple[str, ...]:
        """A line under HEADER."""
        itl = (self.itl_p50_ms, self.itl_p99_ms)
        return (
            self.kind,
            *(str(self.requests), str(self.tokens)),
            *(f"{self.ttft_p50_ms:.0f}", f"{self.ttft_p99_ms:.0f}"),
            *("-" if ms is None else f"{ms:.1f}" for ms in itl),
        )


def summarise(
    tally: Tally, refusals_s: Sequence[float], memory_mb: Sequence[float], load_average: float
) -> list[Line]:
    """A line for each kind, for all that was answered and for what was refused.

    ``refusals_s``: seconds to each refusal as the server logs them. ``memory_mb``: readings over
    the whole time, from ready to the end.
    """
    seen = {kind: [saw for saw in tally.saw if saw.kind == kind] for kind in KINDS}
    seen["all"] = tally.saw
    whole = {
        "tokens_per_s": tally.tokens / tally.seconds,
        "seconds": tally.seconds,
        "peak_streams": tally.peak_streams,
        "preemptions": tally.preemptions,
        "cached_tokens": tally.cached_tokens,
        "dropped_tokens": tally.dropped_tokens,
        "ready_mb": memory_mb[0],
        "third_mb": memory_mb[len(memory_mb) // 3],
        "end_mb": memory_mb[-1],
        "load_average": load_average,
    }
    lines = []
    for kind, saws in seen.items():
        first = [saw.ttft_s for saw in saws if saw.ttft_s is not None]
        gaps = [gap for saw in saws for gap in saw.gaps_s]
        if not first:
            raise BenchError(f"no request of kind {kind} got a token: ask for more --minutes")
        lines.append(
            Line(
                kind=kind,
                requests=len(saws),
                tokens=sum(saw.tokens for saw in saws),
                ttft_p50_ms=1e3 * percentile(first, 50),
                ttft_p99_ms=1e3 * percentile(first, 99),
                itl_p50_ms=1e3 * percentile(gaps, 50) if gaps else None,
                itl_p99_ms=1e3 * percentile(gaps, 99) if gaps else None,
                **whole,
            )
        )
    if not tally.refused_s:
        raise BenchError("no request was refused: the queue was never full")
    for kind, seconds in (("refused", tally.refused_s), ("refused, server's clock", refusals_s)):
        lines.append(
            Line(
                kind=kind,
                requests=len(seconds),
                tokens=0,
                ttft_p50_ms=1e3 * percentile(seconds, 50),
                ttft_p99_ms=1e3 * percentile(seconds, 99),
                itl_p50_ms=None,
                itl_p99_ms=None,
                **whole,
            )
        )
    return lines


class Refusals:
    """The seconds of every refusal, out of the lines of a server's log."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def read(self, line: str) -> None:
        """A line, of a request or of anything else."""
        if found := re.search(r" request .* status=429 .*total_s=([0-9.]+)", line):
            self.seconds.append(float(found[1]))


def resident_mb(pid: int) -> float:
    """A process's resident memory, from Linux's /proc."""
    status = Path(f"/proc/{pid}/status").read_text()
    (kib,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(kib) / 1024


async def _watch(url: str, pid: int, args: argparse.Namespace) -> tuple[Tally, list[float]]:
    memory_mb = [resident_mb(pid)]

    async def sample() -> None:
        while True:
            await asyncio.sleep(1.0)
            memory_mb.append(resident_mb(pid))

    sampling = asyncio.create_task(sample())
    try:
        clients = int(args.streams * _MORE * _MORE)
        tally = await soak(url, clients=clients, seconds=60 * args.minutes, seed=args.seed)
    finally:
        sampling.cancel()
    return tally, [*memory_mb, resident_mb(pid)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="soak.py",
        description="A mixed load on a full server, which must keep count of everything.",
        epilog="every other flag goes to serve.py",
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", default=3.0, type=float, help="of new requests (3)")
    parser.add_argument("--streams", default=200, type=int, help="open at a time (200)")
    parser.add_argument("--seed", default=0, type=int, help="of what is asked (0)")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="also write the figures here")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, write the CSV asked for; returns the exit code."""
    parser = _parser()
    args, flags = parser.parse_known_args(argv)
    if args.streams <= _ROWS or args.minutes <= 0:
        parser.error(f"--streams: more than the {_ROWS} rows; --minutes: more than 0")
    queued = f"--max-queued-requests {int(args.streams * _MORE) - _ROWS}"
    flags = [*f"{_FLAGS} {_BLOCKS} {queued}".split(), *flags]
    print(f"serve.py {' '.join(flags)}", file=sys.stderr)
    refusals = Refusals()
    try:
        with serving(flags, log=refusals.read) as server:
            tally, memory_mb = asyncio.run(_watch(server.url, server.pid, args))
        lines = summarise(tally, refusals.seconds, memory_mb, os.getloadavg()[0])
        line = lines[0]
        if line.end_mb > _GROWTH * line.third_mb:
            raise BenchError(
                f"the server grew from {line.third_mb:.0f} to {line.end_mb:.0f} MB: it leaks"
            )
        if line.peak_streams < args.streams:
            raise BenchError(
                f"{line.peak_streams} streams were open at a time, of {args.streams} asked for: "
                "ask for more --minutes"
            )
    except (BenchError, ServerDied, httpx.HTTPError) as error:
        print(f"soak.py: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1
    print(
        f"{line.seconds:.0f} s, up to {line.peak_streams} streams, {line.tokens_per_s:.1f} tokens/s"
        f", {line.preemptions} preemptions, {line.cached_tokens} prompt tokens from the cache, "
        f"resident {line.ready_mb:.0f} / {line.third_mb:.0f} / {line.end_mb:.0f} MB (ready, a "
        f"third, end), load average {line.load_average:.1f}:"
    )
    print(format_table(HEADER, [line.row() for line in lines]))
    if args.csv is not None:
        write_csv(args.csv, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
