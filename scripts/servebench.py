"""A load through the socket, and what its clients wait for: TTFT and inter-token latency.

python scripts/servebench.py [flags] [flags of serve.py]
python scripts/servebench.py --url http://host:port [flags]
python scripts/servebench.py --minutes N [--streams N] [flags of soak.py]

With --minutes it is soak.py: a mixed load on a full server, which must keep count of everything.
Without --url it starts one server after another, each in a process of its own:

* exact: every shape is compiled when it is first met (serve.py --no-cuda-graphs);
* bucketed: so is every bucket (--enforce-eager);
* aot: everything is compiled and run once before the first request.

A client is one request; there are --concurrency at a time, the next starts when one ends. TTFT is
from sending it to its first text, inter-token latency from one piece of text to the next of the
same client; pieces that come in one read of the socket have nothing between them. Prompts are drawn
from --seed and are the same for every server. Every stream's usage must be what was asked for, and
all of them together what the server says it generated.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import httpx
import soak
from figures import percentile, write_csv
from load_client import BenchError, Load, Outcome, run_load
from server_process import ServerDied, serving
from tqdm import tqdm

from jaxserve.plan.report import format_table

ARMS = {"exact": ("--no-cuda-graphs",), "bucketed": ("--enforce-eager",), "aot": ()}
HEADER = (
    "arm",
    "ready s",
    "tokens/s",
    "TTFT p50 ms",
    "p99",
    "ITL p50 ms",
    "p99",
    "compiles",
    "clients that met one",
    "most for one",
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One server under one load; the CSV's columns. None: the server does not say."""

    arm: str
    requests: int
    concurrency: int
    prompt_tokens: int
    max_tokens: int
    seed: int
    ready_s: float | None
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    compiles: int | None
    clients_that_met_one: int | None
    most_for_one: int | None

    def row(self) -> tuple[str, ...]:
        """A line under HEADER."""
        counts = (self.compiles, self.clients_that_met_one, self.most_for_one)
        return (
            self.arm,
            "-" if self.ready_s is None else f"{self.ready_s:.1f}",
            f"{self.tokens_per_s:.1f}",
            *(f"{self.ttft_p50_ms:.0f}", f"{self.ttft_p99_ms:.0f}"),
            *(f"{self.itl_p50_ms:.1f}", f"{self.itl_p99_ms:.1f}"),
            *("-" if count is None else str(count) for count in counts),
        )


def summarise(arm: str, load: Load, outcome: Outcome, ready_s: float | None) -> Result:
    """The percentiles over all clients: of their first waits, and of all their gaps together."""
    first = [client.ttft_s for client in outcome.clients]
    gaps = [gap for client in outcome.clients for gap in client.gaps_s]
    compiles = [c.compiles for c in outcome.clients if c.compiles is not None]
    return Result(
        arm=arm,
        **asdict(load),
        ready_s=ready_s,
        tokens_per_s=outcome.tokens / outcome.seconds,
        ttft_p50_ms=1e3 * percentile(first, 50),
        ttft_p99_ms=1e3 * percentile(first, 99),
        itl_p50_ms=1e3 * percentile(gaps, 50),
        itl_p99_ms=1e3 * percentile(gaps, 99),
        compiles=outcome.compiles,
        clients_that_met_one=sum(c > 0 for c in compiles) if compiles else None,
        most_for_one=max(compiles, default=None),
    )


def bench(arm: str, url: str, load: Load, ready_s: float | None = None) -> Result:
    """Put ``load`` on the server at ``url``, with a line of progress on stderr."""

    async def run() -> Outcome:
        limits = httpx.Limits(max_connections=load.concurrency + 1)
        with tqdm(total=load.requests, desc=arm, unit="request") as bar:
            async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
                return await run_load(client, load, bar.update)

    return summarise(arm, load, asyncio.run(run()), ready_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="servebench.py",
        description="TTFT and inter-token latency at p50 and p99, through the socket.",
        epilog="every other flag goes to serve.py",
        allow_abbrev=False,
    )
    whole = {"type": int, "metavar": "N"}
    parser.add_argument("--requests", default=32, **whole, help="clients in all (32)")
    parser.add_argument("--concurrency", default=8, **whole, help="clients at a time (8)")
    parser.add_argument("--prompt-tokens", default=64, **whole, help="of each client (64)")
    parser.add_argument("--max-tokens", default=64, **whole, help="generated for each client (64)")
    parser.add_argument("--seed", default=0, type=int, help="of the prompts and the sampling (0)")
    parser.add_argument("--url", help="measure this running server instead")
    parser.add_argument("--arms", default=",".join(ARMS), help="which servers to start, and when")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="also write the figures here")
    parser.add_argument("--minutes", type=float, help="soak a server for so long: see soak.py")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, write the CSV asked for; returns the exit code."""
    parser = _parser()
    args, flags = parser.parse_known_args(argv)
    if args.minutes is not None:
        return soak.main(argv)
    load = Load(**{field.name: getattr(args, field.name) for field in fields(Load)})
    if min(load.requests, load.concurrency, load.prompt_tokens, load.max_tokens) < 1:
        parser.error("--requests, --concurrency, --prompt-tokens, --max-tokens: at least 1")
    arms = args.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms {unknown[0]}: use {','.join(ARMS)} or some of them")
    if args.url and flags:
        parser.error(f"{flags[0]}: the server at --url runs already; leave the flag out")
    results = []
    try:
        if args.url:
            results.append(bench("url", args.url.rstrip("/").removesuffix("/v1"), load))
        else:
            for arm in arms:
                print(f"{arm}: serve.py {' '.join([*flags, *ARMS[arm]])}", file=sys.stderr)
                with serving([*flags, *ARMS[arm]]) as server:
                    results.append(bench(arm, server.url, load, server.ready_s))
    except (BenchError, ServerDied, httpx.HTTPError) as error:
        print(f"servebench.py: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1
    print(
        f"{load.requests} requests, {load.concurrency} at a time, {load.prompt_tokens} prompt "
        f"tokens, {load.max_tokens} generated, seed {load.seed}:"
    )
    print(format_table(HEADER, [result.row() for result in results]))
    if args.csv is not None:
        write_csv(args.csv, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
