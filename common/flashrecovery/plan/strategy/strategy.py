"""Ways to lay a transformer out on ranks: which there are for a number of ranks, and which one to take. Pure.

A :class:`Strategy` says how many ranks share tensors, stages, sequences and experts, and how large a micro-batch is.
:func:`candidates` lists those that divide everything they have to divide; the memory and the time of each come from
:mod:`.step_cost`, fitted to the job's own steps; :func:`choose` takes the fastest that fits, but keeps what the job has
(tensor, pipeline, context and expert parallelism: then only replicas leave or come, and processes stay) unless another
one is clearly faster. If none fits, the error says of each kind of reason which candidates it has excluded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from flashrecovery.errors import UnsupportedError
from flashrecovery.plan.elastic.sample_order import BatchSplit
from flashrecovery.plan.model_state import Sharding
from flashrecovery.plan.words import shortened

_VOCAB_UNIT = 128
"""Vocabularies are padded to a multiple of this times the tensor parallel size, as Megatron does it."""
CLEARLY_FASTER = 0.1
"""A strategy that restarts workers has to save at least this part of a step."""
_SHOWN = 5


@dataclass(frozen=True)
class ModelShape:
    """A decoder.

    Attributes:
        layers, hidden, heads, kv_heads, vocab: as in its configuration.
        inner: of the MLP, in one expert if there are experts.
        parameters, active_parameters, expert_parameters: as in
        :class:`~flashrecovery.plan.estimates.huggingface.ModelSize`.
        experts: in a layer; 0: none.
        chosen: experts that a token goes to.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    parameters: int
    active_parameters: int
    expert_parameters: int = 0
    experts: int = 0
    chosen: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError, which names the value and what is allowed."""
        for name in ("layers", "hidden", "heads", "kv_heads", "inner", "vocab", "parameters", "active_parameters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: 1 or more is allowed")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads}: a divisor of heads ({self.heads}) is allowed")

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> ModelShape:
        """From a Hugging Face ``config.json``. Raises ValueError as
        :func:`~flashrecovery.plan.estimates.huggingface.model_size` does."""
        from flashrecovery.plan.estimates.huggingface import model_size  # planning alone reads such files

        size = model_size(config)

        def first(*names: str, default: int = 0) -> int:
            return next((int(config[name]) for name in names if config.get(name) is not None), default)

        hidden, heads = first("hidden_size", "n_embd", "n_embed"), first("num_attention_heads", "n_head")
        experts = first("n_routed_experts", "num_experts", "num_local_experts")
        inner = first("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        return ModelShape(
            layers=first("num_hidden_layers", "n_layer"),
            hidden=hidden,
            heads=heads,
            kv_heads=first("num_key_value_heads", default=heads),
            inner=first("moe_intermediate_size", default=inner) if experts else inner,
            vocab=first("vocab_size"),
            parameters=size.parameters,
            active_parameters=size.active_parameters,
            expert_parameters=size.expert_parameters,
            experts=experts,
            chosen=first("num_experts_per_tok"),
        )


@dataclass(frozen=True, slots=True)
class Strategy:
    """``dp`` replicas of ``tp * cp * pp`` ranks each; a layer's experts are over ``ep`` ranks of those of a stage."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    micro_batch: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def model_parallel(self) -> tuple[int, int, int, int]:
        """What cannot change without other models in the processes."""
        return self.tp, self.pp, self.cp, self.ep

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}
        shown = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return ", ".join([*shown, f"dp {self.dp}", f"micro-batch {self.micro_batch}"])


@dataclass(frozen=True)
class Machines:
    """``ranks`` GPUs, ``per_node`` on a node, each with ``memory_bytes``."""

    ranks: int
    per_node: int
    memory_bytes: float

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.per_node < 1 or self.memory_bytes <= 0:
            raise ValueError(
                f"ranks = {self.ranks}, per_node = {self.per_node}, memory_bytes = {self.memory_bytes:g}: more than 0 "
                "is allowed for each"
            )


@dataclass(frozen=True)
class Workload:
    """What must stay the same.

    Attributes:
        model: of the job.
        sequence: tokens of a sample.
        global_batch: samples of a step, exactly.
        sharding: which ranks hold what of the state.
        recompute: activations are computed again in the backward pass.
        uneven: replicas may compute one micro-batch more than others.
        tp_within_node: tensor parallelism over nodes is no candidate.
        most_cp: the largest context parallel size; 1 where the script's attention has none.
        also_cp: a context parallel size that is a candidate beside the powers of two, as the one that the job has.
        micro_batch: samples of a micro-batch, where these stay; 0: powers of two are candidates.
    """

    model: ModelShape
    sequence: int
    global_batch: int
    sharding: Sharding = Sharding.OPTIMIZER
    recompute: bool = False
    uneven: bool = True
    tp_within_node: bool = True
    most_cp: int = 1
    also_cp: int = 1
    micro_batch: int = 0

    def batch_split(self, strategy: Strategy) -> BatchSplit:
        return BatchSplit(self.global_batch, strategy.micro_batch, strategy.dp)

    def padded_vocab(self, tp: int) -> int:
        unit = _VOCAB_UNIT * tp
        return -(-self.model.vocab // unit) * unit


@dataclass
class Excluded:
    """Why candidates are none: how many for each reason, with the first of them as an example."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str) -> None:
        self.counts[reason] += 1
        self.examples.setdefault(reason, example)

    def lines(self) -> tuple[str, ...]:
        return tuple(
            f"{count:,} because {reason} (such as {self.examples[reason]})"
            for reason, count in self.counts.most_common()
        )


class NothingFitsError(UnsupportedError):
    """No parallel strategy fits the ranks and their memory. ``reasons``: a line for each kind of reason.

    Do: give the job more ranks or memory, or allow other strategies; see elastic.md and layouts.md.
    """

    def __init__(self, message: str, reasons: tuple[str, ...]) -> None:
        super().__init__(message)
        self.reasons = reasons


def candidates(work: Workload, ranks: int, per_node: int, excluded: Excluded) -> Iterator[Strategy]:
    """All strategies on at most ``ranks`` ranks, each with as many replicas as there is room for and the batch allows.
    Sizes that do not divide are passed to ``excluded``."""
    model = work.model
    for tp in _sizes(min(ranks, model.heads)):
        problem = _tp_problem(work, tp, per_node)
        if problem:
            excluded.add(problem, f"tp {tp}")
            continue
        for pp in _sizes(min(ranks // tp, model.layers)):
            if model.layers % pp:
                excluded.add(f"pp does not divide {model.layers} layers", f"pp {pp}")
                continue
            for cp in _context_sizes(work, ranks // (tp * pp)):
                if cp > 1 and work.sequence % (2 * cp):
                    excluded.add(f"2 x cp does not divide {work.sequence} tokens", f"cp {cp}")
                    continue
                yield from _with_replicas(work, tp, pp, cp, ranks // (tp * pp * cp), excluded)


def _with_replicas(work: Workload, tp: int, pp: int, cp: int, room: int, excluded: Excluded) -> Iterator[Strategy]:
    experts = work.model.experts
    for micro_batch in [work.micro_batch] if work.micro_batch else _powers(work.global_batch):
        if work.global_batch % micro_batch:
            excluded.add(f"the micro-batch does not divide the batch of {work.global_batch}", f"{micro_batch} samples")
            continue
        micro_batches = work.global_batch // micro_batch
        for ep in _divisors(experts) if experts else (1,):
            unit = ep // math.gcd(ep, cp)  # replicas that together have every expert a whole number of times
            most = min(room, micro_batches) // unit * unit
            even = next((dp for dp in _divisors(micro_batches)[::-1] if dp <= most and dp % unit == 0), 0)
            for dp in sorted({most if work.uneven else 0, even} - {0}, reverse=True):
                yield Strategy(tp, pp, cp, ep, dp, micro_batch)
            if not (most if work.uneven else even):
                text = f"tp {tp}, pp {pp}, cp {cp}, ep {ep}, with room for {room} replicas"
                excluded.add("no number of replicas has each expert equally often and divides the batch", text)


def _context_sizes(work: Workload, room: int) -> list[int]:
    return sorted({*_powers(min(work.most_cp, room)), work.also_cp if work.also_cp <= room else 1})


def _tp_problem(work: Workload, tp: int, per_node: int) -> str:
    model = work.model
    if work.tp_within_node and tp > per_node:
        return f"tp is larger than a node ({per_node} GPUs)"
    for what, size in (("heads", model.heads), ("key and value heads", model.kv_heads), ("MLP rows", model.inner)):
        if size % tp:
            return f"tp does not divide {size} {what}"
    return ""


def _sizes(most: int) -> range:
    return range(1, most + 1)


@lru_cache(maxsize=64)
def _divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def _powers(most: int) -> list[int]:
    """1, 2, 4 ..., up to ``most``."""
    return [1 << i for i in range(max(0, most).bit_length())]


@dataclass(frozen=True)
class Estimate:
    """What a strategy costs. Seconds of a step, and where they go; bytes on the fullest GPU."""

    strategy: Strategy
    step_s: float
    compute_s: float
    bubble_s: float
    tensor_s: float
    data_s: float
    other_s: float
    memory_bytes: float


@dataclass(frozen=True)
class StrategyChoice:
    """The strategy to take.

    Attributes:
        best: what is taken.
        fastest: of all that fit.
        keeping: the fastest that keeps the model parallelism; None: none fits, or there was nothing to keep.
        ranked: the estimates of all that fit, fastest first.
        lines: why, in plain English.
    """

    best: Estimate
    fastest: Estimate
    keeping: Estimate | None
    ranked: tuple[Estimate, ...]
    lines: tuple[str, ...]


def decide(
    work: Workload,
    machines: Machines,
    estimates: Sequence[Estimate],
    excluded: Excluded,
    current: Strategy | None,
) -> StrategyChoice:
    """Take one of the ``estimates``.

    Raises:
        NothingFitsError: there is none, or none fits into memory.
    """
    fitting = []
    for estimate in estimates:
        if estimate.memory_bytes <= machines.memory_bytes:
            fitting.append(estimate)
        else:
            need, have = estimate.memory_bytes / 2**30, machines.memory_bytes / 2**30
            excluded.add(f"a GPU has {have:.0f} GiB", f"{estimate.strategy}, which needs {need:.0f} GiB")
    if not fitting:
        reasons = excluded.lines()
        raise NothingFitsError(
            f"no way to train on {machines.ranks:,} ranks fits; excluded are " + "; ".join(reasons[:_SHOWN]), reasons
        )
    ranked = sorted(fitting, key=lambda e: (e.step_s, e.memory_bytes, str(e.strategy)))
    fastest = ranked[0]
    keeping = None
    if current is not None:
        alike = [e for e in ranked if e.strategy.model_parallel == current.model_parallel]
        keeping = alike[0] if alike else None
    keeps = keeping is not None and keeping.step_s <= fastest.step_s / (1 - CLEARLY_FASTER)
    best = keeping if keeping is not None and keeps else fastest
    lines = _words(work, machines, best, fastest, keeping, current, len(fitting), excluded)
    return StrategyChoice(best, fastest, keeping, tuple(ranked), tuple(lines))


def _words(
    work: Workload,
    machines: Machines,
    best: Estimate,
    fastest: Estimate,
    keeping: Estimate | None,
    current: Strategy | None,
    fitting: int,
    excluded: Excluded,
) -> Iterator[str]:
    batch_split = work.batch_split(best.strategy)
    yield (
        f"{best.strategy}: {best.strategy.ranks:,} of {machines.ranks:,} ranks, {best.step_s:.2f} s a step, "
        f"{best.memory_bytes / 2**30:.0f} of {machines.memory_bytes / 2**30:.0f} GiB on a GPU."
    )
    share = (
        f"every replica computes {batch_split.accumulation} micro-batches"
        if batch_split.even
        else f"replicas compute {batch_split.accumulation} or {batch_split.accumulation - 1} micro-batches"
    )
    yield f"The global batch stays {work.global_batch} samples: {share}."
    parts = {
        "computing": best.compute_s,
        "the pipeline's bubble": best.bubble_s,
        "tensor, context and expert parallel traffic": best.tensor_s,
        "gradients and weights between replicas": best.data_s,
        "the rest": best.other_s,
    }
    named = [f"{seconds:.2f} s {name}" for name, seconds in parts.items() if seconds >= 0.005 * best.step_s]
    yield "Of a step, " + ", ".join(named) + "."
    if current is not None:
        yield stays(current, best.strategy)
        if best is fastest:
            if keeping is not None and keeping is not best:
                gain = 1 - best.step_s / keeping.step_s
                yield f"Keeping the model parallelism would be slower: {keeping.strategy}, by {gain:.0%} of a step."
            elif keeping is None:
                yield "No strategy with the same model parallelism fits."
        else:
            gain = 1 - fastest.step_s / best.step_s
            yield (
                f"{fastest.strategy} would be {gain:.0%} faster, which is less than the {CLEARLY_FASTER:.0%} for which "
                "workers are restarted."
            )
    reasons = excluded.lines()
    yield f"{fitting:,} strategies fit." + (f" Others do not: {shortened(list(reasons), 3)}." if reasons else "")


def stays(old: Strategy, new: Strategy) -> str:
    """What a change of strategy leaves as it is, and what starts again."""
    if old == new:
        return "Nothing changes."
    if old.model_parallel == new.model_parallel:
        verb = "leave" if new.dp < old.dp else "come" if new.dp > old.dp else ""
        what = [f"{abs(new.dp - old.dp)} of {max(old.dp, new.dp)} replicas {verb}"] if verb else []
        if new.micro_batch != old.micro_batch:
            what.append(f"micro-batches have {new.micro_batch} samples in place of {old.micro_batch}")
        return "; ".join(what) + ": processes, models and what they hold stay."
    names = ("tp", "pp", "cp", "ep")
    pairs = zip(names, old.model_parallel, new.model_parallel, strict=True)
    changed = [f"{name} from {a} to {b}" for name, a, b in pairs if a != b]
    return (
        f"{' and '.join(changed)}: workers are restarted, because their models are sharded in another way; nodes and "
        "agents stay, and the state goes from memory to memory."
    )
