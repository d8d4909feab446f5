"""torchrun's options (torch 2.13, torch/distributed/run.py): taken, without a meaning here, or refused by name.

Each option of torchrun is in exactly one of :data:`TAKEN`, :data:`NO_MEANING` and :data:`REFUSED`, by its name in
torchrun's parser; a unit test compares them with the installed torch. :func:`translated` turns the taken ones into keys
of :class:`~flashrecovery.config.RunConfig`. Its variables ``PET_<OPTION>`` are read by :func:`from_environment`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrecovery.errors import ConfigError
from flashrecovery.launchers.launch import Options

_NODES = "nnodes nproc_per_node node_rank master_addr master_port local_addr standalone"
_MEETING = "rdzv_backend rdzv_endpoint rdzv_id rdzv_conf"
_PROCESSES = "start_method role module no_python run_path max_restarts signals_to_handle shutdown_timeout"
_OUTPUT = "log_dir redirects tee local_ranks_filter"
TAKEN = frozenset(f"{_NODES} {_MEETING} {_PROCESSES} {_OUTPUT}".split())
NO_MEANING = {
    "monitor_interval": "nothing is polled for: the kernel tells the agent at once that a process has ended",
    "event_log_handler": "events are written to the run directory, as events.jsonl",
    "duplicate_stdout_filters": "logs are not copied by lines; those of all ranks are in the run directory, in logs/",
    "duplicate_stderr_filters": "logs are not copied by lines; those of all ranks are in the run directory, in logs/",
}
REFUSED = {
    "logs_specs": "logs are always written to the run directory, in logs/: leave it out, and see --run-dir and --log",
    "numa_binding": "processes are not bound: leave it out, and let the script bind itself "
    "(os.sched_setaffinity, with LOCAL_RANK)",
    "virtual_local_rank": "every rank sees all GPUs and has its own LOCAL_RANK: leave it out, and let the script use "
    "LOCAL_RANK",
}
_NO_VARIABLE = frozenset({"logs_specs", "numa_binding"})
_FLAGS = frozenset({"standalone", "module", "no_python", "run_path", "virtual_local_rank"})
_ENDING_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
LONGEST_GRACE_S = 4.0
"""The most that ``timeouts.shutdown_grace_s`` may be."""


@dataclass(frozen=True)
class Translated:
    """Keys of RunConfig, in its shape, the folder in which run directories are made, and what the user is to know."""

    values: dict[str, Any]
    runs: Path | None
    notices: tuple[str, ...]


def from_environment(environ: Mapping[str, str]) -> Options:
    """What the variables ``PET_<OPTION>`` say, which torchrun reads for the options that are not given.

    Raises:
        ConfigError: a flag's variable is no number.
    """
    found: Options = {}
    for name in sorted((TAKEN | NO_MEANING.keys() | REFUSED.keys()) - _NO_VARIABLE):
        variable = f"PET_{name.upper()}"
        value = environ.get(variable, "")
        if not value:
            continue
        if name not in _FLAGS:
            found[name] = value
        elif not value.isdigit():
            raise ConfigError(f"{variable} = {value!r}: allowed: 0 and 1")
        elif int(value):
            found[name] = True
    return found


def translated(options: Options, others: Mapping[str, Any]) -> Translated:
    """torchrun's ``options`` as keys of RunConfig; options that are not torchrun's are passed on as they are.

    Args:
        options: as they were written; missing ones were not given.
        others: keys that are set elsewhere, in the configuration file: several nodes may stand there.

    Raises:
        ConfigError: one is refused, or has a value that is not allowed.
    """
    given = dict(options)
    for name, instead in REFUSED.items():
        if given.pop(name, None):
            raise ConfigError(f"{_spelled(name)}: {instead}")
    useless = [(name, why) for name, why in NO_MEANING.items() if given.pop(name, None)]
    notices = [f"{_spelled(name)} has no meaning here: {why}" for name, why in useless]
    values: dict[str, Any] = {}
    _nodes(given, values, notices)
    _meeting_point(given, values, {**others, **values})
    _waiting(given, values, notices)
    _output(given, values, notices)
    _processes(given, values, notices)
    runs = given.pop("log_dir", None)
    return Translated({**given, **values}, Path(runs) if runs is not None else None, tuple(notices))


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")


def _nodes(given: Options, values: dict[str, Any], notices: list[str]) -> None:
    """``--nnodes N``, or ``MIN:MAX``: the number of ranks never changes here, so the nodes beyond MIN are spare."""
    text = given.pop("nnodes", None)
    if text is not None:
        least, most = _range(str(text))
        values["nnodes"] = least
        spare = given.get("spare_nodes")
        if least < most:
            if spare is not None and spare != most - least:
                raise ConfigError(f"--nnodes {text} means {most - least} spare nodes, and --spare-nodes {spare} others")
            values["spare_nodes"] = most - least
            notices.append(
                f"--nnodes {text}: {least} of the nodes train and {most - least} wait as spare ones, for the number of "
                f"ranks never changes; --nnodes {most} lets all of them train"
            )
    if "nproc_per_node" in given:
        values["nproc_per_node"] = processes(str(given.pop("nproc_per_node")))
    if "local_addr" in given:
        given.setdefault("node_address", given.pop("local_addr"))
    given.pop("local_addr", None)


def _range(text: str) -> tuple[int, int]:
    numbers = text.split(":")
    if not (len(numbers) in (1, 2) and all(n.isdigit() for n in numbers)):
        raise ConfigError(f"--nnodes {text!r}: allowed: a number of nodes >= 1, or MIN:MAX")
    least, most = int(numbers[0]), int(numbers[-1])
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes {text!r}: allowed: 1 <= MIN <= MAX")
    return least, most


def processes(text: str) -> int:
    """The number that ``--nproc-per-node`` asks for: a number, or ``gpu``, ``cpu``, ``auto``. Raises ConfigError."""
    if text.isdigit() and int(text):
        return int(text)
    if text not in ("gpu", "cpu", "auto"):
        raise ConfigError(f"--nproc-per-node {text!r}: allowed: a number >= 1, gpu, cpu, auto")
    if text != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
        if text == "gpu":
            raise ConfigError("--nproc-per-node gpu: torch sees no GPU on this machine")
    return len(os.sched_getaffinity(0))


def _meeting_point(given: Options, values: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Where the nodes meet: the controller's address. One node alone needs none, whatever is said."""
    backend = given.pop("rdzv_backend", "static")
    if backend not in ("static", "c10d"):
        raise ConfigError(
            f"--rdzv-backend {backend}: allowed: static, c10d. The nodes meet at the controller, and need no other "
            "server: leave it out, and write --rdzv-endpoint HOST:PORT with HOST one of the nodes"
        )
    standalone = given.pop("standalone", None)
    endpoint = given.pop("rdzv_endpoint", None)
    address = given.pop("master_addr", None)
    spare = given.get("spare_nodes", others.get("spare_nodes", 0))
    nodes = _number(others.get("nnodes", 1)) + _number(spare)
    if nodes <= 1:
        return
    if standalone:
        raise ConfigError(f"--standalone is for one node, and there are {nodes} (nnodes, and spare ones)")
    if "controller" in given:
        return
    if endpoint:
        values["controller"] = endpoint
    elif address:
        port = given.pop("master_port", None)  # torchrun's nodes meet there, too; each store has its own port
        values["controller"] = f"{address}:{port}" if port else address


def _number(value: Any) -> int:
    """What is no number is said, by name, when the configuration is checked."""
    return int(value) if isinstance(value, int) or str(value).isdigit() else 0


def _waiting(given: Options, values: dict[str, Any], notices: list[str]) -> None:
    """Time-outs: how long nodes wait for each other, and how long processes may take to end."""
    timeouts: dict[str, float] = {}
    for part in filter(None, given.pop("rdzv_conf", "").split(",")):
        key, sep, value = part.partition("=")
        if not sep or not key.strip():
            raise ConfigError(f"--rdzv-conf: {part!r} is not KEY=VALUE")
        if key.strip() in ("timeout", "join_timeout"):
            timeouts["rendezvous_s"] = _seconds("--rdzv-conf", part, value)
        else:
            notices.append(f"--rdzv-conf {part.strip()} has no meaning here: the nodes meet at the controller")
    if "shutdown_timeout" in given:
        text = str(given.pop("shutdown_timeout"))
        grace_s = _seconds("--shutdown-timeout", text, text)
        if grace_s > LONGEST_GRACE_S:
            notices.append(f"--shutdown-timeout {text}: at most {LONGEST_GRACE_S:g} s; all ends within 5 s")
        timeouts["shutdown_grace_s"] = min(grace_s, LONGEST_GRACE_S)
    if timeouts:
        values["timeouts"] = timeouts
    signals = given.pop("signals_to_handle", "")
    others = {name.strip() for name in signals.split(",") if name.strip()} - _ENDING_SIGNALS
    if others:
        raise ConfigError(
            f"--signals-to-handle {signals}: {', '.join(sorted(others))} does not end a job here; allowed: "
            f"{', '.join(sorted(_ENDING_SIGNALS))}. SIGUSR1 and SIGUSR2 are passed on to ranks that have a handler"
        )


def _seconds(option: str, whole: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as e:
        raise ConfigError(f"{option} {whole!r}: a number of seconds is needed") from e
    if value <= 0:
        raise ConfigError(f"{option} {whole!r}: a number of seconds > 0 is needed")
    return value


def _output(given: Options, values: dict[str, Any], notices: list[str]) -> None:
    """Which ranks are shown. What any rank prints is in the run directory in each case, in one file a rank."""
    shown: str | None = None
    tee, redirects = (_streams(name, given.pop(name, "0")) for name in ("tee", "redirects"))
    ranks = given.pop("local_ranks_filter", "")
    if redirects == "3":
        shown = "none"
    elif redirects != "0":
        notices.append(f"--redirects {redirects} has no meaning here: stdout and stderr of a rank go to one file")
    if tee != "0":
        shown = "all"
    if ranks:
        if not all(part.strip().isdigit() for part in ranks.split(",")):
            raise ConfigError(f"--local-ranks-filter {ranks!r}: numbers with commas between are needed")
        shown = "0" if {int(part) for part in ranks.split(",")} == {0} else "all"
        if shown == "all":
            notices.append(f"--local-ranks-filter {ranks}: all ranks are shown; --log knows rank 0, all and none")
    if shown is not None:
        given.setdefault("log", shown)


def _streams(name: str, text: str) -> str:
    if not _STREAMS.fullmatch(text):
        raise ConfigError(f"{_spelled(name)} {text!r}: allowed: 0, 1, 2, 3, or RANK:NUMBER,RANK:NUMBER")
    return text


def _processes(given: Options, values: dict[str, Any], notices: list[str]) -> None:
    """How workers are started, and what they learn about the job."""
    method = given.pop("start_method", None)
    if method in ("fork", "forkserver"):
        notices.append(f"--start-method {method}: taken as zygote, from which workers are forked")
        method = "zygote"
    if method is not None:
        values["start_method"] = method
    if "rdzv_id" in given:
        values["run_id"] = given.pop("rdzv_id")
    given.pop("run_path", None)  # the script is always run in the worker's interpreter
