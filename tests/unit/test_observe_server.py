"""The HTTP server with given facts: what it answers, what it refuses, and that it closes."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from flashrecovery.config import ObserveSettings
from flashrecovery.controller.state.history import HistoryEntry
from flashrecovery.errors import ConfigError
from flashrecovery.observe import Observer
from flashrecovery.observe.course import Course
from flashrecovery.observe.picture import pictures
from flashrecovery.observe.server import ObserveServer, serve, url_of
from flashrecovery.observe.sources import recovery_facts
from flashrecovery.observe.views import health_of, history_view, status_view
from flashrecovery.plan.transitions import State
from flashrecovery.rpc.token import is_loopback
from tests.support.observe_samples import NASTY, job, lived, node


def with_server(use: Callable[[str, aiohttp.ClientSession], Awaitable[None]], **sources: Any) -> None:
    async def main() -> None:
        server = await serve("127.0.0.1", 0, **(sources or {"controller": job, "agent": node}))
        try:
            async with aiohttp.ClientSession() as session:
                await use(server.url, session)
        finally:
            await server.close()

    asyncio.run(main())


def test_status_and_history() -> None:
    async def use(url: str, session: aiohttp.ClientSession) -> None:
        async with session.get(url + "api/status") as answer:
            assert answer.status == 200 and answer.content_type == "application/json"
            assert answer.headers["Cache-Control"] == "no-store"
            status = await answer.json()
        assert status == json.loads(json.dumps(status_view(job(), node())))
        async with session.get(url + "api/history") as answer:
            history = await answer.json()
        assert [r["generation"] for r in history["recoveries"]] == [2, 1]

    with_server(use)


def test_the_course_of_the_job_as_json_and_as_a_picture() -> None:
    course = lived().course(70.0)

    async def use(url: str, session: aiohttp.ClientSession) -> None:
        async with session.get(url + "api/course") as answer:
            assert answer.content_type == "application/json"
            assert Course.model_validate_json(await answer.text()) == course
        async with session.get(url + "api/picture") as answer:
            assert answer.content_type == "text/html"
            text = await answer.text()
        assert text == pictures(course) and "style=" not in text  # the page's policy forbids these
        async with session.get(url) as answer:
            page = await answer.text()
        assert "{{" not in page and "svg.course" in page

    with_server(use, controller=job, course=lambda: course)


def test_without_a_controller_there_is_no_course() -> None:
    async def use(url: str, session: aiohttp.ClientSession) -> None:
        async with session.get(url + "api/course") as answer:
            assert Course.model_validate_json(await answer.text()) == Course()
        async with session.get(url + "api/picture") as answer:
            assert "<svg" not in await answer.text()

    with_server(use, agent=node)


def test_metrics_are_served() -> None:
    async def use(url: str, session: aiohttp.ClientSession) -> None:
        async with session.get(url + "metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            assert "flashrecovery_generation 3.0" in await answer.text()

    with_server(use)


def test_the_page_needs_nothing_from_elsewhere_and_runs_only_its_own_script() -> None:
    async def use(url: str, session: aiohttp.ClientSession) -> None:
        async with session.get(url) as answer:
            policy = answer.headers["Content-Security-Policy"]
            text = await answer.text()
        assert "default-src 'none'" in policy and "unsafe" not in policy
        nonce = policy.split("'nonce-")[1].split("'")[0]
        assert text.count(f'nonce="{nonce}"') == 2 and "{{" not in text
        assert "http://" not in text and "https://" not in text and "innerHTML" not in text
        async with session.get(url) as again:
            assert nonce not in again.headers["Content-Security-Policy"]

    with_server(use)


def test_nothing_can_be_changed() -> None:
    async def use(url: str, session: aiohttp.ClientSession) -> None:
        for path in ("", "metrics", "api/status", "api/history"):
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                async with session.request(method, url + path) as answer:
                    assert answer.status == 405, (method, path)
        async with session.get(url + "api/inject") as answer:
            assert answer.status == 404

    with_server(use)


def test_a_process_with_an_agent_only() -> None:
    async def use(url: str, session: aiohttp.ClientSession) -> None:
        async with session.get(url + "api/status") as answer:
            status = await answer.json()
        assert status["job"] is None and [w["rank"] for w in status["agent"]["workers"]] == [0, 1]
        async with session.get(url + "api/history") as answer:
            assert await answer.json() == {"recoveries": []}
        async with session.get(url + "metrics") as answer:
            text = await answer.text()
        assert "flashrecovery_worker_tag" in text and "flashrecovery_rank_tag" not in text

    with_server(use, agent=node)


def test_who_asks_at_the_same_time_gets_the_same_answer() -> None:
    looks = 0

    def count() -> Any:
        nonlocal looks
        looks += 1
        return job()

    async def use(url: str, session: aiohttp.ClientSession) -> None:
        async def ask() -> None:
            async with session.get(url + "api/status") as answer:
                await answer.read()

        await asyncio.gather(*(ask() for _ in range(20)))
        assert looks < 5

    with_server(use, controller=count)


def test_what_is_no_http_is_answered_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> bytes:
        server = await serve("127.0.0.1", 0, agent=node)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1].strip("/")))
        writer.write(b"GET / HTTP/1.1\r\nX:\x00\r\n\r\n")
        answer = await reader.read(64)
        writer.close()
        await server.close()
        return answer

    assert asyncio.run(go()).startswith(b"HTTP/1.") and not caplog.records


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(ConfigError, match=f"observe.port = {port}"):
            asyncio.run(serve("127.0.0.1", port))


def test_closed_means_closed() -> None:
    async def main() -> ObserveServer:
        server = await serve("127.0.0.1", 0, agent=node)
        async with aiohttp.ClientSession() as session, session.get(server.url) as answer:
            await answer.read()
            await server.close()  # with the client's connection still open
        await server.close()
        return server

    url = asyncio.run(asyncio.wait_for(main(), 5)).url
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(url.split(":")[2].strip("/"))), timeout=1).close()


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_another_host_is_warned_of(host: str, warned: bool, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        observer = Observer(ObserveSettings(port=0, host=host))
        assert await observer.start()
        await observer.stop()
        await observer.stop()

    asyncio.run(main())
    told = capsys.readouterr().err
    assert told.count("page at http://") == 1 and ("warning" in told and "no token" in told) is warned


def test_a_job_that_is_not_observed_does_not_pay_for_the_imports() -> None:
    heavy = {"aiohttp", "prometheus_client", "opentelemetry"}
    code = f"import sys, flashrecovery.job; sys.exit(bool({heavy} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_off_means_off(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> str:
        observer = Observer(ObserveSettings())
        url = await observer.start()
        await observer.stop()
        return url

    assert asyncio.run(main()) == "" and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("host", "url", "own"),
    [
        ("127.0.0.1", "http://127.0.0.1:5/", True),
        ("localhost", "http://localhost:5/", True),
        ("::1", "http://[::1]:5/", True),
        ("10.0.0.7", "http://10.0.0.7:5/", False),
        ("0.0.0.0", f"http://{socket.gethostname()}:5/", False),
        ("node7", "http://node7:5/", False),
    ],
)
def test_urls_and_loopback(host: str, url: str, own: bool) -> None:
    assert url_of(host, 5) == url and is_loopback(host) is own


# -- the page's JSON --------------------------------------------------------------------------------


def test_what_the_page_draws() -> None:
    shown = status_view(job(), None)["job"]
    assert [r["health"] for r in shown["ranks"]] == ["ok", "slow", "moving", "down"]
    assert [r["node_rank"] for r in shown["ranks"]] == [0, 0, 1, 1]
    assert [n["silent"] for n in shown["nodes"]] == [False, True]
    assert shown["recovery"]["phase"] == "replace" and shown["recovery"]["victims"] == (3,)
    assert (shown["failures"], shown["recoveries"]) == (2, 2)
    assert shown["checkpoint"]["version"] == 30
    assert shown["failure_reason"] == NASTY  # escaped where it is drawn, not here
    newest = history_view(job())["recoveries"][0]
    assert newest["victims"] == (1,) and newest["phases"]["replace"] == 4.0 and newest["failures"][0]["kind"] == "hang"


@pytest.mark.parametrize(
    ("state", "age_s", "step_s", "health"),
    [
        ("running", 0.1, 0.1, "ok"),
        ("running", 11.0, 0.1, "slow"),
        ("running", 11.0, 60.0, "ok"),
        ("stopped", 99.0, 0.1, "moving"),
        ("empty", 0.0, 0.0, "down"),
        ("finished", 99.0, 0.1, "ok"),
    ],
)
def test_health(state: str, age_s: float, step_s: float, health: str) -> None:
    assert health_of(state, age_s, step_s) == health


def test_how_far_a_recovery_has_come() -> None:
    recovery = HistoryEntry(generation=1, failed_at=100.0, detect_s=0.5)
    recovery.add_victim(3, "killed", 2)
    recovery.enter(State.QUIESCING, 100.5)
    recovery.enter(State.REPLACING, 101.0)
    facts = recovery_facts(recovery, State.REPLACING, 103.0)
    assert (facts.generation, facts.victims, facts.cause, facts.seconds) == (2, (3,), "killed", 3.0)
    assert facts.phases == {"detect": 0.5, "quiesce": 0.5} and facts.phase == "replace" and facts.phase_s == 2.0
