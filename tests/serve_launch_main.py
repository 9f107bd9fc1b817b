"""A server process for tests: the real launcher over a scripted engine.

`python serve_launch_main.py MODE SECONDS [flags]`: MODE is fine, no-boot, die, die-late or
slow-boot, SECONDS the time a step takes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jaxserve.errors import CheckpointError  # noqa: E402
from jaxserve.sched.outputs import RequestUpdate  # noqa: E402
from jaxserve.serve.app import create_app  # noqa: E402
from jaxserve.serve.async_engine import AsyncEngine  # noqa: E402
from jaxserve.serve.launch import OnDeath, OnPhase, OnProgress, Serving  # noqa: E402
from jaxserve.serve.logs import Log  # noqa: E402
from jaxserve.serve.settings import ServeSettings  # noqa: E402
from tests.serve_fakes import ScriptedEngine, app_parts  # noqa: E402


class PacedEngine(ScriptedEngine):
    """A step takes ``pace_s``; the one that comes after ``steps_to_live`` raises."""

    pace_s = 0.0
    steps_to_live = 10**9

    def step(self) -> list[RequestUpdate]:
        self.steps_to_live -= 1
        if self.steps_to_live < 0:
            raise RuntimeError("the device fell off the bus")
        time.sleep(self.pace_s)
        return super().step()


def main() -> int:
    mode, pace_s, *argv = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("serve_script", ROOT / "scripts" / "serve.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def builder(settings: ServeSettings, log: Log):
        def build(on_phase: OnPhase, on_progress: OnProgress, on_death: OnDeath) -> Serving:
            on_phase("loading nothing")
            if mode == "no-boot":
                raise CheckpointError("no such model: nothing")
            if mode == "slow-boot":
                threading.Event().wait()
            engine = PacedEngine(script=[5], max_model_len=10**9)
            engine.pace_s = float(pace_s)
            engine.steps_to_live = {"die": 0, "die-late": 50}.get(mode, 10**9)
            wrapped = AsyncEngine(engine, max_requests=64, on_death=on_death)
            return Serving(create_app(app_parts(engine, engine=wrapped, log=log)), wrapped)

        return build

    code = script.main(argv, builder)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
