"""What the ``observe`` settings ask for of one process, from its start to its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flashrecovery.config import ObserveSettings
from flashrecovery.terminal import say

if TYPE_CHECKING:
    from flashrecovery.agent.agent import Agent
    from flashrecovery.controller.service.service import ControllerService
    from flashrecovery.events import EventLog
    from flashrecovery.observe.otel import RecoveryTracer
    from flashrecovery.observe.recorder import Recorder
    from flashrecovery.observe.server import ObserveServer


class Observer:
    """Server and trace of a process that has a controller (with its ``log`` and ``recorder``), an agent, or both."""

    def __init__(
        self,
        settings: ObserveSettings,
        *,
        service: ControllerService | None = None,
        log: EventLog | None = None,
        recorder: Recorder | None = None,
        agent: Agent | None = None,
        node_rank: int = 0,
        run_dir: str = "",
    ) -> None:
        self._settings = settings
        self._service = service
        self._log = log
        self._agent = agent
        self._node_rank = node_rank
        self._run_dir = run_dir
        self._server: ObserveServer | None = None
        self._tracer: RecoveryTracer | None = None
        self._recorder = recorder

    async def start(self) -> str:
        """Begin; call before the first event. Returns the page's URL, "" if none is served.

        Raises:
            ConfigError: the port is in use, or the library for traces is missing.
        """
        if self._settings.otlp_endpoint is not None and self._log is not None:
            from flashrecovery.observe.otel import RecoveryTracer, otlp_processor

            self._tracer = RecoveryTracer(otlp_processor(self._settings.otlp_endpoint), self._run_dir)
            self._log.subscribe(self._tracer.take)
        if self._recorder is not None and self._log is not None:
            self._log.subscribe(self._recorder.take)
            self._recorder.start()
        if self._settings.port is None:
            return ""
        return await self._serve(self._settings.host, self._settings.port)

    async def _serve(self, host: str, port: int) -> str:
        # here, not at the top: a job that is not observed does not pay for the imports
        from flashrecovery.observe.server import serve
        from flashrecovery.observe.sources import agent_facts, controller_facts
        from flashrecovery.observe.tally import Tally
        from flashrecovery.rpc.token import is_loopback

        tally = Tally()
        if self._log is not None:
            self._log.subscribe(tally.take)
        self._server = await serve(
            host,
            port,
            controller=None if self._service is None else controller_facts(self._service, tally),
            agent=None if self._agent is None else agent_facts(self._agent, self._node_rank),
            course=None if self._recorder is None else self._recorder.course,
        )
        say(f"page at {self._server.url} and metrics at {self._server.url}metrics")
        if not is_loopback(host):
            say(f"warning: observe.host {host}: everyone who reaches this port can read what the job does, no token")
        return self._server.url

    async def stop(self) -> None:
        """Close everything; the last spans get a second. Idempotent."""
        if self._recorder is not None:
            await self._recorder.stop()
        if self._server is not None:
            await self._server.close()
            self._server = None
        if self._tracer is not None:
            tracer, self._tracer = self._tracer, None
            if not await asyncio.to_thread(tracer.close):
                say(f"warning: observe.otlp_endpoint {self._settings.otlp_endpoint}: the last spans were not sent")
