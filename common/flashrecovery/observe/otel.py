"""Exports each recovery's spans to OpenTelemetry. Needs the extra ``otel``.

The exporter sends from its own thread. If the collector does not answer, the spans are lost after the exporter's
retries; the job is not affected.
"""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit

from flashrecovery import events as ev
from flashrecovery.errors import ConfigError
from flashrecovery.observe.incident import Incidents
from flashrecovery.observe.spans import Span, span_of

try:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
except ImportError as e:
    raise ConfigError(
        f"observe.otlp_endpoint is set, but OpenTelemetry is not installed ({e}); pip install 'flashrecovery[otel]'"
    ) from e

_EXPORT_S = 5.0
_CLOSE_S = 1.0
"""The end of a job waits so long for the last spans: Ctrl-C is to end everything within 5 s."""
_NS = 1_000_000_000


def traces_url(endpoint: str) -> str:
    """The full URL for traces; ``endpoint`` may be the collector's base URL, as in OTEL_EXPORTER_OTLP_ENDPOINT."""
    return endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Sends spans to an OTLP collector over HTTP, from a thread."""
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=_EXPORT_S))


class RecoveryTracer:
    """Takes every event; a recovery that is over becomes one trace."""

    def __init__(self, processor: SpanProcessor, run_dir: str) -> None:
        resource = Resource.create(
            {"service.name": "flashrecovery", "host.name": socket.gethostname(), "flashrecovery.run_dir": run_dir}
        )
        # its own provider, not the process-wide one: a program that embeds the controller keeps its provider
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("flashrecovery")
        self._incidents = Incidents()

    def take(self, event: ev.Event) -> None:
        """One event; cheap unless it is the last one of a recovery."""
        found = self._incidents.take(event)
        if found is not None:
            self._record(span_of(found), None)

    def close(self) -> bool:
        """Send what is left, for at most a second. False if that was not enough, and spans may be lost."""
        # shutdown() has no deadline that holds; the thread is a daemon, so it cannot keep the process alive
        sender = threading.Thread(target=self._provider.shutdown, name="flashrecovery-otel-close", daemon=True)
        sender.start()
        sender.join(_CLOSE_S)
        return not sender.is_alive()

    def _record(self, span: Span, parent: trace.Span | None) -> None:
        context = None if parent is None else trace.set_span_in_context(parent)
        recorded = self._tracer.start_span(
            span.name, context=context, attributes=dict(span.attributes), start_time=_ns(span.start_s)
        )
        for moment in span.moments:
            recorded.add_event(moment.name, dict(moment.attributes), _ns(moment.at_s))
        if span.error:
            recorded.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        for child in span.children:
            self._record(child, recorded)
        recorded.end(_ns(span.end_s))


def _ns(seconds: float) -> int:
    return round(seconds * _NS)
