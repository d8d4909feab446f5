"""Ranks show each other that they agree: from time to time, what they have learned and their registered objects, what
is said to be replicated and the settings of their models; after a recovery, once the step has been redone, everything
that they hold in common.

What is said to be equal and is not, in a job without a fault, is each rank's own from then on (:class:`Unequal`).

A replacement runs the script from its first line, so whatever the script keeps in plain variables is what it was at the
start. If such a variable decides anything (a learning rate, whether there is an evaluation in this step), the
replacement goes another way than its peers. Mostly that shows in the first step that they take together, in its state
or in the number of its collectives. It may show later: where the variable decides below the block what the next step
does, or counts up to something. So after a recovery the ranks go on to compare, from time to time and after the last
step: a part of each tensor then, since another learning rate changes all of it. When, is said by
:class:`DivergenceCheck`.
"""

from __future__ import annotations

import collections
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import xxhash

from flashrecovery import groups
from flashrecovery.errors import DivergedError
from flashrecovery.groups.accelerator import on_device
from flashrecovery.plan.divergence import Past, judge
from flashrecovery.plan.ownership import drifted
from flashrecovery.state.digest import shard_digests
from flashrecovery.state.shard import Shard
from flashrecovery.worker.consistency.all_equal import disagreement, gather, gather_objects, in_camps, split, union
from flashrecovery.worker.control.interruption import InterruptionClassifier
from flashrecovery.worker.registry import Registry, in_words

_AT_LEAST_EVERY = 64
_HEAD = struct.Struct("<????16s")
_DIGEST = 16
_LOOKED_AT_BYTES = 1 << 20
"""Bytes of a rank's replicated tensors that are looked at, where a part is enough; about 0.2 ms of a core."""
_TURNS = 4
_MANY = 64
"""Of more shards than this, that the same ranks hold, a fourth is compared, another one each time: a tensor takes about
20 us."""
_SHOWN = 5
_SETTING = "setting "
_ADVICE = (
    "Something that is not registered decides what a step does: register it (docs/limits.md). What is meant to differ "
    'between ranks is declared: register(..., per_rank=["NAME"])'
)


def is_due(version: int) -> bool:
    """Whether the ranks compare in the step that begins with ``version``: at 1, 2, 4, ... 64, then every so often."""
    return version > 0 and (
        version % _AT_LEAST_EVERY == 0 or (version < _AT_LEAST_EVERY and version & (version - 1) == 0)
    )


def goes_on(version: int, since: int) -> bool:
    """Whether the ranks, which were shown to agree at ``since`` + 1, are to show it in the step that makes ``version``:
    1, 2, 4, ... 64 steps later, then every so often."""
    return is_due(version - since - 1)


def looks_at_all(version: int) -> bool:
    """Whether :func:`compare_replicas` looks at all of each tensor."""
    return version < _AT_LEAST_EVERY


def compare_habits(registry: Registry) -> tuple[list[str], bool]:
    """All ranks adopt what any of them has learned; a collective of the recovery's own group.

    Returns:
        The registered objects that have turned out to differ between the ranks, which are each rank's own from now on;
        and whether any rank has learned of a silent change that it had not known. Both are the same on all ranks, also
        where a replacement has just learned what the others know.

    """
    habits = registry.habits
    compared = dict(sorted(registry.shared_states().items()))
    silent = xxhash.xxh3_128_digest("\n".join(registry.silent()).encode())
    news = not {*registry.silent()} <= {*habits.silent}
    row = _HEAD.pack(habits.undo, habits.changed, habits.late, news, silent) + b"".join(
        xxhash.xxh3_128_digest(state) for state in compared.values()
    )
    rows = gather(row)
    differing = [
        name
        for i, name in enumerate(compared)
        if len({r[_HEAD.size + i * _DIGEST : _HEAD.size + (i + 1) * _DIGEST] for r in rows}) > 1
    ]
    heads = [_HEAD.unpack_from(r) for r in rows]
    # News that the control thread has received since the row was written is kept.
    undo, reseal, late = (any(head[i] for head in heads) for i in range(3))
    habits.agree(undo=undo, reseal=reseal, late=late, own=differing)
    different = len({head[4] for head in heads}) > 1
    registry.adopt_silent(union(registry.silent()) if different else registry.silent())
    return differing, different or any(head[3] for head in heads)


@dataclass(frozen=True)
class Unequal:
    """What was taken to be equal on several ranks and is not, the same on all ranks: names of shards, and of settings
    (:meth:`.Registry.settings`)."""

    shards: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.shards or self.settings)


def compare_replicas(registry: Registry, version: int, past: Past) -> Unequal:
    """Compare what is said to be equal on several ranks: shards, their structure included, and the settings of models;
    a collective of the recovery's own group. All of each tensor is compared at first; later a part, another one each
    time, of some of them (:func:`in_turn`).

    Args:
        past: of this rank's process.

    Raises:
        DivergedError: on all ranks, if replacements alone differ from the others.
    """
    found = _whole if looks_at_all(version) else partial(_in_turn, turn=version // _AT_LEAST_EVERY)

    def digests() -> dict[str, str]:
        shared = found([s for s in registry.tensor_shards() if len(s.holders) > 1])
        return shared | {_SETTING + n: xxhash.xxh3_128_hexdigest(d) for n, d in registry.settings().items()}

    mine = digests()
    holders = {shard.name: shard.holders for shard in registry.tensor_shards()}
    everybody = gather_objects((past, _together(mine, holders)))
    if not split([summary for _, summary in everybody]):
        return Unequal()
    closer = split(gather_objects(mine))
    # Version 1 is made of the script's start, where a replacement is like all others.
    pasts = [theirs for theirs, _ in everybody]
    replaced = {rank for rank, theirs in enumerate(pasts) if theirs.joined >= 0 and version > 1}
    if odd := {name: camps for name, camps in closer.items() if not drifted(camps, replaced)}:
        named = {in_words(n.removeprefix(_SETTING)) if n.startswith(_SETTING) else n: c for n, c in odd.items()}
        raise _diverged(f"the ranks do not agree at version {version}", named, pasts)
    settings = tuple(name.removeprefix(_SETTING) for name in closer if name.startswith(_SETTING))
    return Unequal(tuple(name for name in closer if not name.startswith(_SETTING)), settings)


def show_equal(
    registry: Registry, version: int, past: Past, *, tensors: bool = True, since: int | None = None, turn: int = 0
) -> None:
    """All ranks hold equal pieces of ``version``, have equal common state, and have made equally many collectives since
    the recovery; a collective of the recovery's own group.

    Args:
        past: of this rank's process.
        tensors: of the pieces that consist of tensors, too.
        since: None in the first step after a recovery. Later the version at which the job went on, and of tensors only
            a part is compared.
        turn: of which tensors, and which part (:func:`in_turn`); 0: the first elements of each one.

    Raises:
        DivergedError: on all ranks, if not.
    """
    later = partial(_in_turn, turn=turn) if turn else _beginnings
    digest = _whole if since is None else later
    found = disagreement(_summary(registry, tensors, digest), lambda: _details(registry, tensors, digest))
    if found:
        when = f"after the recovery the ranks have redone step {version - 1}, and do not agree at version {version}"
        if since is not None:
            when = f"the ranks do not agree at version {version}, since a recovery at step {since}"
        raise _diverged(when, found, gather_objects(past))


def _diverged(when: str, found: Mapping[str, Sequence[Sequence[int]]], pasts: Sequence[Past]) -> DivergedError:
    """The same on all ranks."""
    who = judge(found, pasts)
    text = f"{when}: {in_camps(found)}. {who}. {_ADVICE}"
    return DivergedError(text, suspects=who.suspects, alike=who.alike, partly=who.partly)


_Digest = Callable[[Sequence[Shard]], dict[str, str]]


def _whole(shards: Sequence[Shard]) -> dict[str, str]:
    return shard_digests({s.name: (list(s.tensors().values()), s.spec()) for s in shards}, on_device)


def _beginnings(shards: Sequence[Shard]) -> dict[str, str]:
    """A digest of the first elements of each tensor."""
    return _parts([(shard, 0) for shard in shards])


def _in_turn(shards: Sequence[Shard], turn: int) -> dict[str, str]:
    """A digest of other elements in each turn."""
    return _parts(in_turn(shards, turn))


def in_turn(shards: Sequence[Shard], turn: int) -> list[tuple[Shard, int]]:
    """Which shards are compared in this turn, and which piece of each of their tensors, counted from 0. The same on all
    ranks that hold them: by their names, so that a shard that one rank alone has moves no other."""
    count = collections.Counter(shard.holders for shard in shards)
    return [
        (shard, turn // _TURNS if count[shard.holders] > _MANY else turn)
        for shard in shards
        if count[shard.holders] <= _MANY or zlib.crc32(shard.name.encode()) % _TURNS == turn % _TURNS
    ]


def _parts(shards: Sequence[tuple[Shard, int]]) -> dict[str, str]:
    """Digests of one piece of each tensor."""
    tensors = [(shard.name, list(shard.tensors().values()), piece) for shard, piece in shards]
    each = _LOOKED_AT_BYTES // max(sum(len(ts) for _, ts, _ in tensors), 1)
    parts = {name: ([_elements(t, each, piece) for t in ts], None) for name, ts, piece in tensors}
    return shard_digests(parts, on_device)


def _elements(tensor: torch.Tensor, nbytes: int, piece: int) -> torch.Tensor:
    """``nbytes`` bytes of a tensor, from ``piece`` times as many on; behind its end, from its beginning again."""
    count = max(nbytes // tensor.element_size(), 1)
    start = piece % max(-(-tensor.numel() // count), 1) * count
    return tensor.detach().reshape(-1)[start : start + count]


def _details(registry: Registry, tensors: bool, digest: _Digest) -> dict[str, str]:
    found = digest([s for s in registry.tensor_shards() if tensors and len(s.holders) > 1])
    for name, state in registry.shared_states().items():
        found[f"registered object {name}"] = xxhash.xxh3_128_hexdigest(state)
    for name, state in registry.settings().items():
        found[in_words(name)] = xxhash.xxh3_128_hexdigest(state)
    return found | _collectives()


def _summary(registry: Registry, tensors: bool, digest: _Digest) -> dict[str, str]:
    """One digest for all pieces that the same ranks hold."""
    holders = {shard.name: shard.holders for shard in registry.tensor_shards()}
    return _together(_details(registry, tensors, digest), holders)


def _together(digests: Mapping[str, str], holders: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """One of all digests of what the same ranks hold."""
    together: dict[str, xxhash.xxh3_128] = {}
    for name, value in sorted(digests.items()):
        key = name if name.startswith("number of") else f"held by {holders.get(name, 'all')}"
        together.setdefault(key, xxhash.xxh3_128()).update(f"{name}={value};".encode())
    return {key: hasher.hexdigest() for key, hasher in together.items()}


def _collectives() -> dict[str, str]:
    return {
        f"number of collectives in group {group.name} of {group.members:x}": str(group.progress.collectives)
        for group in groups.groups()
        if group.size > 1 and not group.request.sparse
    }


class DivergenceCheck:
    """Decides when one rank proves that it agrees with its peers.

    Args:
        tensors: whether tensors are compared, too (``verify``).
        replacement: this process fills the place of one that has died.
    """

    def __init__(self, registry: Registry, stops: InterruptionClassifier, *, tensors: bool, replacement: bool) -> None:
        self._registry = registry
        self._stops = stops
        self._tensors = tensors
        self._replacement = replacement
        self._past = Past()
        self._since = -1  # the version at which the job went on the last time; -1: there was no recovery
        self.due = False
        """The next step is the first one after a recovery."""

    def resumed(self, version: int, generation: int) -> None:
        """The generation decides whether the next step is proved, for it is equal on all ranks. How a rank came here is
        not: a recovery may find one rank in its first step, and another one still waiting for the word to begin."""
        self.due = generation > 0
        self._since = version if self.due else -1
        self._past = self._past.resumed(version, replacement=self._replacement)

    def before_commit(self, version: int) -> Unequal | None:
        """``version`` is about to be committed. Returns what is said to be equal and is not; None if another rank has
        died before that was known. Raises DivergedError.

        In the step after a recovery a replacement has what another rank has, so all must have the same; but at version
        1 all have made the script's first step.
        """
        after = not self.due and self._since >= 0 and goes_on(version, self._since)
        unequal: Unequal | None = Unequal()
        compared = whole = False
        if version == 1 or after or (not self.due and is_due(version)):
            unequal = self._compare_replicas(version)
            if unequal is None or unequal:
                return unequal
            compared, whole = True, looks_at_all(version)
        shown = True
        if self.due:
            shown = self._show_equal(version)
            whole = whole or self._tensors
            compared = compared or whole
        elif after:
            shown = self._show_equal(version, self._since, turn=(version - self._since) // _AT_LEAST_EVERY)
        if compared and shown:
            # A part is looked at in turn: what has its turn later was alike when it had it the last time.
            alike = version if whole else max(self._past.alike, version - _TURNS * _AT_LEAST_EVERY)
            self._past = replace(self._past, alike=alike, whole=version if whole else self._past.whole)
        return unequal

    def _compare_replicas(self, version: int) -> Unequal | None:
        try:
            return compare_replicas(self._registry, version, self._past)
        except RuntimeError as e:
            if not self._stops.explain(e):
                raise
            return None

    def committed(self) -> None:
        self.due = False

    def after_the_last_step(self, version: int) -> None:
        """Raises DivergedError."""
        if self._since >= 0:
            self._show_equal(version, self._since)

    def _show_equal(self, version: int, since: int | None = None, turn: int = 0) -> bool:
        """Show that the ranks agree. False if another rank dies meanwhile: then it is done after the next recovery."""
        try:
            show_equal(self._registry, version, self._past, tensors=self._tensors, since=since, turn=turn)
        except RuntimeError as e:
            if not self._stops.explain(e):
                raise
            return False
        return True
