"""The options of ``flashrecovery run``, and of ``flashrecovery adopt``, which has a part of them.

Those of other launchers mean what they mean there; :mod:`flashrecovery.launchers` knows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from flashrecovery.config import CONTROLLER_PORT, parse_fault
from flashrecovery.errors import ConfigError
from flashrecovery.plan.elastic.resize import ReplicaRange

ENVIRONMENT = "FLASHRECOVERY_RUN"
"""An option that is not given may be in the variable ``FLASHRECOVERY_RUN_<OPTION>``."""
_NOT_SETTINGS = ("config_file", "accelerate_config", "module", "no_python", "script", "script_args", "remote_shell")


def _both(name: str) -> tuple[str, ...]:
    """``--a-b`` and, as torchrun takes it, too, ``--a_b``."""
    return (f"--{name}", f"--{name.replace('-', '_')}") if "-" in name else (f"--{name}",)


def _renamed(old: str, new: str) -> click.Option:
    """An option that had another name before the first release: it is refused with the new one."""

    def refuse(_context: click.Context, _option: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError(f"{old} {value}: this option is called {new} now")

    return click.Option([old], expose_value=False, hidden=True, callback=refuse)


def _option(*names: str, **attributes: Any) -> click.Option:
    return click.Option(names, **attributes)


PLACES = (
    _option(*_both("nproc-per-node"), default=None, help="Processes on this node: a number, gpu, cpu, auto."),
    _option("--nnodes", default=None, help="Nodes that train; MIN:MAX: MIN nodes train, the others are spare."),
    _option(*_both("node-rank"), type=int, default=None, help="This node's number; default: in the order of arrival."),
    _option("--spare", is_flag=True, default=None, help="This node is a spare node."),
    _option("--slots", type=int, default=None, help="Most ranks on this node."),
    _option(
        "--parallelism",
        default=None,
        type=click.IntRange(min=1),
        metavar="MIN",
        help="If a rank cannot be replaced, continue in another parallel layout with at least MIN ranks.",
    ),
    _renamed("--replan", "--parallelism"),
    _option(
        "--elastic", default=None, help="MIN:MAX replicas: if a rank cannot be replaced, continue without its replica."
    ),
    _option("--log", type=click.Choice(["0", "all", "none"]), default=None, help="Which ranks' output is shown live."),
)
"""How many ranks there are, and where; a launcher that starts one task per rank decides this itself."""
OWN = (
    _option(*_both("spare-nodes"), type=int, default=None, help="Spare nodes, which replace lost nodes."),
    _option("--node-name", default=None, help="Unique name of this node; default: the host name."),
    _option("--node-address", default=None, help="Address at which other nodes reach this one."),
    _option("--failure-domain", default=None, help="What fails together with this node: its switch, its rack."),
    _option(
        "--gpu-domain",
        type=int,
        default=None,
        help="Neighbouring GPUs that are all lost if one of their processes dies.",
    ),
    _option(
        *_both("master-port"), type=int, default=None, help="Port of the TCPStore, 0: any free port; see --master-addr."
    ),
    _option(
        "--controller",
        default=None,
        help=f"HOST[:PORT] of the controller, on one of the nodes; needed with several nodes; port {CONTROLLER_PORT} "
        f"by default.",
    ),
    _option(
        "--embed-controller/--no-embed-controller", default=None, help="Run the controller on the node that is HOST."
    ),
    _option(
        "--token-file", type=click.Path(path_type=Path), default=None, help="File with the token that all nodes share."
    ),
    _option(*_both("start-method"), default=None, help="zygote: fork workers where that is safe | spawn"),
    _option("--standby", type=int, default=None, help="Number of pre-warmed processes to keep."),
    _option("--standby-device", is_flag=True, default=None, help="Standbys use their GPU from the start."),
    _option(
        "--run-dir",
        type=click.Path(path_type=Path),
        default=None,
        help="Directory for events, logs and the rank table.",
    ),
    _option("--health", default=None, help="Device plugins: auto | none | NAME,NAME"),
    _option("--preflight", is_flag=True, default=None, help="First compute and reduce on each GPU; name a bad one."),
    _option(*_both("max-restarts"), type=int, default=None, help="Restarts before the first step."),
    _option(
        "--auto",
        metavar="[=print]",
        default=None,
        help="Protect a PyTorch script without FlashRecovery calls; =print: print a patch that adds the calls.",
    ),
    _option("--redundancy", default=None, help="auto | replica | neighbor | parity | none"),
    _option(
        "--parity",
        type=int,
        default=None,
        help="With --redundancy parity: ranks of a group that may be lost at once, 1 | 2",
    ),
    _option("--pre-step-copy", default=None, help="Copy a rank's own state before each step: auto | always | never"),
    _renamed("--undo", "--pre-step-copy"),
    _option("--snapshots", default=None, help="Copies that outlive the processes of the job: auto | always | never"),
    _option(
        "--hang-timeout",
        type=float,
        default=None,
        help="A hang in a step is at least so many seconds without progress.",
    ),
    _option(
        "--checkpoint-dir", type=click.Path(path_type=Path), default=None, help="Directory for fallback checkpoints."
    ),
    _option("--checkpoint-interval", default=None, help="Seconds between fallback checkpoints, or `auto`."),
    _option("--resume", is_flag=True, default=None, help="Continue from the newest snapshot or checkpoint."),
    _option("--observe-port", type=int, default=None, help="Port for metrics and a web page; 0: any free port."),
    _option("--observe-host", default=None, help="Address to serve them on (default 127.0.0.1)."),
    _option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        default=None,
        help="YAML file with configuration keys.",
    ),
    _option("--inject", multiple=True, help="Drill: rank=R,fault=sigkill,at=PHASE,step=I (repeatable)."),
    _option("-m", "--module", is_flag=True, default=None, help="The script is a module, as in `python -m`."),
)
OF_OTHER_LAUNCHERS = (
    _option(*_both("rdzv-endpoint"), default=None, help="As for torchrun: the controller's address."),
    _option(*_both("master-addr"), default=None, help="As for torchrun: the controller's address, with --master-port."),
    _option(*_both("rdzv-backend"), default=None, help="As for torchrun: static | c10d; the controller replaces both."),
    _option(*_both("rdzv-id"), default=None, help="As for torchrun: TORCHELASTIC_RUN_ID, only a name here."),
    _option(*_both("rdzv-conf"), default=None, help="As for torchrun: join_timeout sets timeouts.rendezvous_s."),
    _option("--standalone", is_flag=True, default=None, help="As for torchrun: one node, the default."),
    _option(*_both("local-addr"), default=None, help="As for torchrun: same as --node-address."),
    _option("--role", default=None, help="As for torchrun: ROLE_NAME."),
    _option(*_both("log-dir"), default=None, help="As for torchrun: parent of the run directory (default: runs)."),
    _option("-r", "--redirects", default=None, help="As for torchrun: 3 shows no rank; logs are always written."),
    _option("-t", "--tee", default=None, help="As for torchrun: 1, 2, 3 show all ranks; logs are always written."),
    _option(
        *_both("local-ranks-filter"), default=None, help="As for torchrun: 0 shows rank 0, other numbers all ranks."
    ),
    _option(*_both("shutdown-timeout"), default=None, help="As for torchrun: timeouts.shutdown_grace_s, at most 4."),
    _option(*_both("signals-to-handle"), default=None, help="As for torchrun: signals that end the job."),
    _option(*_both("run-path"), is_flag=True, default=None, help="As for torchrun: accepted; this is always so here."),
    _option(*_both("no-python"), is_flag=True, default=None, help="As for torchrun: SCRIPT is a Python program."),
    _option(*_both("monitor-interval"), default=None, help="As for torchrun: accepted, without effect."),
    _option(*_both("event-log-handler"), default=None, help="As for torchrun: accepted, without effect."),
    _option(*_both("duplicate-stdout-filters"), default=None, help="As for torchrun: accepted, without effect."),
    _option(*_both("duplicate-stderr-filters"), default=None, help="As for torchrun: accepted, without effect."),
    _option(*_both("logs-specs"), default=None, help="As for torchrun: refused with an error."),
    _option(*_both("numa-binding"), default=None, help="As for torchrun: refused with an error."),
    _option(*_both("virtual-local-rank"), is_flag=True, default=None, help="As for torchrun: refused with an error."),
    _option("-H", "--hostfile", type=click.Path(path_type=Path), default=None, help="Hosts, as for `deepspeed`."),
    _option("-i", "--include", default=None, help="Use only these of the hostfile: HOST[:SLOT,SLOT...]@HOST..."),
    _option("-e", "--exclude", default=None, help="Leave these of the hostfile out: as for --include."),
    _option(*_both("num-nodes"), type=int, default=None, help="Use only the first hosts of the hostfile."),
    _option(
        *_both("num-gpus"), "--num_accelerators", type=int, default=None, help="Use only the first GPUs of each host."
    ),
    _option(
        *_both("no-ssh"),
        is_flag=True,
        default=None,
        help="With --hostfile: you run this command on every host yourself.",
    ),
    _option(*_both("force-multi"), is_flag=True, default=None, help="Use --remote-shell also for a single host."),
    _option(
        "--remote-shell", default=None, help="With --hostfile: command that runs a program on a host (default: ssh)."
    ),
    _option(
        "--accelerate-config", type=click.Path(path_type=Path), default=None, help="Configuration file of accelerate."
    ),
)
SCRIPT = (click.Argument(["script"]), click.Argument(["script_args"], nargs=-1, type=click.UNPROCESSED))


class RunCommand(click.Command):
    """Options in front of a script. ``--auto`` may have a value, and then with an equals sign: ``--auto=print``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [*self._with_values(args)])

    def _with_values(self, args: Iterable[str]) -> Iterator[str]:
        options = [one for one in self.params if isinstance(one, click.Option) and not one.is_flag]
        with_value = {name for one in options for name in one.opts}
        waiting = iter(args)
        for word in waiting:
            yield "--auto=true" if word == "--auto" else word
            if word == "--" or not word.startswith("-"):  # the script and its own arguments
                yield from waiting
            elif word in with_value and word != "--auto":
                yield from itertools.islice(waiting, 1)


def settings(options: dict[str, Any]) -> dict[str, Any]:
    """Options in the shape of :class:`RunConfig`."""
    values = {name: value for name, value in options.items() if name not in _NOT_SETTINGS}
    inject: tuple[str, ...] = values.pop("inject", ())
    if inject:
        values["inject"] = [parse_fault(text).model_dump() for text in inject]
    if "hang_timeout" in values:
        values["timeouts"] = {**values.get("timeouts", {}), "hang_step_s": values.pop("hang_timeout")}
    if "parallelism" in values:
        values["parallelism"] = {"min": values.pop("parallelism")}
    if "elastic" in values:
        sizes = ReplicaRange.parse(values.pop("elastic"))
        values["elastic"] = {"min": sizes.least, "max": sizes.most}
    if "snapshots" in values:
        values["snapshots"] = {"keep": values.pop("snapshots")}
    checkpoint: dict[str, Any] = {}
    if "checkpoint_dir" in values:
        checkpoint["dir"] = values.pop("checkpoint_dir")
    if "checkpoint_interval" in values:
        checkpoint["interval_s"] = _interval(values.pop("checkpoint_interval"))
    if checkpoint:
        values["checkpoint"] = checkpoint
    observe = {key: values.pop(f"observe_{key}") for key in ("port", "host") if f"observe_{key}" in values}
    if observe:
        values["observe"] = observe
    return values


def _interval(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError as e:
        raise ConfigError(f"--checkpoint-interval {text!r}: allowed: seconds, or auto") from e
