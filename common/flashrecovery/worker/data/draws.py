"""The random numbers that reading a source draws, so that a fresh source draws the same ones.

An order that a generator shuffles for each pass, or noise in a batch, comes from a global random stream. Training draws
from that stream, too, between the fetches. A replacement only reads, so its fetches need the stream as the dead
process's found it.

* A stream from which only the source draws needs no record after its first one, if all fetches are made again: the
  rest follows. On a GPU, where dropout draws from the device's stream, that is the usual case of a generator.
* Of the others, the fetches in which an order may have begun are kept, and the most recent ones. Where an older one is
  forgotten, what it drew comes out differently: noise in a batch of before does no harm, a buffer of samples does. So
  the elements of the last fetches that can be repeated exactly are compared by their digests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flashrecovery.worker.data.batch_digest import Content
from flashrecovery.worker.data.loader_iterations import ITERATIONS
from flashrecovery.worker.data.worker_digests import leaves_of
from flashrecovery.worker.local_state.rng import RngState, restore_rng

RECENT = 16
"""Fetches whose draws are kept, of a source that may draw in one what it needs in a later one."""
LOOK_AHEAD = 3
"""Fetches over which a source may draw for one element: a prefetcher makes it up to two fetches early."""
_ORDERS = 16
"""Most beginnings of an order that are known: the first one and the last ones."""
_Streams = Mapping[str, Any]
"""Random streams by name, as :meth:`.RngState.plain` has them."""


@dataclass(frozen=True)
class Draws:
    """What the fetches of a run over a source have drawn so far.

    Attributes:
        states: number of a fetch, from 0 -> the streams that it has drawn from, as it found them.
        orders: numbers of those of them from which an order follows: it may have begun in that fetch, or in a later one
            for which nothing had to be kept.
        exact_from: from this fetch on all draws are known. Before it, some have been forgotten.
        digests: number of a fetch -> digest of its element, of the last ones.
        usual: how much a fetch draws in which no order begins; () if that has not been seen.
        follows: the last fetch has begun a loader within the source, whose sampler may draw its seed in the next one.
    """

    states: dict[int, _Streams] = field(default_factory=dict)
    orders: tuple[int, ...] = ()
    exact_from: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    usual: tuple[int, ...] = ()
    follows: bool = False

    def plain(self) -> dict[str, Any]:
        return dict(vars(self))

    @staticmethod
    def of(state: Mapping[str, Any]) -> Draws:
        return Draws(**{**state, "orders": tuple(state["orders"]), "usual": tuple(state["usual"])})

    def with_element(self, number: int, digest: str, recent: int) -> Draws:
        """Fetch ``number`` has given an element of this digest. ``recent``: how many are kept."""
        digests = {n: known for n, known in self.digests.items() if n > number - recent} | {number: digest}
        return replace(self, digests=digests)

    def with_states(self, number: int, drawn: _Streams, recent: int) -> Draws:
        """Fetch ``number`` has drawn from these streams, as it found them; none, if they follow from what is kept."""
        if not drawn and not self.states:
            return self
        states = {**self.states, number: drawn} if drawn else self.states
        newest = {stream: n for n in sorted(states) for stream in states[n]}
        kept: dict[int, _Streams] = {}
        exact_from = self.exact_from
        for n, streams in states.items():
            whole = n in self.orders or n > number - recent
            kept[n] = {name: value for name, value in streams.items() if whole or newest[name] == n}
            for lost in streams.keys() - kept[n].keys():
                exact_from = max(exact_from, min(m for m in states if m > n and lost in states[m]))
        return replace(self, states={n: streams for n, streams in kept.items() if streams}, exact_from=exact_from)

    def with_order(self, number: int, streams: Iterable[str]) -> Draws:
        """An order may have begun in fetch ``number``, which has drawn from these streams."""
        newest = {stream: n for n in sorted(self.states) if n <= number for stream in self.states[n]}
        orders = self.orders
        for n in sorted({newest[stream] for stream in streams if stream in newest} - {*orders}):
            orders = (*orders, n) if len(orders) < _ORDERS else (orders[0], *orders[2:], n)
        return replace(self, orders=orders)

    @property
    def places(self) -> set[int]:
        """The fetches that cannot be skipped when a source is read again."""
        return {*self.states, *self.digests}

    @property
    def streams(self) -> set[str]:
        """Of which something is kept."""
        return {name for streams in self.states.values() for name in streams}

    def find_again(self, number: int) -> None:
        """The next fetch is that of this number: it draws the same again."""
        if number in self.states:
            restore_rng({**RngState.now().plain(), **self.states[number]})

    def differs(self, number: int, element: Any, iterator: object) -> str:
        """The digest of the element that ``iterator`` has given, if another one is known for it; else ""."""
        digest = self.digests.get(number)
        exact = not self.exact_from or number >= self.exact_from + LOOK_AHEAD - 1 or number == max(self.digests)
        if digest is None or not exact:
            return ""
        content = Content.of(element, leaves_of(iterator))
        return "" if content.is_called(digest, element) else content.digest


class DrawsWatch:
    """Looks at the fetches of one reader, and says what has to be known of them."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        """Streams as the last fetch that drew from them has left them, if they follow from what is kept."""
        self._begun = False

    def begin(self, streams: Mapping[str, Any]) -> None:
        """A source begins, perhaps again, and has come to a place. ``streams``: as they are then, of those that are
        the same whenever it is read up to there."""
        self._known = dict(streams)

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Notes whether one of torch's loaders is begun within the fetch."""
        before = ITERATIONS.begun
        try:
            yield
        finally:
            self._begun = ITERATIONS.begun != before

    def noted(
        self, draws: Draws, number: int, found: RngState, digest: str, *, recent: int = RECENT, whole: bool = True
    ) -> Draws:
        """``draws``, after a fetch that has found the random streams like this and has just ended. ``whole``: all
        fetches before it are made again on the way to its place."""
        if not whole:
            self._known.clear()
        after = RngState.now()
        changed = {} if after == found else found.streams_changed_in(after)
        amount = found.drawn_until(after) if changed else ()
        disturbed = any(name not in self._known or self._known[name] != value for name, value in changed.items())
        begins = self._begun or draws.follows or not number or amount != draws.usual
        new = draws.with_element(number, digest, recent).with_states(number, changed if disturbed else {}, recent)
        if changed and begins:
            new = new.with_order(number, changed)
        left = after.plain()
        self._known.update({name: left[name] for name in changed})
        if new.exact_from != draws.exact_from:  # what a fetch draws from one stream may depend on another one
            self._known.clear()
        usual = amount if number and (not begins or not draws.usual) else draws.usual
        return replace(new, usual=usual, follows=self._begun)
