"""NeMo-Run with FlashRecovery: a plugin for any task that NeMo-Run starts by torchrun, and a task that uses it::

    pip install nemo_run
    python examples/gpt/launchers/nemo_run_plugin.py --nproc-per-node 4 -- --steps 200

Megatron-Bridge's launch scripts take such plugins, too: give it instead of ``FaultTolerancePlugin``, which replaces
torchrun by a launcher that restarts. NeMo-Run asks for ``torchrun`` by its name, so what the plugin does is put the
stand-ins of ``flashrecovery shim`` first in the task's PATH.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nemo_run as run

from flashrecovery.launchers import shim

GPT = Path(__file__).resolve().parents[1]


@dataclass(kw_only=True)
class FlashRecoveryPlugin(run.Plugin):  # type: ignore[misc]  # untyped where NeMo-Run is not installed
    """Start the task's ranks by ``flashrecovery run`` instead of torchrun. NeMo-Run writes its fields down as JSON.

    Attributes:
        folder: where the stand-ins are: a path on the nodes, in the image or in a shared directory.
        options: of ``flashrecovery run``, in front of those that NeMo-Run gives to torchrun.
        write: write the stand-ins now, with this interpreter; else they are in the image (``RUN flashrecovery shim
            FOLDER OPTIONS``).
    """

    folder: str
    options: list[str] = field(default_factory=lambda: ["--standby", "1"])
    write: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    def setup(self, task: Any, executor: Any) -> None:
        """Called by NeMo-Run for each task."""
        if self.write:
            shim.write(Path(self.folder), self.options)
        path = executor.env_vars.get("PATH", os.environ["PATH"])
        executor.env_vars |= {**self.environment, "PATH": f"{self.folder}:{path}"}
        executor.launcher = run.Torchrun()


def main() -> None:
    """Train ``train_ddp.py`` on this machine."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nproc-per-node", type=int, default=4)
    p.add_argument("--folder", type=Path, default=Path("runs/nemo-run"), help="for the stand-ins and the run directory")
    p.add_argument("--inject", help="a fault, as of `flashrecovery run`")
    p.add_argument("flags", nargs="*", help="of the script")
    args = p.parse_args()
    folder = args.folder.resolve()
    options = ["--standby", "1", "--run-dir", str(folder / "run"), *(["--inject", args.inject] if args.inject else [])]
    task = run.Script(path=str(GPT / "train_ddp.py"), entrypoint="python", args=args.flags)
    executor = run.LocalExecutor(ntasks_per_node=args.nproc_per_node)
    run.run(task, executor=executor, plugins=[FlashRecoveryPlugin(folder=str(folder / "shims"), options=options)])


if __name__ == "__main__":
    main()
