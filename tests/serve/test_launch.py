"""A server process comes up, answers, and ends the way its signals and its engine say."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from jaxserve.errors import BootError
from jaxserve.serve import launch
from jaxserve.serve.launch import bind
from tests.serve_fakes import wait_until

MAIN = Path(__file__).parents[1] / "serve_launch_main.py"


class Process:
    """A server process, its URL and what it has printed."""

    def __init__(self, mode: str, pace_s: float, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(MAIN), mode, str(pace_s), "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ())),
            threading.Thread(target=lambda: self.errors.extend(self.process.stderr or ())),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def url(self) -> str:
        wait_until(lambda: bool(self.lines) or self.process.poll() is not None, 60)
        found = re.search(r"listening on (\S+),", self.lines[0])
        assert found, self.lines
        return found[1]

    def until_ready(self) -> str:
        wait_until(lambda: httpx.get(f"{self.url}/ready").status_code == 200)
        return self.url

    def end(self) -> int:
        code = self.process.wait(timeout=30)
        for reader in self._readers:
            reader.join()
        return code


@contextlib.contextmanager
def running(mode: str, pace_s: float = 0.0, *flags: str):
    process = Process(mode, pace_s, *flags)
    try:
        yield process
    finally:
        process.process.kill()
        process.end()
        for pipe in (process.process.stdout, process.process.stderr):
            assert pipe is not None
            pipe.close()


def stream(url: str, max_tokens: int) -> list[str]:
    """Starts a stream; the list grows line by line in the background and ends with `closed`."""
    lines: list[str] = []

    def read() -> None:
        body = {"prompt": "fox", "max_tokens": max_tokens, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
            for line in reply.iter_lines():
                lines.append(line)
        lines.append("closed")

    threading.Thread(target=read, daemon=True).start()
    wait_until(lambda: len(lines) > 2)
    return lines


def test_sigterm_when_idle_ends_the_process_with_0():
    with running("fine") as process:
        url = process.until_ready()
        assert httpx.get(f"{url}/health").json()["status"] == "alive"
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == 0
        assert process.lines == [
            f"listening on {url}, starting\n",
            "loading nothing\n",
            f"ready: {url}/v1\n",
            "stopping\n",
        ]
        assert process.errors == []


def test_sigterm_refuses_new_requests_and_lets_running_ones_finish():
    with running("fine", 0.02) as process:
        url = process.until_ready()
        lines = stream(url, 100)
        process.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert process.end() == 0
        wait_until(lambda: lines[-1] == "closed")
        assert sum('"finish_reason":null' in line for line in lines) == 100
        assert '"finish_reason":"length"' in lines[-5]
        assert "data: [DONE]" in lines[-4:]


def test_sigterm_under_load_drains_every_stream_and_call():
    with running("fine", 0.02) as process:
        url = process.until_ready()
        streams = [stream(url, 100) for _ in range(8)]
        unary: list[httpx.Response] = []
        body = {"prompt": "fox", "max_tokens": 100}
        call = threading.Thread(
            target=lambda: unary.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
        )
        call.start()
        wait_until(lambda: "num_requests_running" in httpx.get(f"{url}/metrics").text)
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == 0
        call.join()
        for lines in streams:
            wait_until(lambda lines=lines: lines[-1] == "closed")
            assert sum('"finish_reason":null' in line for line in lines) == 100
            assert "data: [DONE]" in lines
        assert unary[0].status_code in (200, 503)  # 503: it came after the signal


@pytest.mark.parametrize("flags", [("--shutdown-grace", "0.2"), ()])
def test_the_graces_end_or_a_second_signal_aborts_what_runs(flags):
    with running("fine", 0.02, *flags) as process:
        url = process.until_ready()
        lines = stream(url, 10**6)
        process.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in process.lines[-1])
        grace = flags[1] if flags else "30"
        assert process.lines[-1] == (
            f"stopping: 1 request running or waiting, up to {grace} s to finish; "
            "a second signal aborts\n"
        )
        if not flags:
            wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
            process.process.send_signal(signal.SIGINT)
        assert process.end() == 0
        wait_until(lambda: lines[-1] == "closed")
        assert any("service_unavailable_error" in line for line in lines)


def test_an_engine_that_dies_ends_the_process_with_1_and_its_clients_are_told():
    with running("die") as process:
        url = process.until_ready()
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert reply.status_code == 500
        assert process.end() == 1
        assert "the device fell off the bus" in "".join(process.errors)


def test_an_engine_that_dies_under_load_tells_every_stream_and_call():
    with running("die-late", 0.02) as process:
        url = process.until_ready()
        streams = [stream(url, 10**6) for _ in range(3)]
        body = {"prompt": "fox", "max_tokens": 10**6}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
        for lines in streams:
            wait_until(lambda lines=lines: lines[-1] == "closed")
            assert sum('"server_error"' in line for line in lines) == 1
            assert "data: [DONE]" in lines
        assert process.end() == 1


@pytest.mark.parametrize("form", ["text", "json"])
def test_requests_are_logged_on_stderr_one_line_each_in_the_form_asked_for(form):
    with running("fine", 0.0, "--log-format", form, "--api-key", "sk-secret") as process:
        wait_until(lambda: bool(process.lines))
        found = re.search(r"http://[0-9.:]+", process.lines[0])
        assert found
        url = found[0]
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200)
        headers = {"Authorization": "Bearer sk-secret", "X-Request-Id": "abc-1"}
        body = {"prompt": "my words", "max_tokens": 3}
        httpx.post(f"{url}/v1/completions", json=body, headers=headers)
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == 0
    [line] = process.errors
    if form == "json":
        record = json.loads(line)
        assert (record["event"], record["request_id"], record["output_tokens"]) == (
            "request",
            "abc-1",
            3,
        )
        assert [json.loads(said)["event"] for said in process.lines] == ["server"] * 4
    else:
        assert " request method=POST path=/v1/completions status=200 request_id=abc-1 " in line
        assert " output_tokens=3 " in line
    assert "secret" not in line
    assert "words" not in line


def test_a_boot_that_is_refused_is_one_line_and_exit_1():
    with running("no-boot") as process:
        assert process.end() == 1
        assert process.errors == ["serve.py: no such model: nothing\n"]


def test_the_http_servers_own_lines_are_shown_when_debugging():
    with running("no-boot", 0.0, "--log-level", "debug") as process:
        assert process.end() == 1
        assert any("server process" in line for line in process.errors)


def test_the_port_answers_while_the_engine_is_built_and_a_signal_ends_the_wait():
    with running("slow-boot") as process:
        url = process.url
        wait_until(lambda: "loading" in httpx.get(f"{url}/health").text)
        ready = httpx.get(f"{url}/ready")
        assert (ready.status_code, ready.json()["phase"]) == (503, "loading nothing")
        early = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert early.status_code == 503
        assert "starting" in early.json()["error"]["message"]
        assert "retry-after" in early.headers
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == 0


def test_a_port_in_use_is_refused_with_its_number_and_flag():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BootError, match=f"port {port}.*--port"):
            bind("127.0.0.1", port)


def test_a_host_of_another_machine_is_refused_with_its_flag_and_not_the_port():
    with pytest.raises(BootError, match=r"^--host 192\.0\.2\.1: ") as refused:
        bind("192.0.2.1", 0)  # an address reserved for documentation
    assert "--port" not in str(refused.value)


async def test_an_idle_connection_is_the_clients_to_close(monkeypatch):
    """Whoever closes later never sends a request down a connection that is being closed."""

    class Seen(Exception):
        pass

    def config(app, **options):
        raise Seen(options["timeout_keep_alive"])

    monkeypatch.setattr(launch.uvicorn, "Config", config)
    with contextlib.closing(bind("127.0.0.1", 0)) as listener, pytest.raises(Seen) as seen:
        await launch.run_server(
            listener,
            lambda *hooks: pytest.fail("built too early"),
            grace_s=0,
            log_level="info",
            on_ready=lambda: None,
            on_phase=lambda phase: None,
        )
    assert seen.value.args[0] > 2 * httpx.Limits().keepalive_expiry


def test_an_unknown_host_is_refused_with_its_flag():
    with pytest.raises(BootError, match="--host"):
        bind("no.such.host.invalid", 80)
