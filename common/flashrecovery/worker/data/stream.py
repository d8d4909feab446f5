"""``recovery.data(loader)``: an iterator over a data source that rolls back with the step.

A survivor keeps the batches of the last few versions and hands them out again; its source is not touched. A
replacement starts with a fresh source and goes forward to where the dead rank was: a stateful source is loaded with
its state of one step before (its *anchor*), any other is begun again in the random state of that epoch's beginning;
from there batches are skipped. That it gives the same samples is checked, by the digest of the last batch that the
dead rank had fetched.
"""

from __future__ import annotations

import bisect
import copy
import functools
import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashrecovery.errors import DataSourceError
from flashrecovery.worker.data.batch_digest import Content, copy_of_structure
from flashrecovery.worker.data.consumers import Consumers
from flashrecovery.worker.data.draws import Draws, DrawsWatch
from flashrecovery.worker.data.sampler_settings import (
    LIMIT_BYTES,
    LIMIT_LENGTH,
    SamplerRows,
    SamplerValues,
    rows_of,
    values_of,
)
from flashrecovery.worker.data.source import EpochStart, Source
from flashrecovery.worker.data.step_data import DataPosition, StepData, exit_codes_of
from flashrecovery.worker.data.worker_digests import leaves_of
from flashrecovery.worker.local_state.rng import RngState, restore_rng

log = logging.getLogger("flashrecovery")

KEPT_VERSIONS = 3
_SETTINGS = 1000
"""Changes of samplers within one epoch that are kept."""
_SAY_EVERY_S = 5.0


@dataclass(frozen=True)
class _Cursor:
    """A position with what a fresh source needs to get there."""

    position: DataPosition
    epoch_start: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    """The digest of the batch that led here; "" at the very beginning."""
    draws: Draws = Draws()  # noqa: RUF009 - frozen
    """What the fetches of the epoch have drawn, behind its start."""
    anchor: tuple[int, dict[str, Any]] | None = None
    """For a stateful source: its state after that many batches (fewer than ``position.batch``) of the epoch."""

    def plain(self) -> dict[str, Any]:
        return {
            "position": tuple(self.position),
            "epoch_start": self.epoch_start,
            "digest": self.digest,
            "draws": self.draws.plain(),
            "anchor": self.anchor,
        }

    @staticmethod
    def of(state: dict[str, Any]) -> _Cursor:
        return _Cursor(
            DataPosition(*state["position"]),
            state["epoch_start"],
            state["digest"],
            Draws.of(state["draws"]) if "draws" in state else _draws_of_before(state),
            state["anchor"],
        )


@dataclass
class _Kept:
    """A batch that may have to be yielded again."""

    cursor: _Cursor
    batch: Any
    content: Content
    rng_after: dict[str, Any] | None
    mark: Any
    void: bool
    set: SamplerValues
    """What the fetch has set of samplers."""

    @property
    def by_chance(self) -> bool:
        """Whether random numbers have been drawn for it that the step, when it is done again, will not draw."""
        return self.void and self.rng_after is not None

    def intact(self) -> bool:
        """False if the step body has written into the batch, or if that cannot be known."""
        return self.content.still_in(self.batch)


class DataStream(StepData):
    """Iterates over ``loader``, epoch after epoch.

    Before each epoch ``set_epoch(epoch)`` is called on the loader's sampler if it has that method. A source that can be
    iterated again begins its next epoch when it is exhausted; a one-shot iterator ends with ``StopIteration``.
    ``first_epoch``: the epoch that the sampler is given in epoch 0; later ones are offset by it, too.

    Attributes:
        position: the stream's position; a value, cheap to compare.
        void: what is yielded belongs to no step (:mod:`flashrecovery.worker.step.discarded_run`).

    Raises:
        DataSourceError: ``loader`` is not iterable.
    """

    def __init__(self, loader: Iterable[Any], *, first_epoch: int = 0) -> None:
        self.loader = loader
        self.void = False
        self._source = Source(loader, first_epoch=first_epoch)
        self._iterator: Iterator[Any] | None = None
        self._reading = 0
        """The epoch of that iterator."""
        self._first_epoch = 0
        self._cursor = _Cursor(DataPosition(0, 0, 0))
        self._kept: deque[_Kept] = deque()
        self._replay: deque[_Kept] = deque()
        self._marks: dict[int, _Cursor] = {}
        self._sampled: tuple[DataPosition, dict[str, Any]] | None = None
        """State of a stateful source, and the position at which it was asked for it last."""
        self._cut_short = False
        """A fetch was left by an error: the source may have advanced by a batch that was never delivered."""
        self._expected: dict[int, str] = {}
        """Digests of batches that are read for a second time, by ``position.total``."""
        self._first = ""
        """The digest of the very first batch, in whatever process that was read first."""
        self._samplers = self._source.samplers
        self._values = self._samplers.within_epoch()  # as the last fetch has left them
        self._others = self._samplers.others(self._values)
        self._lost: set[str] = set()
        """What something else than a fetch has set and does not come back, by name."""
        self._values_at: dict[int, SamplerValues] = {}
        self._set: set[tuple[int, str]] = set()
        """SamplerValues of samplers that something else than a fetch has set."""
        self._draws = DrawsWatch()
        self._begun = False
        self._start: dict[str, Any] | None = None  # of a stateful source, before anything was read
        self._told_opaque = False
        self._consumers = Consumers()
        self.ended = False
        """The script has been informed that there is no more."""

    @property
    def position(self) -> DataPosition:
        return self._cursor.position

    def begin_with(self, epoch: int) -> None:
        """The training begins with this epoch of the source, from 0. To be called before anything is fetched."""
        self._first_epoch = epoch
        self._cursor = _Cursor(DataPosition(epoch, 0, 0))

    def leave_samplers(self) -> None:
        """What samplers are set to is not this stream's to bring back: a replacement runs the script's loop again.
        Not where that loop puts it back itself, by :meth:`put_samplers`."""
        if hasattr(self.loader, "loop_state"):
            return
        self._samplers.leave()
        self._values, self._others = {}, {}

    def samplers(self) -> SamplerRows:
        """What samplers are set to now, by something else than a fetch or not."""
        return rows_of(self._samplers.values())

    def put_samplers(self, rows: SamplerRows) -> None:
        """Set samplers to what :meth:`samplers` returned; batches that are yielded again repeat their own changes."""
        self._samplers.put(values_of(rows))

    @property
    def mark(self) -> tuple[DataPosition, SamplerValues]:
        """Changes whenever something is fetched, or a sampler of the script's is set."""
        return self.position, self._set_values()

    def _set_values(self) -> SamplerValues:
        now = self._samplers.values()
        self._set |= {name for name, value in now.items() if self._values.get(name, _Kept) != value}
        changed = {key for key, mark in self._samplers.others(now).items() if self._others.get(key, _Kept) != mark}
        lost = {self._samplers.name_of(key) for key in changed}
        if lost - self._lost:
            log.warning("%s: a recovery fails from now on", _lost_text(lost))
        self._lost |= lost
        return {name: now[name] for name in self._set if name in now}

    @property
    def can_be_read_again(self) -> bool:
        """Whether the source can be begun again."""
        return not self._source.one_shot

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.position.epoch

    def next_epoch(self) -> None:
        """Leave the rest of this epoch unread, as ``break`` does in a loop over the loader: the next batch is the first
        one of the next epoch. Rolls back with the step. No change if nothing of this epoch has been read.

        Raises:
            DataSourceError: the source is a one-shot iterator, or one with a state of its own that is no DataLoader:
                where that stands in the midst of an epoch its next one may not begin.
        """
        if not self._source.begins_anywhere:
            raise DataSourceError(
                f"the {self._source.name} has no next epoch in the midst of one: it is a one-shot iterator, or keeps "
                "its place in a state of its own; read it to its end"
            )
        epoch, batch, total = self.position
        if batch:
            self._cursor = _Cursor(DataPosition(epoch + 1, 0, total))

    def __len__(self) -> int:
        """Batches of one epoch. Raises TypeError if the loader does not know."""
        return len(self.loader)  # type: ignore[arg-type]

    def exit_codes(self) -> list[int | None]:
        """The exit codes of the processes that read for it; None: it runs."""
        return exit_codes_of(self._iterator)

    def __iter__(self) -> DataStream:
        return self

    def __next__(self) -> Any:
        self._consumers.check(sys._getframe(1))
        with self._fetching():
            return self._next()

    def _next(self) -> Any:
        if self._replay:
            kept = self._replay.popleft()
            if kept.rng_after is not None:
                restore_rng(kept.rng_after)
            self._source.set_mark(kept.mark)
            self._samplers.put(kept.set)
            self._note_values()
        elif self.void and (stand_in := self._stand_in()) is not None:
            return stand_in
        else:
            self._cut_short = True
            with self._while_reading():
                kept = self._fetch()
            self._kept.append(kept)
            self._cut_short = False
        self._cursor = kept.cursor
        return copy_of_structure(kept.batch)

    def _stand_in(self) -> Any:
        """Another batch in the place of the next one, None if there is none that can be copied.

        The source is left alone: the step's body was cut short and has not drawn all of its random numbers, so what the
        source would draw now (the seed of an epoch), and what follows from it, is not what it will be.
        """
        for kept in reversed(self._kept):
            try:
                return copy.deepcopy(kept.batch)
            except Exception as e:  # noqa: BLE001 - a batch's own code runs here
                log.debug("a batch of the %s cannot be copied: %s", self._source.name, e)
        return None

    def _fetch(self) -> _Kept:
        """The next batch of the source, of its next epoch if this one is exhausted."""
        self._set_values()
        epoch, index, total = self.position
        epoch_start, begun = self._with_settings(self._cursor), None
        as_set = self._samplers.values()
        before = RngState.now()
        iterator = self._iterator if self._reading == epoch else None
        if iterator is None:
            iterator, begun = self._begin(epoch)
            self._iterator = iterator
        try:
            batch = self._next_of(iterator)
        except StopIteration:
            if self._source.one_shot or index == 0:
                if index == 0 and not self._source.one_shot:
                    raise DataSourceError(f"the {self._source.name} gives no batches") from None
                self.ended = True
                raise
            epoch, index = epoch + 1, 0
            self._sample(DataPosition(epoch, 0, total), self._source.unread_state())
            before = RngState.now()
            iterator, begun = self._begin(epoch)
            self._iterator = iterator
            try:
                batch = self._next_of(iterator)
            except StopIteration:
                if isinstance(self.loader, Iterator):
                    raise  # ``iter()`` did not begin it again
                raise DataSourceError(f"the {self._source.name} gives no batches in epoch {epoch}") from None
        self._note_values()
        after = RngState.now()
        drawn = after != before
        content = Content.of(batch, leaves_of(iterator))
        if begun is not None:
            epoch_start = begun.plain()
        draws = self._draws_after(index, before, content.digest, epoch_start if begun is not None else None)
        cursor = _Cursor(
            DataPosition(epoch, index + 1, total + 1),
            epoch_start,
            content.digest,
            draws,
            self._anchor(epoch),
        )
        if not content.is_called(self._expected.pop(cursor.position.total, cursor.digest), batch):
            raise self._other_samples(cursor.position, cursor.digest)
        if content.opaque and not self._told_opaque:
            self._tell_opaque(content.opaque)
        by_fetch = {name: v for name, v in self._samplers.values().items() if as_set.get(name, _Kept) != v}
        rng_after = after.plain() if drawn else None
        kept = _Kept(cursor, batch, content, rng_after, self._source.mark(), self.void, by_fetch)
        if not total and not kept.by_chance:
            self._first = cursor.digest
        return kept

    def _note_values(self) -> None:
        """A fetch has left the samplers as they are."""
        self._values = self._samplers.within_epoch()
        self._others = self._samplers.others(self._values)

    def _with_settings(self, cursor: _Cursor) -> dict[str, Any]:
        """How the epoch began, and what samplers were set to since, each with the batches fetched until then: they may
        look at it again, and a fetch may make indices for a later one."""
        now = self._samplers.within_epoch()
        changed = rows_of({name: value for name, value in now.items() if self._values.get(name, _Kept) != value})
        if not changed or self._iterator is None:
            return cursor.epoch_start
        settings = cursor.epoch_start.get("settings", [])
        if len(settings) >= _SETTINGS:
            often = {name for _place, name, _value in changed} if self._samplers.read_on else set()
            return {**cursor.epoch_start, "often": sorted({*cursor.epoch_start.get("often", ()), *often})}
        return {**cursor.epoch_start, "settings": [*settings, (cursor.position.batch, changed)]}

    def _is_begun(self, epoch: int) -> bool:
        """Whether the iterator is that of ``epoch``."""
        return self._iterator is not None and self._reading == epoch

    def _begin(self, epoch: int, start: Mapping[str, Any] | None = None) -> tuple[Iterator[Any], EpochStart]:
        begin = self._begin_first if epoch == self._first_epoch else functools.partial(self._source.begin, epoch)
        begun = begin(start)
        self._reading = epoch
        return begun

    def _begin_first(self, start: Mapping[str, Any] | None = None) -> tuple[Iterator[Any], EpochStart]:
        """The source's first epoch begins, perhaps again: ``iter()`` of a stateful source may go on where that
        stands."""
        if self._begun and self._start is not None:
            self._source.load_unread(self._start)
        self._note_start()
        return self._source.begin(self._first_epoch, start)

    def _note_start(self) -> None:
        if not self._begun:
            self._begun, self._start = True, self._source.unread_state()

    def _next_of(self, iterator: Iterator[Any]) -> Any:
        with self._draws.fetching():
            return next(iterator)

    def _draws_after(self, index: int, before: RngState, digest: str, begun: Mapping[str, Any] | None) -> Draws:
        """What has been drawn up to this fetch. ``begun``: how the epoch has begun, if it did so with this fetch, which
        is made again in that state."""
        recent = self._source.kept_draws
        if begun is None:
            whole = self._source.is_read_whole
            return self._draws.noted(self._cursor.draws, index, before, digest, recent=recent, whole=whole)
        self._draws.begin(RngState.now().plain() if "rng" in begun else {})
        return Draws().with_element(index, digest, recent)

    def _tell_opaque(self, kind: str) -> None:
        """Raises DataSourceError if that is found before anything could be lost."""
        self._told_opaque = True
        what = f"a batch of the {self._source.name} contains a {kind}: it cannot be known whether a step writes into it"
        if not self._source.one_shot:
            log.warning("%s, so a recovery reads the data source again; leave it out if that takes long", what)
        elif self.position.total:
            log.warning("%s, and the data source is a one-shot iterator: a recovery in this step will fail", what)
        else:
            raise DataSourceError(
                f"{what}, and the data source is a one-shot iterator, which cannot be read again; leave it out of the "
                "batch, or pass a source that can be iterated again"
            )

    # -- versions -----------------------------------------------------------------------------------

    def commit(self, version: int) -> None:
        """What has been fetched so far belongs to the steps before ``version``. The last call for a version counts."""
        self._forget_after(version)
        self._marks[version] = self._cursor_now()
        self._values_at[version] = self._samplers.values()
        if version == 3 and {1, 2} <= self._marks.keys():
            self._tell_if_ahead(*(self._marks[v].position.total for v in (1, 2)))
        for old in sorted(self._marks)[:-KEPT_VERSIONS]:
            del self._marks[old]
            self._values_at.pop(old, None)
        oldest = min(c.position.total for c in self._marks.values())
        while self._kept and self._kept[0].cursor.position.total <= oldest:
            self._kept.popleft()

    def _tell_if_ahead(self, first: int, second: int) -> None:
        """``first``, ``second``: batches fetched up to the end of the first and of the second step."""
        if first > second - first > 0:
            log.warning(
                "the first step took %d batches of the %s, the second %d: if the script fetches a batch in one step "
                "and uses it in the next (a prefetcher around recovery.data()), a recovery cannot bring that batch "
                "back and goes on with another one; let the prefetcher read the loader, and give it to recovery.data()",
                first,
                self._source.name,
                second - first,
            )

    def rollback(self, version: int) -> None:
        """Yield again what was fetched after ``version``, including the random numbers drawn for it.

        Raises:
            DataSourceError: the version is too old; or the step has modified a batch in place and the source cannot be
                begun again.
        """
        if version not in self._marks:
            raise DataSourceError(f"the data stream cannot go back to version {version}, only to {sorted(self._marks)}")
        self._set_values()
        self._forget_after(version)
        cursor, values = self._marks[version], self._values_at.get(version, {})
        again = deque(k for k in self._kept if k.cursor.position.total > cursor.position.total)
        by_chance = any(k.by_chance for k in again)
        if self._cut_short and not self._source.one_shot:
            self._seek(cursor)
            self._samplers.put(values)
            self._expected = {k.cursor.position.total: k.cursor.digest for k in again if not k.by_chance}
            return
        if not by_chance and all(k.intact() for k in again):
            self._replay, self._cursor = again, cursor
            self._samplers.put(values)
            return
        if self._source.one_shot and by_chance:
            raise DataSourceError(
                "below a step that is done again the script has fetched a batch from a one-shot iterator which draws "
                "random numbers: it cannot be fetched again; pass a source that can be iterated again"
            )
        if self._source.one_shot:
            raise DataSourceError(
                "the step has modified a batch in place, and the data source is a one-shot iterator: it cannot be "
                "replayed; work on a copy of the batch, or pass a source that can be iterated again"
            )
        if not by_chance:
            log.warning("the step has modified a batch in place; the data source is read again for the replay")
        self._seek(cursor)
        self._samplers.put(values)
        self._expected = {k.cursor.position.total: k.cursor.digest for k in again if not k.by_chance}

    def _forget_after(self, version: int) -> None:
        for newer in [v for v in self._marks if v > version]:
            del self._marks[newer]

    # -- capture and restore ------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """What a replacement needs to bring a fresh source to this position (plain values)."""
        values = rows_of(self._set_values())
        found = {**self._cursor_now().plain(), "first": self._first}
        return found | {k: v for k, v in (("values", values), ("lost", sorted(self._lost))) if v}

    def restore(self, state: dict[str, Any]) -> None:
        """Bring a source to a captured position. Leaves the random streams anywhere.

        Raises:
            DataSourceError: the source ends earlier, or gives other samples than it did; or it has been read already,
                and cannot be begun again.
        """
        cursor = _Cursor.of(state)
        from_start = cursor.position.epoch == self._first_epoch and self._start is not None
        if self._source.one_shot and self.position.total and cursor.anchor is None and not from_start:
            raise DataSourceError(
                f"the {self._source.name} is a one-shot iterator and {self.position.total} batches of it are taken, so "
                f"it cannot be brought to batch {cursor.position.total}; pass a source that can be iterated again"
            )
        self._marks.clear()
        self._values_at.clear()
        self._first = state.get("first", "") or self._first  # none in checkpoints of before
        if often := cursor.epoch_start.get("often"):
            raise DataSourceError(
                f"{', '.join(often)}, at which the script's sampler may look for each sample, has been set more than "
                f"{_SETTINGS} times in this epoch: the order of samples cannot be brought back"
            )
        if state.get("lost"):
            raise DataSourceError(f"{_lost_text(state['lost'])}: the order of samples cannot be brought back")
        self._seek(cursor)
        values = values_of(state.get("values", ()))
        self._set |= {*values}
        self._samplers.put(values)

    def _cursor_now(self) -> _Cursor:
        cursor = self._cursor
        if not cursor.digest and not self._is_begun(cursor.position.epoch):
            return _Cursor(cursor.position, {"generators": self._source.generator_states()})
        if self._iterator is not None and not self._replay and (not self._sampled or self._sampled[0] != self.position):
            self._sample(self.position, self._source.state())
        return cursor

    def _sample(self, position: DataPosition, state: dict[str, Any] | None) -> None:
        self._sampled = None if state is None else (position, state)

    def _anchor(self, epoch: int) -> tuple[int, dict[str, Any]] | None:
        if self._sampled is None or self._sampled[0].epoch != epoch:
            return None
        return self._sampled[0].batch, self._sampled[1]

    def _seek(self, cursor: _Cursor) -> None:
        of_loop = self._samplers.of_loop()
        try:
            with self._while_reading():
                self._go_to(cursor)
            self._note_values()
        finally:
            self._samplers.put(of_loop)  # the epoch has begun with what it was then

    def _go_to(self, cursor: _Cursor) -> None:
        self._kept.clear()
        self._replay.clear()
        self._iterator, self._sampled, self._cut_short = None, None, False
        self._draws.begin({})
        self._expected.clear()
        self._cursor = cursor
        epoch, batch, _total = cursor.position
        if not batch:
            self._source.restore_generators(cursor.epoch_start)
            if self._first:
                self._expected[1] = self._first
            return
        if cursor.anchor is not None:
            done, state = cursor.anchor
            self._note_start()
            self._source.load(state)
            self._iterator, _ = self._source.begin(epoch, cursor.epoch_start)
            self._reading = epoch
            try:
                if self._skip(self._iterator, done, cursor) is None:
                    return
            except DataSourceError as e:
                if done:
                    raise
                log.debug("%s", e)  # the state at the end of the epoch before is that of a source that is exhausted
            # For example: a loader's worker processes draw random numbers, which its state does not contain.
            log.warning("the state of the %s does not give the same samples; replaying the epoch", self._source.name)
        self._iterator, _ = self._begin(epoch, cursor.epoch_start)
        other = self._skip(self._iterator, 0, cursor)
        if other is not None:
            raise other

    def _other_samples(self, position: DataPosition, found: str) -> DataSourceError:
        return DataSourceError(
            f"the {self._source.name} gives other samples than before: batch {position.batch - 1} of epoch "
            f"{position.epoch} now has digest {found}; {self._source.how_to_repeat}, and do not modify batches in place"
        )

    def _skip(self, iterator: Iterator[Any], done: int, cursor: _Cursor) -> DataSourceError | None:
        """Go forward from ``done`` batches of the epoch to the cursor; the error if one of the last batches is not the
        same."""
        count = cursor.position.batch
        began = said = time.monotonic()
        settings = _settings_of(cursor)
        for index in sorted(i for i in settings if i < done):
            self._samplers.put(settings[index])
        stops = sorted({*settings, *cursor.draws.places, count - 1})
        while done < count:
            cursor.draws.find_again(done)
            self._samplers.put(settings.get(done, {}))
            stop = bisect.bisect_right(stops, done)
            skipped = self._source.skip_indices(iterator, stops[stop] - done) if stop < len(stops) else 0
            if skipped:
                done += skipped
                continue
            try:
                batch = next(iterator)
            except StopIteration:
                raise DataSourceError(
                    f"the {self._source.name} ended after {done} batches of epoch {cursor.position.epoch}; "
                    f"the failed process had fetched {count}"
                ) from None
            if found := cursor.draws.differs(done, batch, iterator):
                at = DataPosition(cursor.position.epoch, done + 1, cursor.position.total)
                return self._other_samples(at, found)
            done += 1
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                log.warning("replaying the data source: %d of %d batches, %.0f s", done, count, said - began)
        now = RngState.now().plain()
        whole = "rng" in cursor.epoch_start
        self._draws.begin({name: now[name] for name in now if whole or name in cursor.draws.streams})
        return None


def _draws_of_before(state: Mapping[str, Any]) -> Draws:
    """Of a checkpoint of a version that kept the random states before the last fetches."""
    count, states = state["position"][1], state["rng_before"]
    numbers = range(count - len(states), count)
    known = {number: known for number, known in zip(numbers, states, strict=True) if known is not None}
    return Draws(known, exact_from=max(count - 1, 0), digests={count - 1: state["digest"]} if count else {})


def _settings_of(cursor: _Cursor) -> dict[int, SamplerValues]:
    """What samplers were set to within the epoch, by the batches fetched until then."""
    settings = cursor.epoch_start.get("settings", ())
    return {index: values_of(changed) for index, changed in settings}


def _lost_text(names: Iterable[str]) -> str:
    return (
        f"{', '.join(sorted(names))} of the script's sampler has been set while it trains, and is not kept: numbers, "
        f"texts, enumerations, generators, and containers and tensors of up to {LIMIT_LENGTH} elements and "
        f"{LIMIT_BYTES} bytes are"
    )
