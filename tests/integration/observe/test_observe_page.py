"""The page of a real job in a headless Chromium, with screenshots.

Needs the extra ``browser``, and a Chromium: playwright's own (``playwright install chromium``), or the one that
``FLASHRECOVERY_CHROMIUM`` names.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flashrecovery.observe.server import serve
from tests.integration.observe.test_observe import TINY, url_of
from tests.support.jobs import Layout, RunningJob, check_clean
from tests.support.observe_samples import NASTY, big_job, job

CHROMIUM_ENV = "FLASHRECOVERY_CHROMIUM"
FOUR = Layout("four", "tiny.py", nproc=4)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'flashrecovery[browser]'")
    with api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = os.environ.get(CHROMIUM_ENV) or (own if os.path.exists(own) else shutil.which("chromium"))
        if path is None:
            pytest.skip(f"needs a Chromium: `playwright install chromium`, or its path in {CHROMIUM_ENV}")
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


@pytest.fixture(params=["light", "dark"])
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page whose errors fail the test; ``page.scheme`` is its colour scheme."""
    context = browser.new_context(color_scheme=request.param, viewport={"width": 1280, "height": 800})
    found = context.new_page()
    found.scheme = request.param
    errors: list[str] = []
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    found.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
    yield found
    context.close()
    assert not errors


def within(seconds: float, condition: Callable[[], bool]) -> None:
    """Until it holds. (The page's own policy forbids what playwright's wait_for_function does.)"""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def expect(locator: Any, count: int) -> None:
    within(20, lambda: locator.count() == count)


@contextmanager
def serving(**sources: Any) -> Iterator[str]:
    """The page with given facts, on an event loop in a separate thread (playwright has taken this one's)."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(serve("127.0.0.1", 0, **sources), loop).result(10)
    try:
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_the_page_of_a_real_job(browser: Any, tmp_path: Path) -> None:
    running = RunningJob(
        tmp_path / "run",
        FOUR,
        script=TINY,
        flags=["--steps", "100000"],
        standby=1,
        options=["--observe-port", "0"],
    )
    running.wait_for("standby_ready")
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url_of(running))
    expect(page.locator(".cell.ok"), 4)
    assert page.locator(".node").count() == 1 and page.locator("#state").inner_text() == "running"
    before = page.locator(".cell b").first.inner_text()
    live = page.locator(".cell b").first
    within(10, lambda: live.inner_text() != before)
    assert page.locator("#table tbody tr").count() == 0
    page.screenshot(path=tmp_path / "running.png")

    running.kill(1)
    page.wait_for_selector("#table tbody tr", timeout=60_000)
    expect(page.locator(".cell.ok"), 4)
    row = page.locator("#table tbody tr").first
    assert "1 (killed)" in row.inner_text() and "step" in row.inner_text()
    assert row.locator(".bar i").count() >= 6
    assert page.locator("#phases span").count() >= 6
    page.locator(".cell").nth(1).hover()
    assert "rank 1" in page.locator("#tip").inner_text() and "generation 1" in page.locator("#tip").inner_text()
    page.screenshot(path=tmp_path / "recovered.png", full_page=True)

    running.popen.send_signal(signal.SIGTERM)
    check_clean(running.wait(10))
    page.wait_for_selector("#link.down")
    page.screenshot(path=tmp_path / "gone.png")
    context.close()
    assert not errors


def test_a_recovery_in_progress_and_text_that_would_be_html(page: Any, tmp_path: Path) -> None:
    with serving(controller=job) as url:
        page.goto(url)
        page.wait_for_selector("#recovery:not([hidden])")
        assert "rank 3 (killed), replace" in page.locator("#recovery p").inner_text()
        assert page.locator("#recovery .bar i").count() == 3
        assert page.locator("#failed p").text_content() == NASTY and page.locator("img").count() == 0
        assert [page.locator(f".cell.{h}").count() for h in ("ok", "slow", "moving", "down")] == [1, 1, 1, 1]
        assert page.locator(".node.down").count() == 1  # its agent is silent
        page.screenshot(path=tmp_path / f"recovering-{page.scheme}.png", full_page=True)


@pytest.mark.parametrize("ranks", [256, 4096])
def test_thousands_of_ranks(page: Any, ranks: int, tmp_path: Path) -> None:
    facts = big_job(ranks)
    with serving(controller=lambda: facts) as url:
        page.goto(url)
        expect(page.locator(".cell"), ranks)
        assert page.locator(".node").count() == ranks // 8
        assert page.locator("#health .down b").inner_text() == "1"
        page.locator(".cell.down").hover()
        assert "rank 40 · empty" in page.locator("#tip").inner_text()
        page.screenshot(path=tmp_path / f"ranks-{ranks}-{page.scheme}.png")
