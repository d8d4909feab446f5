"""Which parallelism a running job goes on with, when that changes: by command, or because ranks are lost.
Pure.

The workers say what there is to divide (:class:`LayoutFacts`); candidates, their costs, and the choice are
:mod:`.strategy`'s. The global batch stays, and the micro-batch: a schedule's micro-batches are of one size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

from flashrecovery.errors import ConfigError
from flashrecovery.plan.model_state import Sharding
from flashrecovery.plan.strategy.layout_places import groups_that_fit
from flashrecovery.plan.strategy.step_cost import MeasuredStep, Prices, estimate, fit
from flashrecovery.plan.strategy.strategy import (
    Excluded,
    Machines,
    ModelShape,
    Strategy,
    StrategyChoice,
    Workload,
    candidates,
    decide,
)
from flashrecovery.plan.words import shortened

_NAMES = ("tp", "pp", "cp", "ep", "dp")
_ALWAYS = frozenset({"tp", "pp", "dp"})
"""Sizes that are said also where they are 1."""
_PLENTY = 2.0**60
"""Bytes of memory if the amount is unknown: memory then excludes nothing."""


@dataclass(frozen=True)
class LayoutFacts:
    """A running job, as reported by its workers.

    Attributes:
        layout: ``tp``, ``pp``, ``cp``, ``ep``, ``dp``.
        layers, hidden, heads, kv_heads, inner, vocab, sequence: of the model.
        sharded: whether the distributed optimizer is used.
        global_batch, micro_batch: samples of a step, and of a micro-batch.
        memory_bytes: of a device; 0: unknown.
        experts, chosen, expert_inner: of a MoE layer: number of experts, experts per token, rows of an expert's MLP.
        dense_layers: number of layers without experts.
        shared_inner: rows of the MLP of shared experts, which process every token; 0: there are none.
        heads_over_cp: context-parallel ranks divide attention heads among them (``cp_comm_type="a2a"``).
        takes: which of ``cp`` and ``ep`` the script can be given; the others stay as they are.
        sequence_parallel: tensor-parallel ranks divide sequences between the layers, too, or did so in an earlier
            layout. Without tensor parallelism no rank does, whatever the script asks for.
        elastic: the number of replicas may change, too.
    """

    layout: Mapping[str, int]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    sequence: int
    global_batch: int
    micro_batch: int
    sharded: bool = False
    memory_bytes: int = 0
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0
    dense_layers: int = 0
    shared_inner: int = 0
    heads_over_cp: bool = False
    takes: str = ""
    sequence_parallel: bool = False
    elastic: bool = False

    @property
    def now(self) -> Strategy:
        """The layout that the job has."""
        return Strategy(**{name: int(size) for name, size in self.layout.items()}, micro_batch=self.micro_batch)

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a step, on all replicas together."""
        return self.global_batch // self.micro_batch

    @property
    def whole_everywhere(self) -> bool:
        """Every rank has the whole state."""
        return not self.sharded and self.now.tp == self.now.pp == self.now.ep == 1

    @property
    def most_cp(self) -> int:
        """The largest context-parallel size that the script could be given."""
        return max(1, self.sequence // 2) if "cp" in self.takes else self.now.cp

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def parse(text: str) -> LayoutFacts:
        return LayoutFacts(**json.loads(text))

    def work(self) -> Workload:
        """Parameters are counted as a GPT's: they serve to compare layouts of one model."""
        dense = self.dense_layers if self.experts else self.layers
        attention = 4 * self.layers * self.hidden * self.hidden
        outside = attention + 2 * dense * self.hidden * self.inner + 2 * self.vocab * self.hidden
        expert = 2 * (self.layers - dense) * self.hidden * self.expert_inner  # one of each layer
        model = ModelShape(
            self.layers,
            self.hidden,
            self.heads,
            self.kv_heads,
            self.expert_inner if self.experts else self.inner,
            self.vocab,
            max(1, outside + self.experts * expert),
            max(1, outside + self.chosen * expert),
            self.experts * expert,
            self.experts,
            self.chosen,
        )
        sharding = Sharding.OPTIMIZER if self.sharded else Sharding.REPLICATED
        return Workload(
            model,
            self.sequence,
            self.global_batch,
            sharding,
            uneven=False,
            most_cp=self.most_cp,
            also_cp=self.now.cp,
            micro_batch=self.micro_batch,
        )


@dataclass(frozen=True)
class StayingFacts:
    """What stays of a job whatever its layout is. ``batches``: what its batches are made of, JSON. ``steps``: that its
    script takes; None: not known."""

    facts: LayoutFacts
    batches: str
    steps: int | None


_FREE = frozenset({"layout", "vocab", "memory_bytes", "sequence_parallel"})
"""Facts that may be others in another layout; a vocabulary may be padded otherwise."""


def why_another_job(before: StayingFacts, now: StayingFacts, plan: str) -> str:
    """Why ``now`` is not the job that was there ``before``, laid out as ``plan`` says; "" if it is."""
    if layout_text(now.facts.now) != plan:
        return (
            f"the script has made the layout {layout_text(now.facts.now)} of it, and the job goes on in {plan}: it has "
            "to take its sizes from what flashrecovery.layout() returns"
        )
    then, here = asdict(before.facts), asdict(now.facts)
    if before.batches:
        then, here = {**json.loads(before.batches), **then}, {**json.loads(now.batches or "{}"), **here}
    if before.steps is not None:
        then["steps"], here["steps"] = before.steps, now.steps
    names = [name for name in {**then, **here} if name not in _FREE]
    odd = [
        f"{name} is {here.get(name)}, and was {then.get(name)}" for name in names if here.get(name) != then.get(name)
    ]
    if not odd:
        return ""
    return (
        f"the script has made another job of it in the layout {plan}: {'; '.join(odd)}. All of that has to be the same "
        "in every layout"
    )


@lru_cache(maxsize=2)
def divides_sequences(facts: str) -> bool:
    """Whether these facts (as text; "": none) say that about tensor-parallel ranks."""
    return facts != "" and LayoutFacts.parse(facts).sequence_parallel


def layout_text(strategy: Strategy) -> str:
    """``tp=2,pp=1,dp=2``; ``tp=1,pp=1,cp=2,ep=4,dp=2``."""
    sizes = {name: getattr(strategy, name) for name in _NAMES}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if name in _ALWAYS or size > 1)


def parse_layout(text: str, facts: LayoutFacts, ranks: int) -> Strategy:
    """``tp=2,pp=1,cp=2,ep=2,dp=1``; what is left out is 1, and ``dp`` as many as there is room for and the batch and
    the experts allow. ``ranks``: how many there are. Raises ConfigError, which says what is allowed."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in _NAMES or name in sizes or not equals or not value.isdecimal() or int(value) < 1:
            raise ConfigError(
                f"--layout {text}: sizes as tp=2,pp=1,cp=1,ep=1,dp=2 are allowed, each once, of 1 or more"
            )
        sizes[name] = int(value)
    found = replace(Strategy(**sizes), micro_batch=facts.micro_batch)
    if "dp" not in sizes:
        found = with_most_replicas(facts, found, ranks)
    why = why_not(facts, found, ranks)
    if why:
        raise ConfigError(f"--layout {text}: {why}")
    return found


def with_most_replicas(facts: LayoutFacts, strategy: Strategy, ranks: int) -> Strategy:
    """The same strategy with as many replicas as fit on ``ranks`` ranks, and as the batch and the experts allow."""
    one = replace(strategy, dp=1)
    return replace(one, dp=max(1, _most_replicas(facts, one, ranks // one.ranks)))


def _most_replicas(facts: LayoutFacts, strategy: Strategy, room: int) -> int:
    """How many, at most ``room``, are allowed beside what else ``strategy`` says; 0: none."""
    unit = strategy.ep // math.gcd(strategy.ep, strategy.cp)
    sizes = range(min(room, facts.micro_batches), 0, -1)
    return next((n for n in sizes if facts.micro_batches % n == 0 and n % unit == 0), 0)


def why_not(facts: LayoutFacts, strategy: Strategy, ranks: int) -> str:
    """Why a job cannot have this layout on ``ranks`` ranks; "" if it can."""
    s = strategy
    if s.ranks > ranks:
        return f"{s.ranks} ranks are needed, and there are {ranks}"
    rows = {"heads": facts.heads, "key and value heads": facts.kv_heads}
    rows |= {"MLP rows": facts.inner, "MLP rows of an expert": facts.expert_inner}
    rows |= {"MLP rows of the shared experts": facts.shared_inner}
    for what, size in rows.items():
        if size % s.tp:
            return f"tp = {s.tp} does not divide {size} {what}"
    if facts.layers % s.pp:
        return f"pp = {s.pp} does not divide {facts.layers} layers"
    if s.cp > 1 and facts.sequence % (2 * s.cp):
        return f"2 x cp = {2 * s.cp} does not divide {facts.sequence} tokens"
    if s.tp > 1 and (facts.experts or facts.sequence_parallel) and facts.sequence % (s.tp * s.cp):
        return f"tp x cp = {s.tp * s.cp} does not divide {facts.sequence} tokens, which is needed for sequence_parallel"
    if facts.heads_over_cp and (facts.heads % (s.tp * s.cp) or facts.kv_heads % (s.tp * s.cp)):
        return (
            f"tp x cp = {s.tp * s.cp} does not divide {facts.heads} heads and {facts.kv_heads} key and value heads, "
            "over which cp_comm_type = a2a cuts"
        )
    if why := _of_experts(facts, s):
        return why
    for name in ("cp", "ep"):
        size, now = getattr(s, name), getattr(facts.now, name)
        if name not in facts.takes and size != now:
            why = f"the script has not asked flashrecovery.layout() for {name}, so it stays {now}"
            loop = " (Megatron-LM's loop takes it where it was launched with more than 1)" if name == "cp" else ""
            return f"{name} = {size}: {why}{loop}"
    if facts.micro_batches % s.dp:
        fitting = [str(n) for n in range(1, facts.micro_batches + 1) if facts.micro_batches % n == 0]
        return (
            f"dp = {s.dp} does not divide the {facts.micro_batches} micro-batches of a step; {', '.join(fitting)} is "
            "allowed"
        )
    return ""


def _of_experts(facts: LayoutFacts, s: Strategy) -> str:
    """Why the experts cannot be so; "" if they can."""
    if s.ep > 1 and not facts.experts:
        return f"ep = {s.ep}: the model has no experts; 1 is allowed"
    if facts.experts and facts.experts % s.ep:
        return f"ep = {s.ep} does not divide {facts.experts} experts"
    if (s.cp * s.dp) % s.ep:
        return f"ep = {s.ep} does not divide the {s.cp * s.dp} ranks of cp x dp, over which experts lie"
    if facts.elastic and s.cp % s.ep and s.ep % s.cp:
        return (
            f"neither of ep = {s.ep} and cp = {s.cp} divides the other, and in an elastic job the ranks at the same "
            "place in every replica have the same experts"
        )
    return ""


_UNSEEN = (
    "MoE layers with tp above 1 need sequence_parallel, and it has not been seen that the script sets it there; on "
    "command they are allowed"
)


def best(facts: LayoutFacts, rooms: int | Sequence[int], least: int, step_s: float = 0.0) -> StrategyChoice:
    """The layout to continue with.

    Args:
        rooms: number of ranks that there is room for, on one node, or on each node; tensor parallelism stays within a
            node.
        least: minimum number of ranks.
        step_s: seconds per step in the current layout.

    Raises NothingFitsError, with the reasons.
    """
    work = facts.work()
    rooms = [rooms] if isinstance(rooms, int) else [room for room in rooms if room > 0]
    ranks, per_node = sum(rooms), max([1, *rooms])
    machines = Machines(max(ranks, 1), per_node, facts.memory_bytes or _PLENTY)
    excluded = Excluded()
    found = []
    groups: dict[int, int] = {}  # of tensor-parallel ranks that fit, by their number
    for one in candidates(work, ranks, machines.per_node, excluded) if ranks > 0 else ():
        if one.tp not in groups:
            groups[one.tp] = groups_that_fit(one.tp, rooms)
        fitting = _within_nodes(facts, one, groups[one.tp])
        if one.tp > 1 and facts.experts and not facts.sequence_parallel:
            excluded.add(_UNSEEN, str(one))
        elif fitting is not None and (why := why_not(facts, fitting, ranks)):
            excluded.add(why.partition(": ")[2] or why, str(fitting))
        elif fitting is None:
            excluded.add("its tensor-parallel ranks would not be on one node each", str(one))
        elif fitting.ranks < least:
            excluded.add(f"fewer than {least} ranks (parallelism.min)", str(fitting))
        else:
            found.append(fitting)
    prices = Prices()
    if step_s > 0:
        here = Machines(facts.now.ranks, max(per_node, min(facts.now.tp, facts.now.ranks)), _PLENTY)
        prices = fit(work, here, [MeasuredStep(facts.now, step_s)])
    choice = decide(work, machines, [estimate(work, machines, one, prices) for one in found], excluded, facts.now)
    return replace(choice, lines=tuple(_words(facts, choice, ranks, excluded)))


def _within_nodes(facts: LayoutFacts, one: Strategy, groups: int) -> Strategy | None:
    """The same layout, with fewer replicas if needed to have each tensor-parallel group on one node; None: impossible.
    ``groups``: number of such groups that fit."""
    if one.ranks <= groups * one.tp:
        return one
    dp = _most_replicas(facts, one, groups // (one.pp * one.cp))
    return replace(one, dp=dp) if dp else None


def _words(facts: LayoutFacts, choice: StrategyChoice, ranks: int, excluded: Excluded) -> Iterator[str]:
    taken, fastest = choice.best, choice.fastest
    memory = f", {taken.memory_bytes / 2**30:.0f} GiB on a device" if facts.memory_bytes else ""
    yield (
        f"{layout_text(taken.strategy)}: {taken.strategy.ranks:,} of {ranks:,} ranks, {taken.step_s:.2g} s a step "
        f"(estimated){memory}."
    )
    yield (
        f"The global batch stays {facts.global_batch} samples: every replica computes "
        f"{facts.micro_batches // taken.strategy.dp} micro-batches."
    )
    if fastest is not taken:
        yield (
            f"{layout_text(fastest.strategy)} would be {1 - fastest.step_s / taken.step_s:.0%} faster, which is not "
            "worth another model parallelism."
        )
    yield "Workers are restarted; nodes, agents and the controller stay, and the state goes from memory to memory."
    others = [line for line in excluded.lines() if "micro-batch does not divide" not in line]
    yield f"{len(choice.ranked):,} layouts fit." + (f" Others do not: {shortened(others, 3)}." if others else "")
