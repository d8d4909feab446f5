"""What the device plugins' findings mean for the processes of this node."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from flashrecovery.agent.processes.process import WorkerProcess
from flashrecovery.agent.processes.procfs import is_exiting
from flashrecovery.config import RunConfig
from flashrecovery.health.findings import HealthContext, HealthFinding, Severity
from flashrecovery.health.monitor import HealthMonitor
from flashrecovery.health.plugins import AUTO, select
from flashrecovery.kinds import FailureKind, NoticeKind

Report = Callable[[WorkerProcess, FailureKind, str, float], None]
OnNotice = Callable[[int, NoticeKind, str], None]


class NodeHealth:
    """Runs the plugins. ``report`` takes a failed process, kind, evidence, seconds; ``notice`` a rank, kind, text.

    Attributes:
        suspect: the newest finding that marks this node, to be replaced at the next failure: a warning, or a device
            that has failed under a worker. None: there was none. A new controller receives it.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        processes: Callable[[], Iterable[WorkerProcess]],
        report: Report,
        notice: OnNotice,
    ) -> None:
        self.suspect: HealthFinding | None = None
        self._processes = processes
        self._report = report
        self._notice = notice
        self._monitor = HealthMonitor(
            select(config.health),
            HealthContext(run_dir, config.slots or config.nproc_per_node, os.environ),
            config.timeouts,
            self._on_finding,
            self._on_trouble,
            say_declined=config.health != AUTO,
        )
        self.start, self.close = self._monitor.start, self._monitor.close

    def _on_finding(self, finding: HealthFinding) -> None:
        """Fatal: the workers of the device are killed, and their ranks recovered, before they notice by themselves."""
        of_device = [p for p in self._processes() if finding.device in (None, p.local_rank)]
        # A process that has not trained yet is not hit: the news may be of its predecessor's end on the same device.
        hit = [p for p in of_device if p.resumed and not p.dead and not is_exiting(p.pid)]
        if finding.severity is Severity.WARNING or hit:
            self.suspect = finding
        if finding.severity is Severity.FATAL and hit:
            for process in hit:
                process.expect_death()
                process.kill()
            for process in hit:
                self._report(process, FailureKind.DEVICE, str(finding), 0.0)
            return
        rank = of_device[0].place if of_device else -1
        self._notice(rank, NoticeKind(f"health_{finding.severity.value}"), str(finding))

    def _on_trouble(self, text: str) -> None:
        self._notice(-1, NoticeKind.HEALTH_PLUGIN, text)
