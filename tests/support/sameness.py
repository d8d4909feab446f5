"""Whether a job with faults has gone the same way as the same launch without: every step of every rank, and each step
where it must be.

All of it is read from what the ranks have printed and from the event log. :func:`differences` demands

* the same digest of each rank's state at the end;
* of each step of each rank a loss, with the same bits as the reference's (of each step one is a number): *whenever* it
  was printed, so an attempt that became void counts, too. One line may be missing: that of a victim whose peers
  completed the step after its death, or of a survivor that was kept from completing it and was given their state;
* that no process has left a step out or gone back further than one step, unless a checkpoint was gone back to;
* that each recovery resumed at the step of its failure or the next one, its replacements with it;
* that nothing was started from the beginning, but a job that had not ended its first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any


class Printed(Enum):
    """What a script's lines say."""

    STEPS = "on every rank one for each step, numbered as the versions are"
    LOGS = "on every rank now and then one, with its own numbers"
    LAST_RANK = "as LOGS, on one rank only"


@dataclass(frozen=True)
class ProcessLog:
    """What one process printed, in order: pairs of a step and its loss."""

    rank: int
    generation: int
    lines: tuple[tuple[int, str], ...]


@dataclass(kw_only=True)
class Run:
    """What is known of a job that has ended. ``logs``: of each rank in the order in which its processes lived."""

    code: int
    events: list[dict[str, Any]] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    logs: list[ProcessLog] = field(default_factory=list)

    def of(self, name: str) -> list[dict[str, Any]]:
        """The events of one name."""
        return [e for e in self.events if e["event"] == name]

    def notices(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.of("notice") if e["kind"] == kind]

    def gone_on_from_snapshots(self) -> list[int]:
        """The versions from which launches have gone on that found what an earlier one had left in memory."""
        found = (n["text"].partition("goes on from version ") for n in self.notices("snapshots"))
        return [int(rest.split(",")[0]) for _, said, rest in found if said]

    @property
    def losses(self) -> dict[tuple[int, int], str]:
        """By rank and step: the exact loss as it was printed last."""
        return {(log.rank, step): loss for log in self.logs for step, loss in log.lines}

    def by_rank(self) -> dict[int, list[ProcessLog]]:
        found: dict[int, list[ProcessLog]] = {}
        for log in self.logs:
            found.setdefault(log.rank, []).append(log)
        return found


def differences(
    run: Run, reference: Run, printed: Printed = Printed.STEPS, start: int = 0, launches: int = 1
) -> list[str]:
    """In words; nothing: there are none. ``start``: the step with which the launch itself has begun, from a checkpoint.
    ``launches``: how often the whole job was launched."""
    incomplete = list(_incomplete(reference, printed))
    if incomplete:
        return [f"the reference proves nothing: {text}" for text in incomplete]
    found = [] if run.code == 0 else [f"exit code {run.code}"]
    if run.digests != reference.digests:
        found.append(f"the end state differs: {dict(run.digests)}, not {dict(reference.digests)}")
    found += _other_losses(run, reference)
    found += _missing_losses(run, reference, printed, start)
    found += _other_starts(run, launches)
    found += _other_resumes(run)
    if printed is Printed.STEPS:
        for logs in run.by_rank().values():
            found += _other_ways(logs, run, start, launches)
    else:
        found += _from_the_first_line(run, reference)
    return found


def _incomplete(reference: Run, printed: Printed) -> Iterator[str]:
    """Why it cannot be compared with."""
    if reference.code != 0:
        yield f"exit code {reference.code}"
    losses = reference.losses
    if not reference.digests or not losses:
        yield f"{len(reference.digests)} digests and {len(losses)} losses were found"
        return
    # Of a pipeline only the last stage has a loss.
    numbers = {step for (_, step), loss in losses.items() if loss.lstrip("-") not in ("nan", "inf")}
    if none := sorted({step for _, step in losses} - numbers):
        yield f"the losses of steps {none[:5]} are no numbers, and so are whatever they are compared with"
    steps: dict[int, set[int]] = {rank: set() for rank in reference.digests}
    for rank, step in losses:
        steps.setdefault(rank, set()).add(step)
    mute = sorted(rank for rank, of_rank in steps.items() if not of_rank)
    if mute and printed is not Printed.LAST_RANK:
        yield f"ranks {mute} have printed no loss"
    if printed is Printed.STEPS:
        last = max(step for _, step in losses)
        for rank, of_rank in sorted(steps.items()):
            if of_rank != set(range(last + 1)):
                yield f"rank {rank} lacks the losses of steps {sorted(set(range(last + 1)) - of_rank)}"


def _other_losses(run: Run, reference: Run) -> Iterator[str]:
    expected = reference.losses
    if not any(log.lines for log in run.logs):
        yield "no loss was found"
    for log in run.logs:
        for step, loss in log.lines:
            if expected.get((log.rank, step)) != loss:
                yield f"rank {log.rank}, step {step}: loss {loss}, not {expected.get((log.rank, step))}"


def _missing_losses(run: Run, reference: Run, printed: Printed, start: int) -> Iterator[str]:
    wanted = {(rank, step) for rank, step in reference.losses if step >= start}
    missing = wanted - run.losses.keys()
    if printed is Printed.STEPS:
        missing -= _completed_by_peers(run, start)
    else:  # which line a call has cannot be told: one for each recovery of the rank
        spare = Counter(victim for e in run.of("recovery_started") for victim in e["victims"])
        for rank, step in sorted(missing):
            if spare[rank] > 0:
                spare[rank] -= 1
                missing.discard((rank, step))
    if missing:
        yield f"no loss of (rank, step) {sorted(missing)}"


def _completed_by_peers(run: Run, start: int) -> set[tuple[int, int]]:
    """Rank and step of the victims that died in a step before its line, while their peers could complete it, and of the
    survivors that could not and were given their peers' state."""
    found = {(rank, step - 1) for rank, step in _given(run)}
    resumed = {e["generation"]: e["resume_step"] for e in run.of("recovery_finished")}
    for rank, logs in run.by_rank().items():
        talking = [log for log in logs if log.lines]
        # In its last step: its replacement finds all steps done.
        if talking and logs[-1] is not talking[-1] and resumed.get(logs[-1].generation) == talking[-1].lines[-1][0] + 2:
            found.add((rank, resumed[logs[-1].generation] - 1))
        if talking and talking[0].generation > 0 and talking[0].lines[0][0] == start + 1:
            found.add((rank, start))
        for before, after in pairwise(talking):
            if after.generation > before.generation and after.lines[0][0] == before.lines[-1][0] + 2:
                found.add((rank, after.lines[0][0] - 1))
    return found


def _given(run: Run) -> set[tuple[int, int]]:
    """Survivors that were given state, and the step with which they went on."""
    return {(r, e["resume_step"]) for e in run.of("recovery_finished") for r in e.get("survivors_given", ())}


def _other_starts(run: Run, launches: int) -> Iterator[str]:
    started, again = len(run.of("job_started")), run.notices("start_again")
    if not launches <= started <= launches + len(again) and not _taken_over(run):
        yield f"the job was started {started} times, not {launches}"
    for notice in again:
        before = [step for log in run.logs if log.generation <= notice["generation"] for step, _ in log.lines]
        if max(before, default=0) > 1:
            yield f"it was started from the beginning: {notice['text']}"


def _taken_over(run: Run) -> bool:
    """Whether another controller took the job over: what the first one had not written yet is not in the events."""
    return bool(run.notices("taken_over") or run.notices("controller_elected"))


def _other_resumes(run: Run) -> Iterator[str]:
    """Recoveries that resumed at a step which does not follow from their failures."""
    failed: list[int] = []
    latest: float = -1
    fallback: int | None = None
    for event in run.events:
        if event["event"] == "failure_detected":
            failed.append(event["step"])
            # Of a lost node the controller knows where its ranks were up to a second before it fell silent.
            latest = max(latest, float("inf") if event.get("kind") == "node_lost" else event["step"] + 1)
        elif event["event"] == "fallback_started":
            fallback = event["version"]
        elif event["event"] == "recovery_finished":
            step = event["resume_step"]
            if fallback is not None:
                if step != fallback:
                    yield f"resumed at step {step}, although the checkpoint is of {fallback}"
            elif failed and not min(failed) - 1 <= step <= latest:
                # One before, where a rank dies before the copies of what only it holds are complete.
                yield f"resumed at step {step} after failures at {failed}"
            failed, latest, fallback = [], -1, None


def _other_ways(logs: Sequence[ProcessLog], run: Run, start: int, launches: int) -> Iterator[str]:
    """Of one rank, process after process: where it went on from another step than it must."""
    fallbacks = {e["version"] for e in run.of("fallback_started")}
    if launches > 1:
        fallbacks |= {e["version"] for e in run.of("checkpoint_saved")}
    resumed = {e["generation"]: e["resume_step"] for e in run.of("recovery_finished")}
    given = _given(run)
    last: int | None = None
    for log in logs:
        for number, (step, _) in enumerate(log.lines):
            if last is None:
                allowed = {start} if log.generation == 0 else {start, start + 1}
            elif number == 0:
                allowed = {last, last + 1, last + 2} if log.generation > 0 else set()
            else:
                allowed = {last, last + 1}
            if last is not None:
                allowed |= {last - 1} & set(resumed.values())  # copies were not complete
            if last is not None and (log.rank, step) in given:
                allowed |= {last + 2}  # it has not come to the line of the step before
            if step not in allowed | fallbacks:
                yield f"rank {log.rank}, generation {log.generation}: step {step} after {last}"
            last = step
        if log.lines and log.generation > 0 and not _taken_over(run):
            generation = min((g for g in resumed if g >= log.generation), default=log.generation)
            first, resume = log.lines[0][0], resumed.get(generation, log.lines[0][0])
            # A recovery that was cut short after its resume has no end event, and may have taken steps: it is over only
            # when heartbeats have said that every rank has taken one.
            if first != resume and not (generation > log.generation and first < resume):
                yield (
                    f"rank {log.rank}: its replacement of generation {log.generation} has begun with step "
                    f"{log.lines[0][0]}, although its recovery resumed at {resumed[generation]}"
                )
        redone = sum(a[0] == b[0] for a, b in pairwise(log.lines))
        chances = len(run.of("recovery_started")) + len(run.gone_on_from_snapshots())
        if redone > chances:
            yield f"rank {log.rank} has redone {redone} steps in {chances} recoveries and launches"


def _from_the_first_line(run: Run, reference: Run) -> Iterator[str]:
    """Processes that print again what the first one has had behind it."""
    first = {log.rank: log.lines[0][0] for log in reversed(reference.logs) if log.lines}
    for logs in run.by_rank().values():
        talking = [log for log in logs if log.lines]
        for before, after in pairwise(talking):
            if len(before.lines) > 1 and after.lines[0][0] == first[after.rank]:
                yield f"rank {after.rank}, generation {after.generation}: began with the first line again"
