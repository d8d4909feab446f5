"""The iterable of a script's own ``for`` loop, as a stream that rolls back with the step.

Unlike ``recovery.data()`` it ends with the loop. The next execution of the ``for`` statement starts a new stream over
its iterable: an epoch's loader, an ``enumerate()`` of it, a progress bar around it. The script calls ``set_epoch``
itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flashrecovery.errors import DataSourceError
from flashrecovery.state import codec
from flashrecovery.worker.data.accelerate import readable
from flashrecovery.worker.data.batch_digest import Content, copy_of_structure
from flashrecovery.worker.data.draws import Draws, DrawsWatch
from flashrecovery.worker.data.sampler_settings import SamplerValues
from flashrecovery.worker.data.source import Source
from flashrecovery.worker.data.step_data import DataPosition, StepData, exit_codes_of
from flashrecovery.worker.data.stream import KEPT_VERSIONS
from flashrecovery.worker.data.worker_digests import leaves_of
from flashrecovery.worker.local_state.fingerprints import PLAIN
from flashrecovery.worker.local_state.rng import RngState, restore_rng


@dataclass(frozen=True)
class _Place:
    """After a number of rounds of this run of the loop.

    Attributes:
        run: how often the loop has been begun before.
        start: random state and generators at the first round of this run, the epochs that the samplers had, and
            what of the script's objects the source has changed since, as it was.
        draws: what the rounds of this run have drawn.
    """

    run: int = 0
    taken: int = 0
    total: int = 0
    start: dict[str, Any] = field(default_factory=dict)
    draws: Draws = Draws()  # noqa: RUF009 - frozen

    def plain(self) -> dict[str, Any]:
        return {**vars(self), "draws": self.draws.plain()}

    @staticmethod
    def of(state: Mapping[str, Any]) -> _Place:
        return _Place(**{**state, "draws": Draws.of(state["draws"])})


@dataclass
class _Round:
    place: _Place
    element: Any
    content: Content | None
    """None: the loop has ended here."""
    mark: Any = None
    """What the loader says of itself with this element: accelerate's, whether it is the last one."""
    rng_after: dict[str, Any] | None = None
    changed: Mapping[str, Any] = field(default_factory=dict)
    """What the source has changed of the script's objects for this element: a count of epochs, a place in a list."""


class OwnObjects(Protocol):
    """What the script's objects around a loop keep: plain values, by path. A protocol, as the loops lie above
    (:class:`.loops.ScriptLoops`)."""

    def now(self) -> dict[str, Any]: ...

    def put(self, values: Mapping[str, Any]) -> None:
        """``values``: some of those of :meth:`now`, then or in another process."""


class OwnIterator:
    """``iter(iterable)`` of the script, which can be made again as it was then. ``made_after``: how many restores came
    before it; None: it was made on the way to the place of one, where its predecessor was made before."""

    def __init__(self, iterable: Iterable[Any], made_after: int | None = None) -> None:
        self.iterable, self.made_after = iterable, made_after
        self.iterator, begun = Source(iterable, set_epochs=False).begin(0)
        self.start = begun.plain()

    def __iter__(self) -> OwnIterator:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)


class LoopData(StepData):
    """The elements of one loop, in all its runs. ``iterable``: of its first run. ``objects``: of the script, which a
    its own source changes when it is read. They come back with the loop's variables, and so as they were before a
    round; an element that is given again changes them again.

    Raises DataSourceError as :class:`.Source` does.
    """

    def __init__(self, iterable: Iterable[Any] = (), objects: OwnObjects | None = None) -> None:
        self.loader = iterable
        self._objects = objects
        self._at_start: dict[str, Any] = {}
        """The values of the script's objects, before this run began in this process."""
        self.void = self.ended = False  # its end is that of the loop, and not of the job
        self._source = Source(iterable)
        self._iterator: Iterator[Any] | None = None
        self._asked: object = None
        self._place = _Place()
        self._rounds: deque[_Round] = deque()
        self._again: deque[_Round] = deque()
        self._places: dict[int, _Place] = {}
        self._seek_to: _Place | None = None
        self._cut_short = False
        """A read was left by an error: the iterator may have gone on by an element that the script has not got."""
        self._entered = False
        self._read_from = False
        self._draws = DrawsWatch()
        self._begun_at: dict[str, Any] | None = None
        self._made_at: dict[str, Any] | None = None
        """Random state in which the script has made the iterator that it asks."""

    @property
    def position(self) -> DataPosition:
        return DataPosition(self._place.run, self._place.taken, self._place.total)

    @property
    def mark(self) -> tuple[DataPosition, SamplerValues]:
        return self.position, {}

    @property
    def can_be_read_again(self) -> bool:
        return True

    def enter(self, iterable: Iterable[Any]) -> None:
        """The loop begins a run over ``iterable``, again if a version in its midst has been restored."""
        self.loader, self._iterator = readable(iterable, counts=True), None
        self._source = Source(self.loader, set_epochs=False)
        self._read_from = False
        if self._seek_to is None and self._entered:
            self._place = _Place(self._place.run + 1, 0, self._place.total)
        self._entered = True

    def left(self) -> None:
        """The script has come to its place in another loop. When this one begins again, that is its next run."""
        self._seek_to = self._iterator = None
        self._rounds.clear()
        self._again.clear()
        self._entered = self._place.run > 0 or self._place.total > 0

    @property
    def sources(self) -> tuple[object, ...]:
        """What it is led by."""
        return self.loader, self._asked, self._iterator

    def next_of(self, asked: Any, restores: int = 0) -> Any:
        """``next(asked)``, whichever object that is now. ``restores``: there have been so far. Raises StopIteration at
        its end."""
        if asked is not self._asked:
            self._asked = asked
            begun = asked if isinstance(asked, OwnIterator) else None
            going_back = self._seek_to is not None or bool(self._again)
            if going_back and begun is not None and begun.made_after == restores:  # a new one, behind the place
                self.left()
                going_back = False
            self._made_at = None if begun is None else begun.start
            if going_back:  # the variable may lead to a later run, or to the first one
                self._entered = True
                self.loader = asked if begun is None else begun.iterable
                self._source = Source(self.loader, set_epochs=False)
                if begun is None and self._read_from:
                    raise DataSourceError(
                        f"the {self._source.name} that the script asks for its next element cannot be read again"
                    )
            else:
                self.enter(asked if begun is None else begun.iterable)
                if begun is not None:
                    self._iterator, self._begun_at = begun.iterator, begun.start
        return self.fetch()

    def fetch(self) -> Any:
        """The next round's element. Raises StopIteration at the end of this run."""
        with self._fetching():
            return self._next()

    def _next(self) -> Any:
        if self._seek_to is not None:
            place, self._seek_to, self._cut_short = self._seek_to, None, True
            with self._while_reading():
                self._read_to(place)
            self._cut_short = False
        if self._again:
            one = self._again.popleft()
            self._source.set_mark(one.mark)
        else:
            self._cut_short = True
            with self._while_reading():
                one = self._read()
            self._rounds.append(one)
            self._cut_short = False
        if one.changed and self._objects is not None:  # also of one just read: the loop may put back variables yet
            self._objects.put(one.changed)
        if one.content is None:
            raise StopIteration
        if one.rng_after is not None:
            restore_rng(one.rng_after)
        self._place = one.place
        return copy_of_structure(one.element)

    def _read(self) -> _Round:
        before, start = RngState.now(), self._place.start
        if self._begun_at is not None:
            start, self._begun_at = self._begun_at, None
        begun, self._read_from = self._iterator is None, True
        objects = self._changing_objects
        held = {} if objects is None else objects.now()
        if begun or not self._place.taken:
            self._at_start = held
        if begun:
            self._iterator, at = self._source.begin(self._place.run, self._made_at)
            start = at.plain()
            if self._made_at is not None:  # the numbers that it takes were drawn then
                restore_rng(before.plain())
        if self._place.taken == 0:
            start = {**start, "epochs": self._source.epochs()}
        if begun or not self._place.taken:
            self._draws.begin({})
        found = RngState.now()
        try:
            with self._draws.fetching():
                element = next(self._iterator)  # type: ignore[arg-type]
        except StopIteration:
            return _Round(self._place, None, None, self._source.mark())
        after = RngState.now()
        content = Content.of(element, leaves_of(self._iterator))
        changed = {} if objects is None else _changed(held, objects.now())
        new = {path: self._at_start[path] for path in changed if path in self._at_start}
        if not new.keys() <= start.get("objects", {}).keys():
            start = {**start, "objects": {**new, **start.get("objects", {})}}
        taken, kept = self._place.taken, Draws() if not self._place.taken else self._place.draws
        recent, whole = self._source.kept_draws, self._source.is_read_whole
        draws = self._draws.noted(kept, taken, found, content.digest, recent=recent, whole=whole)
        place = _Place(
            self._place.run,
            self._place.taken + 1,
            self._place.total + 1,
            start,
            draws,
        )
        rng_after = after.plain() if after != before else None
        return _Round(place, element, content, self._source.mark(), rng_after, changed)

    @property
    def _changing_objects(self) -> OwnObjects | None:
        """None where reading changes none of them."""
        return self._objects if self._source.runs_script else None

    def _read_to(self, place: _Place) -> None:
        """Read a run of the loop again, up to ``place``. Random numbers are left as they are."""
        now = RngState.now()
        self._place = place
        self._rounds.clear()
        if not place.taken:
            self._iterator = None  # the run starts from its beginning
            return
        self._read_from, told = True, self._source.epochs()
        ahead = place.start.get("epochs", told) != told
        if ahead:  # the script is an epoch ahead of its iterator
            self._source.put_epochs(place.start["epochs"])
        objects = self._changing_objects
        held = {} if objects is None else objects.now()
        self._at_start = {**held, **place.start.get("objects", {})}
        if objects is not None:
            objects.put(self._at_start)
        self._iterator, _ = self._source.begin(place.run, place.start)
        done, found, stops = 0, "", sorted({*place.draws.places, place.taken - 1})
        while done < place.taken and not found:
            place.draws.find_again(done)
            skipped = self._source.skip_indices(self._iterator, next(stop for stop in stops if stop >= done) - done)
            if skipped:
                done += skipped
                continue
            try:
                element = next(self._iterator)
            except StopIteration:
                raise DataSourceError(
                    f"the {self._source.name} of this loop ended after {done} rounds; the failed process had made "
                    f"{place.taken}"
                ) from None
            found = place.draws.differs(done, element, self._iterator)
            done += 1
        if ahead:  # else what it has counted itself stays
            self._source.put_epochs(told)
        if objects is not None:
            objects.put(held)
        if found:
            raise DataSourceError(
                f"the {self._source.name} of this loop gives other elements than before: that of round "
                f"{done - 1} now has digest {found}; {self._source.how_to_repeat}, and do not modify batches "
                "in place"
            )
        then = RngState.now().plain()
        self._draws.begin({name: then[name] for name in place.draws.streams})
        if RngState.now() != now:
            restore_rng(now.plain())

    # -- versions -----------------------------------------------------------------------------------

    def commit(self, version: int) -> None:
        self._places = {v: place for v, place in self._places.items() if version - KEPT_VERSIONS < v < version}
        self._places[version] = self._place
        oldest = min(place.total for place in self._places.values())
        run = min(place.run for place in self._places.values())
        while self._rounds and self._is_behind(self._rounds[0], run, oldest):
            self._rounds.popleft()

    @staticmethod
    def _is_behind(one: _Round, run: int, total: int) -> bool:
        return one.place.run < run if one.content is None else one.place.total <= total

    @property
    def must_be_entered(self) -> bool:
        """Whether the iterable cannot be read again, so that the ``for`` statement must be executed again."""
        return self._seek_to is not None and self._read_from and isinstance(self.loader, Iterator)

    def rollback(self, version: int) -> None:
        if version not in self._places:
            raise DataSourceError(f"the loop cannot go back to version {version}, only to {sorted(self._places)}")
        place = self._places[version]
        self._places = {v: place for v, place in self._places.items() if v <= version}
        if self._seek_to is not None:
            self._seek_to = place
            return
        again = deque(one for one in self._rounds if one.place.total > place.total)
        ended = any(one.content is None for one in self._rounds) or self._place.run != place.run or self._cut_short
        if ended or not all(one.content is not None and one.content.still_in(one.element) for one in again):
            self._rounds.clear()
            self._again.clear()
            self._seek_to, self._place, self._cut_short = place, place, False
            return
        self._again, self._place = again, place

    def capture(self) -> dict[str, Any]:
        return self._place.plain()

    def restore(self, state: dict[str, Any]) -> None:
        self._places.clear()
        self._rounds.clear()
        self._again.clear()
        self._iterator = None
        self._place = self._seek_to = _Place.of(state)

    def leave_samplers(self) -> None:
        """The script's own loop sets them."""

    def exit_codes(self) -> list[int | None]:
        return exit_codes_of(self._iterator)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``after`` that are not the same."""
    return {path: value for path, value in after.items() if path not in before or not _same(before[path], value)}


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if type(one) in PLAIN:
        return bool(one == other)
    return codec.dumps(one) == codec.dumps(other)
