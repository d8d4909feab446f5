"""The controller watches the ranks' progress: hangs are found here, slow ranks reported."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashrecovery import events as ev
from flashrecovery.controller.job_state import AGENT, JobState
from flashrecovery.controller.lookout import Lookout
from flashrecovery.controller.records import Place
from flashrecovery.controller.standstill import Kind, Verdict
from flashrecovery.controller.states import State
from flashrecovery.controller.stragglers import Stragglers
from flashrecovery.proto import flashrecovery_pb2 as pb


@dataclass
class Watching(JobState):
    """What follows from the ranks' progress, or the lack of it."""

    _lookout: Lookout = field(init=False)
    stragglers: Stragglers = field(default_factory=Stragglers)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lookout = Lookout(self.config.timeouts)

    def on_standstill(self, node: str, message: pb.Standstill) -> None:
        """An agent says where its workers stand."""
        self._lookout.answered(node, message)

    def _find_hung(self, now: float) -> Verdict | None:
        """Who or what hangs. Asks the agents if ranks stand still."""
        if self.state is not State.RUNNING:
            self._lookout.forget()
            return None
        ranks = self.ranks.values()
        if self._lookout.due(ranks, now):
            nodes = {r.home for r in ranks if r.place is Place.RUNNING}
            number = self._lookout.begin(nodes, now)
            for node in sorted(nodes):
                look = pb.Look(number=number, answer_s=self._lookout.answer_s)
                self.outbox.send(node, pb.Command(generation=self.generation, rank=AGENT, look=look))
        found = self._lookout.verdict(ranks, now)
        if found is not None and found.kind is not Kind.CULPRITS:
            kind = "deadlock" if found.kind is Kind.DEADLOCK else "standstill"
            self._emit(ev.Notice(generation=self.generation, kind=kind, text=found.text))
        return found

    def _report_stragglers(self, now: float) -> None:
        if self.state is not State.RUNNING:
            self.stragglers.forget()
            return
        if not self.stragglers.due(now):
            return
        running = [r for r in self.ranks.values() if r.place is Place.RUNNING]
        for rank, text in self.stragglers.check(running, now):
            self._emit(ev.Notice(generation=self.generation, rank=rank, kind="straggler", text=text))
