"""``flashrecovery strategies``: the parallel layouts of a model on a number of ranks, ranked, and why the first is the
one to take."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from rich.table import Table

from flashrecovery.cli.measured import measure
from flashrecovery.cli.output import make_console, seconds_text
from flashrecovery.errors import ConfigError
from flashrecovery.events import RunFiles
from flashrecovery.plan.model_state import Sharding
from flashrecovery.plan.strategy.step_cost import MeasuredStep, choose
from flashrecovery.plan.strategy.strategy import Machines, ModelShape, Strategy, StrategyChoice, Workload

_GIB = float(1 << 30)
_SIZES = tuple(field.name for field in dataclasses.fields(Strategy))


class ModelFile(BaseModel):
    """The description of a model and its batch: the keys of MODEL.yaml."""

    model_config = ConfigDict(extra="forbid")
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    vocab: PositiveInt
    sequence: PositiveInt
    batch: PositiveInt
    kv_heads: PositiveInt | None = None
    inner: PositiveInt | None = None
    experts: int = Field(0, ge=0)
    experts_per_token: int = Field(0, ge=0)

    def shape(self) -> ModelShape:
        """Counted as a LLaMA, with experts as a Mixtral."""
        config: dict[str, Any] = {
            "model_type": "mixtral" if self.experts else "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads,
            "intermediate_size": self.inner or 4 * self.hidden,
            "vocab_size": self.vocab,
        }
        if self.experts:
            config |= {"num_local_experts": self.experts, "num_experts_per_tok": self.experts_per_token}
        return ModelShape.from_config(config)


@dataclass(frozen=True)
class _Options:
    """Those of the command."""

    ranks: int
    memory_gib: float
    gpus_per_node: int
    sharding: str
    recompute: bool
    even: bool
    most_cp: int
    current: str | None
    run_dir: Path | None
    top: int
    as_json: bool


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--ranks", type=click.IntRange(min=1), required=True, help="GPUs that there are.")
@click.option("--memory-gib", type=float, required=True, help="Of a GPU.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), default=8, show_default=True)
@click.option(
    "--sharding",
    type=click.Choice([s.value for s in Sharding]),
    default=Sharding.OPTIMIZER.value,
    help="replicated: DDP. optimizer: ZeRO-1/2, Megatron's distributed optimizer. full: FSDP, ZeRO-3.",
)
@click.option("--recompute", is_flag=True, help="Activations are computed again in the backward pass.")
@click.option("--even", is_flag=True, help="All replicas must compute as many micro-batches (DeepSpeed).")
@click.option("--most-cp", type=click.IntRange(min=1), default=1, show_default=True, help="Context parallel size.")
@click.option("--current", default=None, metavar="tp=2,pp=4,dp=8", help="The current layout; kept if possible.")
@click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path),
    default=None,
    help="Run directory of a job with the layout --current; costs are fitted to its measured steps.",
)
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Number of layouts to show.")
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def strategies(model: Path, **options: Any) -> None:
    """Rank the parallel layouts of a model on a number of ranks: tensor, pipeline, context, expert and data parallel
    sizes, and the micro-batch. MODEL is a YAML file with layers, hidden, heads, vocab, sequence and batch (samples of a
    step), and if need be kv_heads, inner, experts and experts_per_token.

    Ends with an error, and says why each kind of candidate is none, if nothing fits.
    """
    wanted, described = _Options(**options), _model(model)
    had = None if wanted.current is None else _strategy(wanted.current)
    try:
        work = Workload(
            described.shape(),
            described.sequence,
            described.batch,
            Sharding(wanted.sharding),
            recompute=wanted.recompute,
            uneven=not wanted.even,
            most_cp=wanted.most_cp,
        )
        machines = Machines(wanted.ranks, wanted.gpus_per_node, wanted.memory_gib * _GIB)
        found = choose(work, machines, _measured(wanted.run_dir, had), had)
    except ValueError as e:
        raise ConfigError(f"{model}: {e}") from e
    if wanted.as_json:
        click.echo(json.dumps(_plain(found, wanted.top), indent=2))
        return
    console = make_console()
    for line in found.lines:
        console.print(line, highlight=False, markup=False)
    table = Table("", *_SIZES, "ranks", "step", "GiB a GPU", box=None)
    for number, each in enumerate(found.ranked[: wanted.top], 1):
        sizes = [str(getattr(each.strategy, name)) for name in _SIZES]
        mark = "*" if each is found.best else ""
        cost = seconds_text(each.step_s), f"{each.memory_bytes / _GIB:.1f}"
        table.add_row(f"{number}{mark}", *sizes, f"{each.strategy.ranks:,}", *cost)
    console.print(table)


def _model(path: Path) -> ModelFile:
    try:
        return ModelFile.model_validate(yaml.safe_load(path.read_text()))
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}: no YAML: {e}") from e
    except ValidationError as e:
        first = e.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}") from e


def _strategy(text: str) -> Strategy:
    """``tp=2,pp=4,dp=8``. Raises ConfigError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in _SIZES or name in sizes or not equals or not value.isdecimal() or int(value) < 1:
            raise ConfigError(
                f"--current {text}: {', '.join(_SIZES)}, each once with a number, as tp=2,dp=8, is allowed"
            )
        sizes[name] = int(value)
    return Strategy(**sizes)


def _measured(run_dir: Path | None, had: Strategy | None) -> tuple[MeasuredStep, ...]:
    """The steps of the job in a run directory. Raises ConfigError if it is not a job of this strategy."""
    if run_dir is None:
        return ()
    if had is None:
        raise ConfigError("--run needs --current: the layout whose steps were measured")
    seen = measure(RunFiles(run_dir).events())
    if seen.step_s <= 0:
        raise ConfigError(f"--run {run_dir}: no step has been measured there")
    if seen.ranks != had.ranks:
        raise ConfigError(f"--run {run_dir}: a job of {seen.ranks} ranks, and --current has {had.ranks}")
    return (MeasuredStep(had, seen.step_s),)


def _plain(found: StrategyChoice, top: int) -> dict[str, Any]:
    return {
        "why": list(found.lines),
        "best": dataclasses.asdict(found.best),
        "ranked": [dataclasses.asdict(each) for each in found.ranked[:top]],
    }
