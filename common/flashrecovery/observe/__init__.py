"""Observability of a job: metrics for Prometheus, a web page with its JSON, and a trace of each recovery.

::

    facts.py       what there is to show, as plain frozen data, and the types of the functions that give it
    tally.py       counts, phases and the latest recoveries, from the events as they are written
    sources.py     facts from a live controller, and from a live agent
    metrics.py     facts -> Prometheus metrics
    views.py       facts -> the JSON that the page shows
    server.py      the HTTP server: /metrics, /api/status, /api/history, /
    spans.py       events -> spans, pure;  otel.py hands them to OpenTelemetry
    observer.py    puts together what the settings ask for

Nothing here can change the job: facts are read on request only, on the event loop of the controller or agent. With the
settings off, only this file and ``observer.py`` are imported.
"""

from flashrecovery.observe.observer import Observer

__all__ = ["Observer"]
