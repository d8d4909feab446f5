"""The controller watches the ranks' progress: hangs are found here, slow ranks reported."""

from __future__ import annotations

from flashrecovery.controller.hang_detector import HangDetector
from flashrecovery.controller.job_state import AGENT, JobState
from flashrecovery.controller.records import Place
from flashrecovery.controller.stragglers import Stragglers
from flashrecovery.kinds import NoticeKind
from flashrecovery.plan.hang import Verdict, VerdictKind
from flashrecovery.plan.node_marks import SLOW
from flashrecovery.plan.transitions import State
from flashrecovery.proto import flashrecovery_pb2 as pb


class HangWatch:
    """What follows from the ranks' progress, or the lack of it."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self.stragglers = Stragglers()
        self._lookout = HangDetector(job.config.timeouts)

    def on_hang_reports(self, node: str, message: pb.HangReports) -> None:
        """An agent says where its workers stand."""
        self._lookout.answered(node, message)

    def data_ended(self, rank: int, text: str) -> None:
        """The data of ``rank`` has ended in its step, in which it has not trained: the others may wait for it."""
        self._lookout.ended[rank] = text

    def end_of_data(self, found: Verdict) -> str:
        """Why the job cannot go on, if ``found`` follows from the end of a rank's data; else ""."""
        if found.kind is not VerdictKind.DEADLOCK or not self._lookout.ended:
            return ""
        return (
            f"{'; '.join(text for _, text in sorted(self._lookout.ended.items()))}, where the others go on with theirs "
            f"({found.text}): give recovery.data() a loader, which begins its next epoch by itself, or have all ranks "
            "agree on the end (all_reduce a flag in the block) and leave the loop in the same step"
        )

    def find_hung(self, now: float) -> Verdict | None:
        """The verdict on ranks that hang, None if there is none now. Asks the agents for reports if ranks stand
        still."""
        if self._job.state is not State.RUNNING:
            self._lookout.forget()
            self._lookout.ended.clear()
            return None
        ranks = self._job.ranks.values()
        if self._lookout.due(ranks, now):
            nodes = {r.home for r in ranks if r.place is Place.RUNNING}
            number = self._lookout.begin(nodes, now)
            for node in sorted(nodes):
                look = pb.Look(number=number, answer_s=self._lookout.answer_s)
                self._job.outbox.send(node, pb.Command(generation=self._job.generation, rank=AGENT, look=look))
        found = self._lookout.verdict(ranks, now)
        if found is not None and found.kind is not VerdictKind.CULPRITS:
            kind = NoticeKind.DEADLOCK if found.kind is VerdictKind.DEADLOCK else NoticeKind.STANDSTILL
            self._job.notice(kind, found.text)
        return found

    def report_stragglers(self, now: float) -> None:
        if self._job.state is not State.RUNNING:
            self.stragglers.forget()
            return
        if not self.stragglers.due(now):
            return
        running = [r for r in self._job.ranks.values() if r.place is Place.RUNNING]
        for rank, text in self.stragglers.check(running, now):
            self._job.notice(NoticeKind.STRAGGLER, text, rank=rank)
            self._job.blame(self._job.ranks[rank].home, SLOW, text)
