"""The HTTP server: ``/metrics`` for Prometheus; ``/api/status``, ``/api/history`` and ``/api/course`` as JSON, the last
one also as pictures; and the page at ``/``.

It runs on the event loop of the controller or agent. The loop only reads the facts, which takes a few microseconds a
rank; another thread formats them, so that requests do not delay a recovery in a job of thousands of ranks. Only GET is
answered, and no request changes anything.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable
from importlib import resources
from typing import Any, Generic, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from flashrecovery.errors import ConfigError
from flashrecovery.observe import metrics, views
from flashrecovery.observe.course import Course
from flashrecovery.observe.facts import AgentFacts, ControllerFacts, JobFacts, NodeWorkers
from flashrecovery.observe.picture import pictures, style

_SHARED_S = 0.25
"""Pages that ask within this time of each other get the same answer; the facts are no fresher, either."""
_SHARED_COURSE_S = 2.0
"""The same for the course of the job, which is longer, and changes more slowly."""
_CLOSE_S = 0.5
"""An answer that is on its way at the end may be finished for so long."""

T = TypeVar("T")
log = logging.getLogger("flashrecovery.observe")


def _is_of_the_server(record: logging.LogRecord) -> bool:
    """Whether a log record is worth showing. A client that does not speak HTTP (a port scan) gets an answer, and is not
    worth a message to the operator."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


log.addFilter(_is_of_the_server)


class ObserveServer:
    """A listening server. ``url`` ends in a slash."""

    def __init__(self, runner: web.AppRunner, url: str) -> None:
        self._runner = runner
        self.url = url

    async def close(self) -> None:
        """Stop listening and close every connection. Idempotent."""
        await self._runner.cleanup()


async def serve(
    host: str,
    port: int,
    *,
    controller: ControllerFacts | None = None,
    agent: AgentFacts | None = None,
    course: Callable[[], Course] | None = None,
) -> ObserveServer:
    """Listen on ``host:port`` (0: any free port) and show what the sources given say. ``course`` is called on the event
    loop, too.

    Raises:
        ConfigError: the address cannot be bound.
    """
    app = web.Application()
    routes = _Routes(controller, agent, course)
    app.router.add_get("/", routes.page)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_get("/api/status", routes.status)
    app.router.add_get("/api/history", routes.history)
    app.router.add_get("/api/course", routes.course)
    app.router.add_get("/api/picture", routes.picture)
    app.on_response_prepare.append(_add_headers)
    runner = web.AppRunner(app, access_log=None, logger=log, handle_signals=False, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as e:
        await runner.cleanup()
        raise ConfigError(
            f"observe.host = {host!r}, observe.port = {port}: cannot listen there: {e.strerror or e}; "
            "allowed: an address of this machine and a free port, or 0 for any"
        ) from e
    return ObserveServer(runner, url_of(host, runner.addresses[0][1]))


def url_of(host: str, port: int) -> str:
    """Where a browser finds what listens on ``host:port``; all addresses: under this machine's name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}/"
    if address.is_unspecified:
        return f"http://{socket.gethostname()}:{port}/"
    return f"http://[{host}]:{port}/" if address.version == 6 else f"http://{host}:{port}/"


class _Routes:
    def __init__(
        self, controller: ControllerFacts | None, agent: AgentFacts | None, course: Callable[[], Course] | None
    ) -> None:
        self._controller = controller
        self._agent = agent
        self._page = resources.files("flashrecovery.observe").joinpath("templates/page.html").read_text("utf-8")
        self.status = _Shared(self._look, lambda seen: _json(views.status_view(*seen))).answer
        self.history = _Shared(self._look, lambda seen: _json(views.history_view(seen[0]))).answer
        look = course or Course
        self.course = _Shared(look, lambda seen: seen.model_dump_json(), _SHARED_COURSE_S).answer
        self.picture = _Shared(look, pictures, _SHARED_COURSE_S, "text/html").answer

    def _look(self) -> tuple[JobFacts | None, NodeWorkers | None]:
        job = None if self._controller is None else self._controller()
        return job, None if self._agent is None else self._agent()

    async def page(self, request: web.Request) -> web.Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        text = self._page.replace("{{ nonce }}", nonce).replace("{{ picture style }}", style())
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": policy})

    async def metrics(self, request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")
        body, content_type = await asyncio.to_thread(metrics.exposition, accept, *self._look())
        response = web.Response(body=body, headers={"Content-Type": content_type})
        response.enable_compression()
        return response


class _Shared(Generic[T]):
    """One answer for all requests at about the same time. ``look`` runs on the event loop, ``view`` in a thread."""

    def __init__(
        self,
        look: Callable[[], T],
        view: Callable[[T], str],
        shared_s: float = _SHARED_S,
        content_type: str = "application/json",
    ) -> None:
        self._look = look
        self._view = view
        self._shared_s = shared_s
        self._content_type = content_type
        self._lock = asyncio.Lock()
        self._text = ""
        self._until = 0.0

    async def answer(self, request: web.Request) -> web.Response:
        async with self._lock:
            if time.monotonic() >= self._until:
                self._text = await asyncio.to_thread(self._view, self._look())
                self._until = time.monotonic() + self._shared_s
        response = web.Response(text=self._text, content_type=self._content_type)
        response.enable_compression()
        return response


def _json(view: dict[str, Any]) -> str:
    return json.dumps(view, separators=(",", ":"))


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
