"""A headless Chromium for tests, driven over WebDriver's HTTP."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1280,900",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, from the standard


class Browser:
    """One window."""

    def __init__(self, driver: httpx.Client, session: str) -> None:
        self._driver = driver
        self._session = session

    def open(self, url: str) -> None:
        self._post("/url", url=url)

    def run(self, script: str) -> Any:
        """What the JavaScript function body returns."""
        return self._post("/execute/sync", script=script, args=[])

    def text(self, selector: str) -> str:
        return self.run(f"return document.querySelector({selector!r}).textContent")

    def type(self, selector: str, text: str) -> None:
        self._post(f"/element/{self._find(selector)}/value", text=text)

    def click(self, selector: str) -> None:
        self._post(f"/element/{self._find(selector)}/click")

    def complaints(self) -> list[str]:
        """What the console has said since it was last asked, errors and warnings."""
        entries = self._post("/se/log", type="browser")
        return [e["message"] for e in entries if e["level"] in ("SEVERE", "WARNING")]

    def _find(self, selector: str) -> str:
        return self._post("/element", using="css selector", value=selector)[_ELEMENT]

    def _post(self, path: str, **body: Any) -> Any:
        reply = self._driver.post(f"/session/{self._session}{path}", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["value"]


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a new profile. Skips, saying what to install, where there is none."""
    driver_path, browser_path = shutil.which("chromedriver"), shutil.which("chromium")
    if driver_path is None or browser_path is None:
        pytest.skip("THE PAGE IS NOT TESTED: no chromium; apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen([driver_path, "--port=0"], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            port = next(
                found[1]
                for line in process.stdout
                if (found := re.search(r"started successfully on port (\d+)", line))
            )
            options = {"binary": browser_path, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as driver:
                reply = driver.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
                session = reply.json()["value"]["sessionId"]
                yield Browser(driver, session)
                driver.delete(f"/session/{session}")
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()
