"""Decode speed of the engine in this process: `python scripts/bench_decode.py [MODEL] [flags]`.

For each number of concurrent requests it prints, over the steps in which all of them decode,

* tokens/s and milliseconds a step (median over steps);
* host: microseconds a step in Python outside the wait for the device, split into the call of the
  executable and the rest (schedule, pack, commit);
* floor: milliseconds the weights alone take at the copy bandwidth measured in the same run, and
  the step's share of it (100% would be a step as fast as memory).
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxserve.boot import build_engine
from jaxserve.checkpoint import load_checkpoint
from jaxserve.config import EngineConfig, SamplingParams
from jaxserve.errors import BootError
from jaxserve.plan.batch import PrefillBatch, Scores
from jaxserve.plan.buckets import DecodeShape
from jaxserve.plan.price import step_weight_bytes
from jaxserve.plan.report import format_table
from jaxserve.runtime.booted import BootedEngine
from jaxserve.runtime.engine import Engine
from jaxserve.runtime.runner import ModelRunner, PendingStep
from jaxserve.runtime.sizing import decode_buckets, prefill_buckets


@dataclass(frozen=True)
class Row:
    """One line of the table; times are medians over steps."""

    requests: int
    tokens_per_s: float
    step_ms: float
    host_us: float
    call_us: float
    floor_ms: float
    share_of_floor: float


class _TimedRunner:
    """A runner that adds up the seconds spent calling executables and waiting for tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.call_s = 0.0
        self.wait_s = 0.0

    def permute_rows(self, sources_B: np.ndarray) -> None:
        self._call(self._runner.permute_rows, sources_B)

    def write_counts(self, row: int, counts_V: np.ndarray) -> None:
        self._call(self._runner.write_counts, row, counts_V)

    def decode(
        self, shape: DecodeShape, new_blocks_B: np.ndarray, mask_BW: np.ndarray | None
    ) -> _TimedPending:
        return _TimedPending(self, self._call(self._runner.decode, shape, new_blocks_B, mask_BW))

    def prefill(self, batch: PrefillBatch) -> _TimedPending:
        return _TimedPending(self, self._call(self._runner.prefill, batch))

    def prepare_params(self, tree: Any) -> Any:
        return self._runner.prepare_params(tree)

    def update_params(self, fitting: Any) -> None:
        self._runner.update_params(fitting)

    def sleep(self, *, weights: bool) -> None:
        self._runner.sleep(weights=weights)

    def wake(self) -> None:
        self._runner.wake()

    def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        self.call_s += time.perf_counter() - start
        return result


@dataclass(frozen=True)
class _TimedPending:
    timed: _TimedRunner
    pending: PendingStep

    def read(self) -> np.ndarray:
        return self._wait(self.pending.read)

    def read_scores(self) -> Scores:
        return self._wait(self.pending.read_scores)

    def read_prompt_scores(self) -> Scores:
        return self._wait(self.pending.read_prompt_scores)

    def _wait(self, read: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = read()
        self.timed.wait_s += time.perf_counter() - start
        return result


def copy_bandwidth(size: int = 256 * 2**20, repeats: int = 7) -> float:
    """Bytes a second, read plus written, of copying with one thread a core; the best of repeats."""
    threads = os.cpu_count() or 1
    sources = [np.ones(size, np.uint8) for _ in range(threads)]
    targets = [np.zeros_like(source) for source in sources]

    def once() -> float:
        workers = [
            threading.Thread(target=np.copyto, args=pair)
            for pair in zip(targets, sources, strict=True)
        ]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return 2 * size * threads / (time.perf_counter() - start)

    return max(once() for _ in range(repeats))


def measure(
    booted: BootedEngine, requests: int, prompt_tokens: int, new_tokens: int, floor_s: float
) -> Row:
    """Greedy requests of random prompts, all at once; only full decode steps are counted."""
    timed = _TimedRunner(booted.runner)
    engine = Engine(
        booted.model,
        booted.config,
        timed,
        num_blocks=booted.pool.num_blocks,
        decode_buckets=decode_buckets(booted.config),
        prefill_buckets=prefill_buckets(booted.config),
    )
    rng = np.random.default_rng(requests)
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for i in range(requests):
        prompt = rng.integers(100, booted.model.vocab_size, prompt_tokens).tolist()
        engine.add_request(f"bench-{requests}-{i}", prompt, params)
    steps: list[tuple[float, float, float]] = []
    while engine.has_unfinished_requests():
        timed.call_s = timed.wait_s = 0.0
        start = time.perf_counter()
        updates = engine.step()
        step_s = time.perf_counter() - start
        if len(updates) == requests and engine.stats().num_running == requests:
            steps.append((step_s, timed.call_s, timed.wait_s))
    # Rows of requests that ended stay until something moves; the next engine expects none.
    booted.runner.permute_rows(np.full(booted.config.max_num_seqs, -1, np.int32))
    step_s = statistics.median(s for s, _, _ in steps)
    return Row(
        requests=requests,
        tokens_per_s=requests / step_s,
        step_ms=step_s * 1e3,
        host_us=statistics.median(s - wait for s, _, wait in steps) * 1e6,
        call_us=statistics.median(call for _, call, _ in steps) * 1e6,
        floor_ms=floor_s * 1e3,
        share_of_floor=floor_s / step_s,
    )


def main(argv: list[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench_decode.py", description="Decode speed of the engine in this process."
    )
    parser.add_argument("model", nargs="?", help="as serve.py takes it; default: SmolLM2-135M")
    parser.add_argument("--requests", default="1,8", help="concurrent requests, e.g. 1,8")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the best is printed")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument(
        "--deterministic", action="store_true", help="what deterministic mode costs"
    )
    parser.add_argument("--csv", help="also write the table here")
    args = parser.parse_args(argv)
    counts = [int(n) for n in args.requests.split(",")]
    try:
        booted = build_engine(
            load_checkpoint(args.model),
            EngineConfig(
                max_num_seqs=max(counts),
                max_num_batched_tokens=max(32, args.prompt_tokens, max(counts)),
                max_model_len=args.prompt_tokens + args.new_tokens + 1,
                attention_backend=args.attention_backend,
                deterministic=args.deterministic,
            ),
            report=lambda line: print(line, file=sys.stderr),
        )
    except BootError as error:
        print(f"bench_decode.py: {error}", file=sys.stderr)
        return 1
    bandwidth = copy_bandwidth()
    import jax

    print(
        f"jax {jax.__version__}, {booted.config.dtype}, {args.prompt_tokens}-token prompts, "
        f"{args.new_tokens} greedy tokens; copy bandwidth {bandwidth / 1e9:.1f} GB/s"
    )
    rows = []
    for count in counts:
        floor_s = step_weight_bytes(booted.model, count, booted.config.dtype) / bandwidth
        runs = [
            measure(booted, count, args.prompt_tokens, args.new_tokens, floor_s)
            for _ in range(args.repeats)
        ]
        rows.append(min(runs, key=lambda row: row.step_ms))
    print(
        format_table(
            ("requests", "tokens/s", "ms/step", "host us", "of it call us", "floor ms", "share"),
            [
                (
                    str(r.requests),
                    f"{r.tokens_per_s:.1f}",
                    f"{r.step_ms:.1f}",
                    f"{r.host_us:.0f}",
                    f"{r.call_us:.0f}",
                    f"{r.floor_ms:.1f}",
                    f"{r.share_of_floor:.0%}",
                )
                for r in rows
            ],
        )
    )
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])))
            writer.writeheader()
            writer.writerows(map(asdict, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
