"""Admin routes exist where they were asked for, and answer the operator alone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import httpx
import pytest

from jaxserve.config import SamplingParams
from jaxserve.serve.admin import engine_actions
from jaxserve.serve.app import create_app
from jaxserve.serve.async_engine import AsyncEngine
from jaxserve.serve.logs import no_log
from tests.engine_harness import build, expected
from tests.fakes import FakeRunner
from tests.serve_fakes import ScriptedEngine, app_parts

NAMES = (
    "reset_prefix_cache",
    "pause",
    "resume",
    "start_profile",
    "stop_profile",
    "sleep",
    "wake_up",
    "update_weights",
)


class Resettable(ScriptedEngine):
    num_resets = 0
    asleep = None
    updated = None

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def sleep(self, *, level, requests) -> None:
        self.asleep = (level, requests)

    def wake(self) -> None:
        self.asleep = None

    def update_params(self, tree, *, version, requests) -> int:
        self.updated = (tree, requests)
        return version or 1


@contextlib.asynccontextmanager
async def admin_client(address: str = "127.0.0.1", weights_directory=None, **changes):
    engine = Resettable(script=[5])
    async with app_over(engine, address, weights_directory, **changes) as client:
        yield client, engine


@contextlib.asynccontextmanager
async def app_over(engine, address: str = "127.0.0.1", weights_directory=None, **changes):
    """A client of all routes over any engine."""
    bridge = AsyncEngine(engine, max_requests=64)
    actions = engine_actions(
        bridge,
        start_profile=lambda: "/tmp/a",
        stop_profile=lambda: "/tmp/b",
        read_weights=lambda path: f"weights of {path.name}",
        weights_directory=weights_directory,
        log=changes.get("log", no_log),
    )
    shape = ScriptedEngine(script=[5], max_model_len=engine.max_model_len)
    parts = app_parts(shape, engine=bridge, admin=actions, **changes)
    app = create_app(parts)
    transport = httpx.ASGITransport(app, client=(address, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
        yield client
    await bridge.shutdown(0.0)


async def test_without_the_switch_there_are_no_admin_routes():
    engine = ScriptedEngine(script=[5])
    bridge = AsyncEngine(engine, max_requests=64)
    transport = httpx.ASGITransport(create_app(app_parts(engine, engine=bridge)))
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
        assert [(await client.post(f"/{name}")).status_code for name in NAMES] == [404] * len(NAMES)
        assert not {f"/{n}" for n in NAMES} & set(
            (await client.get("/openapi.json")).json()["paths"]
        )
    await bridge.shutdown(0.0)


async def test_each_action_does_what_its_name_says():
    async with admin_client() as (client, engine):
        assert (await client.post("/reset_prefix_cache")).json() == {"status": "reset"}
        assert engine.num_resets == 1
        started = await client.post("/start_profile")
        assert started.json() == {"status": "profiling", "directory": "/tmp/a"}
        assert (await client.post("/stop_profile")).json()["directory"] == "/tmp/b"
        assert (await client.post("/pause?mode=keep")).json() == {"status": "paused"}
        assert (await client.get("/health")).json()["paused"] is True
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "paused"})
        assert (await client.post("/resume")).json() == {"status": "resumed"}
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/pause", json={"mode": "wait"})).status_code == 200
        assert (await client.post("/resume")).status_code == 200


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("127.0.0.1", 200),
        ("127.9.9.9", 200),
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("192.0.2.7", 403),
        ("::ffff:192.0.2.7", 403),
        ("10.0.0.1", 403),
        ("localhost", 403),
        ("", 403),
    ],
)
async def test_without_keys_only_this_machine_may_ask(address, status):
    async with admin_client(address) as (client, engine):
        reply = await client.post("/reset_prefix_cache")
        assert reply.status_code == status
        assert engine.num_resets == (status == 200)
        if status == 403:
            assert reply.json()["error"]["type"] == "permission_error"


async def test_a_web_page_open_on_this_machine_may_not_ask():
    async with admin_client() as (client, engine):
        reply = await client.post("/pause", headers={"Origin": "http://evil.example"})
        assert reply.status_code == 403
        assert (await client.get("/ready")).status_code == 200
        assert engine.num_resets == 0


async def test_with_keys_the_key_decides_wherever_the_client_is():
    async with admin_client("192.0.2.7", api_keys=("k",)) as (client, engine):
        assert (await client.post("/reset_prefix_cache")).status_code == 401
        headers = {"Authorization": "Bearer k"}
        reply = await client.post("/reset_prefix_cache", headers=headers)
        assert (reply.status_code, engine.num_resets) == (200, 1)


@pytest.mark.parametrize(
    ("query", "body", "said"),
    [
        ("?mode=stop", b"", "mode"),
        ("?mod=keep", b"", "mod"),
        ("", b'{"mode": 1}', "mode"),
        ("", b"[]", "object"),
        ("", b"{", "not JSON"),
        ("", b'{"a":' * 9_000 + b"1" + b"}" * 9_000, "nested too deeply"),
    ],
)
async def test_a_wrong_argument_is_refused_by_name_and_nothing_is_done(query, body, said):
    async with admin_client() as (client, _):
        reply = await client.post(f"/pause{query}", content=body)
        assert reply.status_code == 400
        assert said in reply.json()["error"]["message"]
        assert (await client.get("/ready")).status_code == 200


async def test_a_server_sleeps_as_deep_as_it_is_told_and_wakes():
    async with admin_client() as (client, engine):
        for query, body in (("?level=2", {}), ("", {"level": 2})):
            said = await client.post(f"/sleep{query}", json={**body, "requests": "refuse"})
            assert said.json() == {"status": "asleep", "level": 2}
            assert engine.asleep == (2, "refuse")
            assert (await client.post("/wake_up")).json() == {"status": "awake"}
            assert engine.asleep is None
        for level in ("0", "3", "deep"):
            said = await client.post(f"/sleep?level={level}")
            assert (said.status_code, said.json()["error"]["param"]) == (400, "level")
            assert engine.asleep is None


class Device(FakeRunner):
    def sleep(self, *, weights: bool) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False


class Gated:
    """The real engine over the fake device; each step waits for a permit."""

    max_model_len = 512

    def __init__(self) -> None:
        self.inner, _ = build(Device, max_model_len=self.max_model_len)
        self.gate = threading.Semaphore(0)
        self.begun = self.let = 0

    def step(self):
        self.begun += 1
        self.gate.acquire()
        return self.inner.step()

    async def let_steps_until(self, condition: Callable[[], bool]) -> None:
        """Lets one step end after the other; what is asked is read between two."""
        while not condition():
            if self.begun > self.let:
                self.let += 1
                self.gate.release()
            await asyncio.sleep(0.001)

    def __getattr__(self, name):
        return getattr(self.inner, name)


async def test_a_sleeping_server_refuses_requests_and_goes_on_with_those_it_has_when_it_wakes():
    engine = Gated()
    call = {"prompt": [1, 2], "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    async with app_over(engine) as client:
        asked = client.post("/v1/completions", json={**call, "return_token_ids": True})
        running = asyncio.create_task(asked)
        await engine.let_steps_until(lambda: engine.let == 3)
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        order = asyncio.create_task(client.post("/sleep"))
        await engine.let_steps_until(order.done)
        assert order.result().json() == {"status": "asleep", "level": 1}
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await client.get("/ready")).json() == {"status": "asleep"}
        for options in ({}, {"stream": True}, {"n": 2}):
            reply = await client.post("/v1/completions", json={**call, **options})
            assert reply.status_code == 503
            assert reply.headers["retry-after"] == "1"
            assert "POST /wake_up" in reply.json()["error"]["message"]
        assert not running.done()
        engine.gate.release(10_000)
        assert (await client.post("/wake_up")).json() == {"status": "awake"}
        ids = (await running).json()["choices"][0]["token_ids"]
        params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
        assert ids == expected([1, 2], params, 512)[0]


async def test_weights_come_from_inside_the_allowed_directory_alone(tmp_path):
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    (allowed / "model").mkdir(parents=True)
    outside.mkdir()
    (allowed / "link").symlink_to(outside)
    async with admin_client(weights_directory=allowed) as (client, engine):
        said = await client.post("/update_weights", json={"path": "model", "version": 7})
        assert said.json() == {"status": "updated", "weight_version": 7}
        assert engine.updated == ("weights of model", "keep")
        said = await client.post(
            "/update_weights", json={"path": str(allowed / "model"), "requests": "abort"}
        )
        assert engine.updated == ("weights of model", "abort")
        paths = ("../outside", str(outside), "link", "/etc", "nowhere", "a\0b", "model/../..")
        for path in paths:
            said = await client.post("/update_weights", json={"path": path})
            assert said.status_code == 400
            assert said.json()["error"]["param"] == "path"
            assert "is no checkpoint under --update-weights-dir" in said.json()["error"]["message"]


async def test_an_update_of_the_weights_is_logged_when_it_begins_and_when_it_is_done(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "params").write_bytes(b"12345")
    lines = []

    def log(event, fields):
        lines.append((event, dict(fields)))

    async with admin_client(weights_directory=tmp_path, log=log) as (client, _):
        await client.post("/update_weights", json={"path": "model", "version": 7})
        begun, done = (line for line in lines if "weights" in line[0])
        assert begun == ("update_weights", {"path": str(tmp_path / "model"), "bytes": 5})
        assert (done[0], done[1]["weight_version"]) == ("weights_updated", 7)
        assert done[1]["seconds"] >= 0


async def test_a_server_without_an_allowed_directory_reads_no_weights():
    async with admin_client() as (client, engine):
        said = await client.post("/update_weights", json={"path": "model"})
        assert said.status_code == 400
        assert "--update-weights-dir" in said.json()["error"]["message"]
        assert engine.updated is None
