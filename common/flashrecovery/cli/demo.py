"""``flashrecovery demo``: a small GPT is trained twice on this machine, once with a rank killed, to the same end.

The scripts are those of ``examples/gpt``, which the installed package has with it (``setup.py``).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

import flashrecovery
from flashrecovery.errors import ConfigError

_DIGEST = re.compile(r"^digest rank=(\d+) ([0-9a-f]{64})$", re.MULTILINE)


@click.command()
@click.option("--nproc-per-node", "ranks", type=click.IntRange(2), default=4, show_default=True, help="Ranks.")
@click.option("--steps", type=click.IntRange(4), default=60, show_default=True, help="Of each training.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Directory for logs and events.")
def demo(ranks: int, steps: int, run_dir: Path | None) -> None:
    """Train a small GPT twice, once with a rank killed in the middle, and compare the ends bit for bit."""
    folder = Path(tempfile.mkdtemp(prefix="flashrecovery-demo-")) if run_dir is None else run_dir
    script = _script()
    kill = ("--inject", f"rank=1,fault=sigkill,at=backward,step={steps // 2}")
    ends = []
    for name, what, options in (
        ("undisturbed", "no rank is killed", ()),
        ("killed", f"rank 1 is killed in the backward of step {steps // 2}", kill),
    ):
        click.secho(f"==> {ranks} ranks train {steps} steps; {what}", bold=True)
        ends.append(_train(folder / name, script, ranks, steps, options))
    same = ends[0] == ends[1] and len(ends[0]) == ranks
    click.secho(f"==> flashrecovery report {folder / 'killed'}", bold=True)
    subprocess.run([*_COMMAND, "report", str(folder / "killed")], check=False)
    click.secho(
        "==> parameters, optimizer state and random streams of all ranks are the same, bit for bit"
        if same
        else "==> the ends differ",
        bold=True,
        fg="green" if same else "red",
    )
    sys.exit(0 if same else 1)


_COMMAND = (sys.executable, "-m", "flashrecovery.cli.main")


def _script() -> Path:
    """The example, where the package is installed or in a checkout. Raises ConfigError."""
    package = Path(flashrecovery.__file__).resolve().parent
    for folder in (package / "demo", package.parents[1] / "examples" / "gpt"):
        if (folder / "train_ddp.py").exists():
            return folder / "train_ddp.py"
    raise ConfigError(f"{package} has no demo with it")


def _train(run_dir: Path, script: Path, ranks: int, steps: int, options: Sequence[str]) -> dict[str, str]:
    """One launch. Returns the digest of each rank's end. Exits if the launch fails."""
    launch = [*_COMMAND, "run", "--nproc-per-node", str(ranks), "--standby", "1", "--run-dir", str(run_dir), *options]
    done = subprocess.run([*launch, str(script), "--steps", str(steps), "--digest"], check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)
    logs = (run_dir / "logs").glob("rank*.log")
    return {rank: digest for log in logs for rank, digest in _DIGEST.findall(log.read_text())}
