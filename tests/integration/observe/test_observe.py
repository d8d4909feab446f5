"""A real job that is watched from outside: metrics during and after a recovery, a trace, and a clean end."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flashrecovery.events import RunFiles
from tests.support.jobs import FSDP, Layout, RunningJob, check_clean

TINY = Path(__file__).parents[2] / "scripts" / "tiny.py"
TWO = Layout("two", "tiny.py", nproc=2)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def scrape(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Sample name -> (labels, value) of each."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(get(f"{url}metrics")):
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix("flashrecovery_"), []).append((sample.labels, sample.value))
    return found


def url_of(job: RunningJob) -> str:
    controller = RunFiles(job.run_dir).controller()
    assert controller is not None and controller["observe"]
    return controller["observe"]


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Something that takes OTLP over HTTP; gives its URL and the bodies it got."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_recovery_seen_from_outside(tmp_path: Path) -> None:
    with collector() as (endpoint, bodies):
        job = RunningJob(
            tmp_path / "run",
            TWO,
            script=TINY,
            flags=["--steps", "5000"],
            standby=0,
            options=["--observe-port", "0"],
            config={"observe": {"otlp_endpoint": endpoint}},
        )
        job.wait_for("job_started")
        url = url_of(job)
        before = scrape(url)
        assert sum(v for _, v in before["state"]) == 1 and "recoveries_total" not in before
        assert len(before["rank_tag"]) == 2 and before["process_cpu_seconds_total"][0][1] > 0

        job.kill(1)
        seen: dict[str, float] = {}
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            now = scrape(url)
            (state,) = [labels["state"] for labels, v in now["state"] if v == 1]
            seen[state] = max(seen.get(state, 0.0), now["recovery_in_progress_seconds"][0][1])
            if "recoveries_total" in now:
                break
            time.sleep(0.02)
        # without a standby, the replacement takes its time: the scrapes have seen it happen
        assert seen.get("replacing", 0.0) > 0, seen
        after = scrape(url)
        assert after["recoveries_total"] == [({"cause": "killed"}, 1.0)]
        assert after["failures_total"] == [({"kind": "killed"}, 1.0)]
        assert after["generation"] == [({}, 1.0)] and after["recovery_in_progress_seconds"] == [({}, 0.0)]
        (event,) = [e for e in job.events() if e["event"] == "recovery_finished"]
        phases = {labels["phase"]: v for labels, v in after["recovery_seconds_sum"]}
        assert phases == pytest.approx(event["phases"])
        assert after["recovery_duration_seconds_sum"][0][1] == pytest.approx(event["total_s"])
        pids = {labels["rank"]: v for labels, v in after["worker_pid"]}
        assert pids == {str(rank): float(pid) for rank, pid in job.ranks().items()}

        (recovery,) = json.loads(get(f"{url}api/history"))["recoveries"]
        assert recovery["victims"] == [1] and recovery["resume_step"] == event["resume_step"]
        status = json.loads(get(f"{url}api/status"))
        assert status["job"]["recovery"] is None and [r["health"] for r in status["job"]["ranks"]] == ["ok", "ok"]
        token = json.loads((job.run_dir / "controller.json").read_text())["token"]
        assert token not in get(url) + json.dumps(status) + get(f"{url}metrics")

        began = time.monotonic()
        job.popen.send_signal(signal.SIGTERM)
        ended = job.wait(10)
        assert time.monotonic() - began < 5.0
    check_clean(ended)
    assert f"page at {url} " in ended.output and ended.output.count("page at") == 1
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(url.split(":")[2].strip("/"))), timeout=1).close()
    sent = b"".join(bodies)
    for text in (b"recovery", b"replace", b"regroup", b"redo", b"flashrecovery.victims", os.fsencode(job.run_dir)):
        assert text in sent


def look_at_costs(url: str) -> None:
    now = scrape(url)
    some_more = max(v for _, v in now["rank_committed_version"]) + 4
    deadline = time.monotonic() + 60
    while min(v for _, v in now["rank_committed_version"]) < some_more:
        assert time.monotonic() < deadline, now
        time.sleep(0.1)
        now = scrape(url)
    ranks = [{"rank": str(r), "node": now["rank_up"][0][0]["node"]} for r in range(FSDP.nproc)]
    for name in ("rank_overhead_seconds", "rank_copy_age_versions", "rank_copy_age_seconds"):
        assert [labels for labels, _ in now[name]] == ranks
    step_s = {labels["rank"]: v for labels, v in now["rank_step_seconds"]}
    overhead_s = {labels["rank"]: v for labels, v in now["rank_overhead_seconds"]}
    assert all(0 < overhead_s[r] < step_s[r] for r in step_s), (overhead_s, step_s)
    assert all(v in (0, 1) for _, v in now["rank_copy_age_versions"]), now["rank_copy_age_versions"]
    longest_s = 1.5 + 2 * max(step_s.values())
    assert all(0 < v < longest_s for _, v in now["rank_copy_age_seconds"]), now["rank_copy_age_seconds"]
    seen = {labels["rank"]: v for labels, v in now["worker_committed_version"]}
    kept = {labels["rank"]: v for labels, v in now["worker_kept_version"]}
    assert all(abs(seen[r] - kept[r]) <= 1 for r in seen), (seen, kept)
    assert all(0 <= v < longest_s for _, v in now["worker_kept_age_seconds"]), now["worker_kept_age_seconds"]
    copies = [r["copy"]["rank"] for r in json.loads(get(f"{url}api/status"))["job"]["ranks"]]
    assert copies == [1, 2, 3, 0]


def test_what_recovery_costs_and_how_old_the_copies_are(tmp_path: Path) -> None:
    flags, options = ["--step-time", "200"], ["--observe-port", "0"]
    job = RunningJob(tmp_path / "run", FSDP, steps=100_000, standby=0, flags=flags, options=options)
    try:
        job.wait_for("job_started")
        look_at_costs(url_of(job))
        job.kill(2)
        job.wait_for("recovery_finished")
        look_at_costs(url_of(job))
    finally:
        job.popen.send_signal(signal.SIGTERM)
        ended = job.wait(10)
    check_clean(ended)


def test_a_port_in_use_is_refused_by_name(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = str(s.getsockname()[1])
        ended = RunningJob(tmp_path / "run", TWO, script=TINY, options=["--observe-port", port]).wait(30)
    assert ended.code == 2 and f"observe.port = {port}" in ended.output, ended.explain()
    assert "Traceback" not in ended.output
    check_clean(ended)
