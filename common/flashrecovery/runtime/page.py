"""The shared-memory page of one worker: step tag, progress, lifeline, rank-local state, set-up log, notes of files.

The agent makes the page (a memfd: it has no name, so nothing can be left behind) and the worker inherits it. Steady
state costs a few aligned 8-byte stores per step; no system call, no lock, nothing on the wire. After the worker's
death the agent still has the page, and with it the dead rank's rank-local state: the rank-only state that no peer
holds.

Three rank-local states are kept. A rank in the backward pass of step i has published version i+1, while a slower rank
may still be waiting for the last gradients of step i-1: whichever rank dies, the others may need version i-1, i or i+1
of it.

There is one slot more than that (:mod:`flashrecovery.runtime.local_state_slots`), so that a version is written beside
those that are kept: a worker killed meanwhile leaves the old content or the new one.

Rank-local state is *early* from the end of the forward pass of step i, when it says what version i+1 will be unless the
step draws or changes something later, to the moment when step i+1 is yielded, when it is final. Its last bytes
(:mod:`flashrecovery.state.witness`) are known only then; they are kept beside it.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from flashrecovery.plan.hang import Work
from flashrecovery.plan.quiet_abort import Communicators
from flashrecovery.plan.words import step_text
from flashrecovery.runtime import temp_dir
from flashrecovery.runtime.lifeline import Lifeline
from flashrecovery.runtime.local_state_slots import SLOTS, WORDS, LocalStateSlots, slot_bytes
from flashrecovery.state import witness
from flashrecovery.util.clock import lease_clock_ns

MAGIC = 0x46525047_0000000A
TAG_NONE = -2
"""Tag of a worker that has not begun a step."""
TAG_MUTATING = -1

LOCAL_STATE_LIMIT = 1 << 30
"""Most bytes of one version that a page has room for; the setting ``rank_local_state_mib`` may allow less."""
SETUP_LIMIT = 40 << 20
FILE_NOTES_LIMIT = 4 << 20
_HEADER = 4096
_COPIED_AT_ONCE = 4 << 20

# Indices of the header's 8-byte words; the lifeline lies behind them.
_MAGIC, _TAG, _PROGRESS, _TIME_NS, _COMMITTED, _STEP_NS, _GENERATION, _OWN_NS, _OWN_LEAST_NS = range(9)
_OVERHEAD_NS, _KEPT, _KEPT_NS, _LEASE_NS, _TOKENS, _ENTERED = range(9, 15)
_LIMIT = 15
_SLOT_WORDS = 16
_COUNTED = 4
_COUNTED_WORDS = 64  # pairs: 1 + a step, and 1 + the iteration that it belongs to
_SETUP_WORDS = _SLOT_WORDS + WORDS * SLOTS  # length + 1 (0: none), digest
TERMINATIONS_WORD = _SETUP_WORDS + 2
"""Counts the SIGTERMs which have been noted in place of ending the process."""
_NOTES = TERMINATIONS_WORD + 1
_LEAVING, _ASKS_LEAVING = _NOTES + 1, _NOTES + 2
_SHOWN = _ASKS_LEAVING + 1
_GROWN = _SHOWN + 1
_COMMUNICATORS, _MAY_ABORT = _GROWN + 1, _GROWN + 2
_FILE_NOTES = 80  # how often they were written; then, of each of two places, length + 1 (0: none) and digest
_TEMP_DIR = 85
_WORK, _COMPILES = 86, 87
_WRITES_BITS = 24  # of that word; a step that writes more often is noted once it is through


@dataclass(frozen=True)
class Health:
    """One look at a worker's page. ``committed`` is -1 before the first commit of the process, and belongs to
    ``generation``; times in seconds. ``own_s``: the rank's own work in a step, and the least of its last steps (0: not
    known yet). ``overhead_s``: what recovery takes of a step (0: not known yet). ``kept``: the newest version of which
    this rank keeps a whole copy for another one (-1: none), since ``kept_at``. ``entered``: the newest step whose block
    it has entered in this generation (-1: none). ``work``: what it does."""

    tag: int
    progress: int
    progress_at: float
    committed: int
    step_s: float
    generation: int
    own_s: float = 0.0
    own_least_s: float = 0.0
    overhead_s: float = 0.0
    kept: int = -1
    kept_at: float = 0.0
    entered: int = -1
    work: Work = Work.STEP


class Page:
    """A mapped page. The worker writes, the agent reads (but for the lease); both sides use this class."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._memory = memoryview(self._map)
        self._words = self._memory[:_HEADER].cast("q")
        if self._words[_MAGIC] != MAGIC:
            raise ValueError("not a FlashRecovery page (other version?)")
        each = slot_bytes(self.local_state_limit)
        self._setup = _HEADER + SLOTS * each
        self._file_notes = self._setup + SETUP_LIMIT
        slots = [self._memory[_HEADER + i * each :][:each] for i in range(SLOTS)]
        self._slots = LocalStateSlots(self._words[_SLOT_WORDS : _SLOT_WORDS + SLOTS * WORDS], slots)

    @staticmethod
    def create(name: str, local_state_limit: int = LOCAL_STATE_LIMIT) -> Page:
        """A new empty page, on an inheritable file descriptor. It is sparse: only what is written takes memory.
        ``local_state_limit``: most bytes of one version of the rank-local state."""
        fd = os.memfd_create(f"flashrecovery-{name}", 0)
        os.ftruncate(fd, _HEADER + SLOTS * slot_bytes(local_state_limit) + SETUP_LIMIT + 2 * FILE_NOTES_LIMIT)
        number = (_TEMP_DIR, int.from_bytes(os.urandom(4), "little"))
        words = ((_MAGIC, MAGIC), (_TAG, TAG_NONE), (_COMMITTED, -1), (_LIMIT, local_state_limit), number)
        for index, value in words:
            os.pwrite(fd, value.to_bytes(8, "little", signed=True), index * 8)
        lifeline = Lifeline(fd)
        lifeline.make()
        lifeline.close()
        return Page(fd)

    @property
    def closed(self) -> bool:
        return self._map.closed

    def close(self) -> None:
        self._slots.close()
        self._words.release()
        self._memory.release()
        self._map.close()
        os.close(self.fd)

    # -- step tag ---------------------------------------------------------------------------------

    def set_tag(self, tag: int) -> None:
        """Publish the step tag; counts as progress."""
        words = self._words
        words[_TAG] = tag
        words[_PROGRESS] += 1
        words[_TIME_NS] = time.monotonic_ns()

    def set_entered(self, version: int) -> None:
        """Publish that the block of this step has been entered, and its tag."""
        self._words[_ENTERED] = version + 1
        self.set_tag(version)

    def set_committed(
        self, version: int, step_ns: int, own_ns: int = 0, own_least_ns: int = 0, overhead_ns: int = 0
    ) -> None:
        """Publish the newest committed version, the tag that goes with it, the usual time of a step, and how much of it
        is the rank's own work, and recovery's."""
        self._words[_COMMITTED] = version
        self._words[_STEP_NS] = step_ns
        self._words[_OWN_NS] = own_ns
        self._words[_OWN_LEAST_NS] = own_least_ns
        self._words[_OVERHEAD_NS] = overhead_ns
        self.set_tag(version)

    def resume(self, version: int, generation: int, step_ns: int) -> None:
        """Training goes on from ``version`` in ``generation``."""
        self._words[_ENTERED] = 0
        self._words[_COMMITTED] = -1  # so that no reader takes an old generation's version for the new one's
        self._words[_GENERATION] = generation
        self.set_committed(version, step_ns)

    def beat(self) -> None:
        """Progress without a new tag."""
        self._words[_PROGRESS] += 1
        self._words[_TIME_NS] = time.monotonic_ns()

    @property
    def work(self) -> Work:
        """What the training thread does, but for compilations."""
        return Work(self._words[_WORK])

    def set_work(self, work: Work) -> None:
        """Publish what the training thread does from now on. That is no progress."""
        self._words[_WORK] = work

    def set_compiles(self, compiles: bool) -> None:
        """Publish that a thread of the process compiles, or that none does any more; counts as progress."""
        self.beat()  # first: what it has taken counts no more when its deadline does not
        self._words[_COMPILES] = compiles

    def set_kept(self, version: int) -> None:
        """Publish the newest version of which a whole copy is kept for another rank; -1: none. Any thread."""
        if self._words[_KEPT] != version + 1:
            self._words[_KEPT_NS] = time.monotonic_ns()
            self._words[_KEPT] = version + 1

    def set_iteration(self, step: int, iteration: int) -> None:
        """Publish as what a framework counts this step, which is a call of its loop."""
        word = _COUNTED_WORDS + 2 * (step % _COUNTED)
        self._words[word], self._words[word + 1] = 0, iteration + 1
        self._words[word] = step + 1

    def iterations(self) -> dict[int, int]:
        """The newest steps of which :meth:`set_iteration` has told."""
        pairs = range(_COUNTED_WORDS, _COUNTED_WORDS + 2 * _COUNTED, 2)
        found = {self._words[word] - 1: self._words[word + 1] - 1 for word in pairs}
        return {step: found[step] for step in sorted(found) if step >= 0}

    def step_text(self, step: int) -> str:
        """The step in words."""
        return step_text(step, self.iterations().get(step, -1))

    def set_tokens_per_step(self, tokens: int) -> None:
        """Publish how many tokens a step of the whole job takes in."""
        self._words[_TOKENS] = tokens

    @property
    def tokens_per_step(self) -> int:
        """What :meth:`set_tokens_per_step` has said; 0: nothing."""
        return self._words[_TOKENS]

    def set_grown_bytes(self, nbytes: int) -> None:
        """Publish by how much the host memory of this rank's state grew in the first step of its process."""
        self._words[_GROWN] = nbytes

    @property
    def grown_bytes(self) -> int:
        """What :meth:`set_grown_bytes` has said; 0: nothing."""
        return self._words[_GROWN]

    @property
    def terminations(self) -> int:
        """How many SIGTERMs the process has noted, in place of ending by them."""
        return self._words[TERMINATIONS_WORD]

    @property
    def notes_terminations(self) -> bool:
        """Whether it would note the next signal: at its last commit the script had no handler of its own."""
        return bool(self._words[_NOTES])

    def set_notes_terminations(self, notes: bool) -> None:
        self._words[_NOTES] = notes

    @property
    def leaving(self) -> bool:
        """Whether a notice of preemption has reached this node or this process."""
        return bool(self._words[_LEAVING]) or self._words[TERMINATIONS_WORD] > 0

    def set_leaving(self) -> None:
        """Called by the agent, or by the process itself, with such a notice. It is never taken back."""
        self._words[_LEAVING] = True

    @property
    def asks_leaving(self) -> bool:
        """Whether the script has asked for :attr:`leaving`: it deals with notices, as one that handles signals does."""
        return bool(self._words[_ASKS_LEAVING])

    def set_asks_leaving(self) -> None:
        self._words[_ASKS_LEAVING] = True

    # -- NCCL's communicators ---------------------------------------------------------------------

    @property
    def communicators(self) -> tuple[Communicators, int]:
        """How far the process is with them, and the generation in which they were made (-1: it has never had any)."""
        generation, state = divmod(self._words[_COMMUNICATORS], len(Communicators))
        return Communicators(state), generation - 1

    def set_communicators(self, state: Communicators, generation: int) -> None:
        """Publish that. What :meth:`let_abort` has said before is void."""
        self._words[_MAY_ABORT] = False
        self._words[_COMMUNICATORS] = (generation + 1) * len(Communicators) + state

    def move_communicators(self, before: Communicators, after: Communicators) -> None:
        """Publish that those which were ``before`` are ``after``; nothing if others have been made meanwhile."""
        state, generation = self.communicators
        if state is before:
            self._words[_COMMUNICATORS] = (generation + 1) * len(Communicators) + after

    @property
    def may_abort(self) -> bool:
        """What :meth:`let_abort` has said."""
        return bool(self._words[_MAY_ABORT])

    def let_abort(self) -> None:
        """Called by the agent: the other ranks of the node are quiet, too."""
        self._words[_MAY_ABORT] = True

    # -- what the script has printed --------------------------------------------------------------

    @property
    def shown(self) -> tuple[int, int]:
        """What :meth:`set_shown` has noted; (0, 0): nothing."""
        return divmod(self._words[_SHOWN], 1 << _WRITES_BITS)

    def set_shown(self, step: int, writes: int) -> None:
        """Note that the output of all steps before ``step`` has been shown, and that many writes of that
        one. One store: it is never seen in halves."""
        if writes < 1 << _WRITES_BITS:
            self._words[_SHOWN] = (step << _WRITES_BITS) + writes

    # -- files that the script writes -------------------------------------------------------------

    def write_file_notes(self, data: bytes) -> bool:
        """Keep how the files are that the script's loops write. False if that is too large. A worker that is killed
        meanwhile leaves the notes of before."""
        if len(data) > FILE_NOTES_LIMIT:
            return False
        written = self._words[_FILE_NOTES]
        words, begin = self._notes_at(written)
        self._keep(words, begin, data)
        self._words[_FILE_NOTES] = written + 1
        return True

    def read_file_notes(self) -> bytes:
        """What :meth:`write_file_notes` has kept; empty: nothing."""
        written = self._words[_FILE_NOTES]
        if not written:
            return b""
        return self._kept(*self._notes_at(written - 1)) or b""

    def _notes_at(self, number: int) -> tuple[int, int]:
        """Where the notes that were written after ``number`` others lie: their words, and their bytes."""
        return _FILE_NOTES + 1 + 2 * (number % 2), self._file_notes + number % 2 * FILE_NOTES_LIMIT

    @property
    def temp_dir(self) -> str:
        """Where the worker, and processes that it forks, have the sockets of ``multiprocessing``."""
        return temp_dir.path_of(self._words[_TEMP_DIR])

    # -- lease ------------------------------------------------------------------------------------

    def lend(self, until: float) -> None:
        """Called by the agent: no change of state may begin after ``until`` (:func:`.lease_clock`; 0.0: no limit). The
        worker itself looks at it, so it holds also while the agent stands still."""
        self._words[_LEASE_NS] = int(until * 1e9)

    @property
    def lent_until(self) -> float:
        """The time of :meth:`lend`."""
        return self._words[_LEASE_NS] / 1e9

    def lease_over(self) -> bool:
        """Whether that time has passed."""
        until_ns = self._words[_LEASE_NS]
        return 0 < until_ns < lease_clock_ns()

    # -- what is read -----------------------------------------------------------------------------

    @property
    def tag(self) -> int:
        return self._words[_TAG]

    @property
    def committed(self) -> int:
        return self._words[_COMMITTED]

    def health(self) -> Health:
        w = self._words
        generation, committed = self._committed_in()
        return Health(
            w[_TAG],
            w[_PROGRESS],
            w[_TIME_NS] / 1e9,
            committed,
            w[_STEP_NS] / 1e9,
            generation,
            w[_OWN_NS] / 1e9,
            w[_OWN_LEAST_NS] / 1e9,
            w[_OVERHEAD_NS] / 1e9,
            w[_KEPT] - 1,
            w[_KEPT_NS] / 1e9,
            w[_ENTERED] - 1,
            Work.FIRST_STEP if w[_COMPILES] else Work(w[_WORK]),
        )

    def _committed_in(self) -> tuple[int, int]:
        """(generation, version committed in it). The worker may resume at any moment; :meth:`resume` takes the old
        version away before it names the new generation, so between two equal looks at the generation there was only
        that one's version, or none."""
        w = self._words
        while True:
            generation = w[_GENERATION]
            committed = w[_COMMITTED]
            if w[_GENERATION] == generation:
                return generation, committed

    # -- rank-local state ----------------------------------------------------------------------------------

    @property
    def local_state_limit(self) -> int:
        """Most bytes of one version of the rank-local state."""
        return self._words[_LIMIT]

    def write_local_state(
        self, version: int, data: bytes | Sequence[bytes | memoryview], *, early: bool = False
    ) -> None:
        """Store the rank-local state of ``version``. ``data``: its bytes, or parts of them. Raises ValueError past
        :attr:`local_state_limit`."""
        parts = [data] if isinstance(data, bytes) else data
        size = sum(map(len, parts))
        if size > self.local_state_limit:
            raise ValueError(
                f"the rank-only state of this rank takes {size:,} bytes; at most {self.local_state_limit:,} fit "
                "(data loader state, persistent buffers, extra objects)"
            )
        self._slots.write(version, parts, final=not early)

    def finish_local_state(self, version: int, end: bytes = witness.UNKNOWN) -> None:
        """The rank-local state of ``version`` that the page holds is final, with ``end`` in the place of its last
        bytes."""
        self._slots.finish(version, end)

    def read_local_state(self, version: int) -> bytes | None:
        """The rank-local state of ``version`` if the page holds it whole."""
        return self._slots.read(version)

    def local_state_versions(self) -> list[int]:
        """Versions whose rank-local state the page holds whole."""
        return self._slots.versions()

    def early_local_states(self) -> list[int]:
        """The versions among :meth:`local_state_versions` that are not final."""
        return self._slots.early()

    def stored_local_state(self, version: int) -> StoredLocalState:
        """That of ``version``, which has just been written."""
        return StoredLocalState(self, version)

    # -- set-up log -------------------------------------------------------------------------------

    def write_setup_log(self, data: bytes) -> bool:
        """Keep what this rank's collectives returned before its first step. False if it is too large."""
        if len(data) > SETUP_LIMIT:
            return False
        self._keep(_SETUP_WORDS, self._setup, data)
        return True

    def read_setup_log(self) -> bytes | None:
        return self._kept(_SETUP_WORDS, self._setup)

    def _keep(self, words: int, begin: int, data: bytes) -> None:
        """Write bytes at ``begin``. ``words``: the first of two, for length + 1 (0 meanwhile) and digest."""
        self._words[words] = 0
        self._map[begin : begin + len(data)] = data
        self._words[words + 1] = _digest(data)
        self._words[words] = len(data) + 1

    def _kept(self, words: int, begin: int) -> bytes | None:
        """What :meth:`_keep` has written; None: nothing, or not all of it."""
        length = self._words[words] - 1
        if length < 0:
            return None
        data = self._map[begin : begin + length]
        return data if _digest(data) == self._words[words + 1] else None

    def inherit(self, old: Page) -> None:
        """Take over the rank-local states and the set-up log of the page of a dead worker, how much it has shown of
        what it has printed, how its files were, and how much its state had grown."""
        with self.inheritance(old) as local_states:
            local_states.copy()
        self.adopt(old)

    def inheritance(self, old: Page) -> Inheritance:
        """The rank-local states of a dead worker, to be taken over by this page, which has not been written yet."""
        at = [_HEADER + i * slot_bytes(self.local_state_limit) for i in range(SLOTS)]
        if old.local_state_limit != self.local_state_limit:
            raise ValueError("pages of different sizes")
        return Inheritance(os.dup(old.fd), os.dup(self.fd), [(at[i], n) for i, n in old._slots.used()])

    def adopt(self, old: Page) -> None:
        """Make the copied rank-local states valid, then take over everything else. Readers check the digests again."""
        self._slots.adopt(old._slots)
        log = old.read_setup_log()
        if log is not None:
            self.write_setup_log(log)
        self.set_shown(*old.shown)
        self.write_file_notes(old.read_file_notes())
        self.set_grown_bytes(old.grown_bytes)


class Inheritance:
    """Content of slots that is to be copied from one page to another one. A context manager."""

    def __init__(self, source: int, target: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Takes the file descriptors over. ``ranges``: (where, bytes)."""
        self._source, self._target, self._ranges = source, target, ranges

    def __enter__(self) -> Inheritance:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._source)
        os.close(self._target)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self._ranges)

    def copy(self) -> None:
        """In any thread; others go on meanwhile. The pages may be closed."""
        buffer = memoryview(bytearray(min(_COPIED_AT_ONCE, max((n for _, n in self._ranges), default=0))))
        for begin, nbytes in self._ranges:
            done = 0
            while done < nbytes:
                read = os.preadv(self._source, [buffer[: min(len(buffer), nbytes - done)]], begin + done)
                if not read:
                    raise ValueError("the page has been cut off")
                written = 0
                while written < read:
                    written += os.pwrite(self._target, buffer[written:read], begin + done + written)
                done += read


@dataclass(frozen=True)
class StoredLocalState:
    """A rank-local state that this process has written into its page, and keeps nowhere else."""

    page: Page
    version: int

    @property
    def nbytes(self) -> int:
        """0: it has been overwritten."""
        return self.page._slots.nbytes(self.version)

    def read(self) -> bytes | None:
        """None: it has been overwritten."""
        return self.page.read_local_state(self.version)


def _digest(data: bytes) -> int:
    """xxh3-64 as a signed 64-bit word."""
    value = xxhash.xxh3_64_intdigest(data)
    return value - (1 << 64) if value >= 1 << 63 else value
