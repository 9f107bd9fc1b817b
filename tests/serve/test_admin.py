"""Admin routes exist where they were asked for, and answer the operator alone."""

from __future__ import annotations

import contextlib

import httpx
import pytest

from jaxserve.serve.admin import engine_actions
from jaxserve.serve.app import create_app
from jaxserve.serve.async_engine import AsyncEngine
from tests.serve_fakes import ScriptedEngine, app_parts

NAMES = ("reset_prefix_cache", "pause", "resume", "start_profile", "stop_profile")


class Resettable(ScriptedEngine):
    num_resets = 0

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1


@contextlib.asynccontextmanager
async def admin_client(address: str = "127.0.0.1", **changes):
    engine = Resettable(script=[5])
    bridge = AsyncEngine(engine, max_requests=64)
    actions = engine_actions(bridge, start_profile=lambda: "/tmp/a", stop_profile=lambda: "/tmp/b")
    app = create_app(app_parts(engine, engine=bridge, admin=actions, **changes))
    transport = httpx.ASGITransport(app, client=(address, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
        yield client, engine
    await bridge.shutdown(0.0)


async def test_without_the_switch_there_are_no_admin_routes():
    engine = ScriptedEngine(script=[5])
    bridge = AsyncEngine(engine, max_requests=64)
    transport = httpx.ASGITransport(create_app(app_parts(engine, engine=bridge)))
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
        assert [(await client.post(f"/{name}")).status_code for name in NAMES] == [404] * 5
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
    ],
)
async def test_a_wrong_argument_is_refused_by_name_and_nothing_is_done(query, body, said):
    async with admin_client() as (client, _):
        reply = await client.post(f"/pause{query}", content=body)
        assert reply.status_code == 400
        assert said in reply.json()["error"]["message"]
        assert (await client.get("/ready")).status_code == 200
