"""The order in which a process comes up: load, plan, compile, allocate, warm, serve."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxserve import __version__
from jaxserve.checkpoint.load import Checkpoint, load_checkpoint
from jaxserve.config import BootConfig, DType, EngineConfig, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.model.params import Params, stacks_layers
from jaxserve.plan.buckets import DecodeShape
from jaxserve.plan.gates import (
    check_boot_info,
    check_capture_ready,
    check_switches,
)
from jaxserve.plan.price import weight_bytes
from jaxserve.plan.report import boot_lines
from jaxserve.plan.units import format_bytes
from jaxserve.runtime.booted import BootedEngine
from jaxserve.runtime.compile_cache import CompileCache
from jaxserve.runtime.compiler import StepCompiler, compile_executables, describe
from jaxserve.runtime.engine import Engine
from jaxserve.runtime.executables import (
    Built,
    Recorder,
    planned_keys,
    record,
)
from jaxserve.runtime.fingerprint import environment_parts
from jaxserve.runtime.laps import Laps, boot_seconds_line, seconds_since_start
from jaxserve.runtime.placing import place_params
from jaxserve.runtime.profiling import Profiler
from jaxserve.runtime.sizing import (
    check_asked_sizes,
    check_workspace,
    decode_buckets,
    decode_read,
    exact_shape,
    plan_sizes,
    prefill_buckets,
    step_shapes,
)
from jaxserve.runtime.warmup import allocate, memory_or_refusal, warm_engine
from jaxserve.runtime.weights import first_params
from jaxserve.sched.outputs import EngineStats, RequestUpdate
from jaxserve.serve.admin import engine_actions
from jaxserve.serve.app import AppParts, create_app
from jaxserve.serve.async_engine import AsyncEngine
from jaxserve.serve.launch import Serving
from jaxserve.serve.logs import EngineLog, Log, no_log
from jaxserve.serve.metrics import Metrics
from jaxserve.serve.settings import ServerSettings, ServeSettings
from jaxserve.serve.structured import Grammars
from jaxserve.serve.text import Text

Report = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``; may be called from several threads, one at a time."""
MemoryStats = Callable[[], Mapping[str, int] | None]
"""What the device's allocator says, None where it says nothing (CPUs)."""


def resolve(config: EngineConfig, model: ModelConfig, platform: str) -> EngineConfig:
    """``config`` with every "auto" decided for ``model`` on ``platform``.

    Raises ConfigError for a context longer than the model was trained for.
    """
    longest = model.max_position_embeddings
    max_model_len = config.max_model_len
    if max_model_len == EngineConfig.max_model_len:  # the default gives way to a shorter model
        max_model_len = min(max_model_len, longest)
    if max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {max_model_len}: the model's context is {longest} tokens; "
            f"use --max-model-len {longest} or less"
        )
    dtype: DType = "float32" if platform == "cpu" else model.dtype
    return replace(
        config,
        max_model_len=max_model_len,
        dtype=dtype if config.dtype == "auto" else config.dtype,
        attention_backend=(
            "streamed" if config.attention_backend == "auto" else config.attention_backend
        ),
    )


def build_engine(
    checkpoint: Checkpoint,
    config: EngineConfig,
    boot: BootConfig | None = None,
    *,
    params: Any = None,
    xla_flags: str = "",
    capture_recorder: Recorder = record,
    memory_stats: MemoryStats = lambda: jax.local_devices()[0].memory_stats(),
    laps: Laps | None = None,
    report: Report = lambda line: None,
    progress: Progress = lambda what, done, total: None,
) -> BootedEngine:
    """From a checkpoint to an engine that will compile nothing more.

    ``capture_recorder`` makes an executable that the cache does not have; ``xla_flags`` is part of
    the cache's keys. ``params`` are weights already there, see ``first_params``. ``report`` gets
    one line a phase and one an executable. Raises BootError.
    """
    laps = laps or Laps()
    boot = boot or BootConfig()
    model = checkpoint.config
    platform = jax.default_backend()
    config = resolve(config, model, platform)
    buckets, read = decode_buckets(config), decode_read(config)
    switches = {
        "bucket_decode": config.bucket_decode,
        "persist_inputs": config.persist_inputs,
        "capture_decode": config.capture_decode,
    }
    check_switches(**switches)
    if config.capture_decode:
        check_capture_ready(**switches, buckets=buckets, read=read)
    borrowed = isinstance(params, Params)
    check_asked_sizes(model, config, boot, buckets, memory_stats(), weights_placed=borrowed)

    size = format_bytes(weight_bytes(model, config.dtype))
    report(f"loading {checkpoint.name}: {size} of {config.dtype} weights")
    stacked = stacks_layers(platform)
    with memory_or_refusal(f"placing {size} of weights", "a smaller model or free memory"):
        if params is None:
            placed = place_params(model, config.dtype, checkpoint, progress, stacked=stacked)
        else:
            placed = first_params(params, model, config.dtype, stacked=stacked)
    laps.lap(("weights", 1))

    cache = None
    if boot.compile_cache_dir is not None and config.capture_decode:
        cache = CompileCache(boot.compile_cache_dir, report)
    compiler = StepCompiler(
        shapes=step_shapes(model, config, (), config.blocks_per_row + 1, platform),
        platform=platform,
        cache=cache,
        environment={} if cache is None else environment_parts(xla_flags),
        recorder=capture_recorder,
    )
    sizes = plan_sizes(model, config, boot, buckets, compiler, memory_stats())
    pool, capture, shapes = sizes.pool, sizes.capture, sizes.compiler.shapes
    for line in boot_lines(pool, capture):
        report(line)
    laps.lap(("plan", 1))

    def built(step: Built, done: int, total: int) -> None:
        report(f"{done} of {total} executables: {describe(step)}")
        progress("executables", done, total)

    if config.capture_decode:
        report(sizes.compiler.forecast())
        progress("executables", 0, len(planned_keys(shapes)))

    executables = compile_executables(
        shapes,
        compiler=sizes.compiler,
        workers=os.cpu_count() or 1,
        ahead=config.capture_decode,
        late=boot.allow_late_compile or not config.capture_decode,
        progress=built,
        report=report,
    )
    check_workspace(sizes.workspace_bytes, executables)
    if cache is not None:
        cache.tidy()
    laps.lap(
        *(
            (phase, sum(getattr(b, f"{phase}_s") for b in executables.all))
            for phase in ("trace", "compile", "load", "store")
        )
    )
    report("allocating the pool")
    runner = allocate(placed, executables, shapes, pool, borrowed=borrowed)
    laps.lap(("pool", 1))
    if boot.warm and config.capture_decode:
        warming = f"warming {len(executables.all)} executables"
        report(warming)
        with memory_or_refusal(
            f"{warming} beside a KV pool of {format_bytes(pool.pool_bytes)}",
            f"--num-gpu-blocks-override with less than {pool.num_blocks}",
        ):
            warm_engine(runner, shapes)
    laps.lap(("warm", 1))

    def decode_shape(rows: int, width: int) -> DecodeShape:
        if not config.bucket_decode:
            return exact_shape(config, rows, width)
        return executables.serving_shape(buckets.shape_for(rows, width))

    engine = Engine(
        model,
        config,
        runner,
        num_blocks=pool.num_blocks,
        decode_buckets=buckets,
        prefill_buckets=prefill_buckets(config),
        decode_shape=decode_shape,
    )
    booted = BootedEngine(
        engine=engine,
        runner=runner,
        executables=executables,
        model=model,
        config=config,
        pool=pool,
        capture=capture,
        seconds=laps.seconds,
    )
    if capture is not None:
        check_boot_info(booted.info(engine.stats()), capture, booted.warm_shapes)
    return booted


def build_app(
    settings: ServeSettings,
    *,
    report: Report,
    progress: Progress,
    on_death: Callable[[BaseException], None],
    log: Log = no_log,
    xla_flags: str = "",
) -> Serving:
    """The whole server behind its port: checkpoint, engine, bridge and routes, in that order.

    The engine is warm before the bridge, whose thread steps it, exists: a warm-up beside a running
    loop cannot be written here.
    """
    laps = Laps({"import": seconds_since_start()})
    choice, server = settings.checkpoint, settings.server
    checkpoint = load_checkpoint(
        choice.model,
        load_format=choice.load_format,
        tokenizer=choice.tokenizer,
        progress=progress,
    )
    bundle = checkpoint.fitting_tokenizer()
    laps.lap(("checkpoint", 1))
    booted = build_engine(
        checkpoint,
        settings.engine,
        settings.boot,
        xla_flags=xla_flags,
        laps=laps,
        report=report,
        progress=progress,
    )
    text = Text.of(bundle, chat_template=server.chat_template)
    names = server.served_model_names or (checkpoint.name,)
    serving = serve_engine(booted, text, names, server, on_death, log, root=checkpoint.name)
    laps.lap(("app", 1))
    report(boot_seconds_line(laps.seconds))
    return serving


def serve_engine(
    booted: BootedEngine,
    text: Text,
    names: tuple[str, ...],
    server: ServerSettings,
    on_death: Callable[[BaseException], None],
    log: Log,
    *,
    root: str,
) -> Serving:
    """The bridge and the routes over a warm engine; the engine's thread starts here.

    The engine answers to ``names``; ``root`` is its checkpoint's.
    """
    max_model_len = booted.config.max_model_len
    metrics = Metrics(
        names[0],
        max_model_len=max_model_len,
        prefix=server.metrics_prefix,
        executables=booted.executable_stats,
    )
    engine_log = EngineLog(log)

    def on_step(stats: EngineStats, ended: list[RequestUpdate]) -> None:
        metrics.observe_step(stats, ended)
        engine_log.observe_step(stats)

    engine = AsyncEngine(
        booted.engine,
        max_requests=booted.config.max_num_seqs + server.max_queued_requests,
        on_step=on_step,
        on_death=on_death,
        request_timeout_s=server.request_timeout_s or float("inf"),
    )
    profiler = Profiler()
    actions = engine_actions(
        engine,
        start_profile=profiler.start,
        stop_profile=profiler.stop,
        read_weights=booted.runner.read_params,
        weights_directory=server.update_weights_dir,
        log=log,
    )
    app = create_app(
        AppParts(
            engine=engine,
            text=text,
            grammars=Grammars(
                text,
                vocab_size=booted.model.vocab_size,
                eos_token_ids=booted.model.eos_token_ids,
            ),
            metrics=metrics,
            served_names=names,
            root=root,
            max_model_len=max_model_len,
            version=__version__,
            boot_info=lambda: booted.info(engine.stats()),
            api_keys=server.api_keys,
            trust_request_chat_template=server.trust_request_chat_template,
            enable_prompt_tokens_details=server.enable_prompt_tokens_details,
            allowed_origins=server.allowed_origins,
            admin=actions if server.enable_admin else (),
            log=log,
            log_probes=server.log_level == "debug",
        )
    )
    return Serving(app, engine)
