"""torchrun's spelling: every option of the installed torch's torchrun is known, and means what it should."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from flashrecovery.cli.run import run
from flashrecovery.config import Timeouts
from flashrecovery.errors import ConfigError
from flashrecovery.launchers.torchrun import (
    LONGEST_GRACE_S,
    NO_MEANING,
    REFUSED,
    TAKEN,
    Translated,
    from_environment,
    translated,
)


def _theirs() -> list[Any]:
    from torch.distributed.run import get_args_parser

    return [a for a in get_args_parser()._actions if a.option_strings and a.dest != "help"]


def test_every_option_is_taken_without_a_meaning_or_refused() -> None:
    names = {action.dest for action in _theirs()}
    assert names == TAKEN | NO_MEANING.keys() | REFUSED.keys()
    assert len(names) == len(TAKEN) + len(NO_MEANING) + len(REFUSED)


def test_every_spelling_is_an_option_of_run() -> None:
    ours = {name: parameter for parameter in run.params for name in parameter.opts}
    for action in _theirs():
        for name in action.option_strings:
            assert name in ours, name
            assert getattr(ours[name], "is_flag", False) == (action.nargs == 0), name


def _translated(options: dict[str, Any], **others: Any) -> Translated:
    return translated(options, others)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"nnodes": "1:1", "standalone": True, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}, {"nnodes": 1}),
        ({"nnodes": "2", "rdzv_endpoint": "n0:7"}, {"nnodes": 2, "controller": "n0:7"}),
        ({"nnodes": "2:2", "master_addr": "n0", "master_port": "7"}, {"nnodes": 2, "controller": "n0:7"}),
        ({"nnodes": "2", "master_addr": "n0"}, {"nnodes": 2, "controller": "n0"}),
        ({"nnodes": "1", "master_addr": "n0", "master_port": "7"}, {"nnodes": 1, "master_port": "7"}),
        ({"nnodes": "2", "controller": "c:1", "master_addr": "n0"}, {"nnodes": 2, "controller": "c:1"}),
        ({"nproc_per_node": "3", "local_addr": "10.0.0.1"}, {"nproc_per_node": 3, "node_address": "10.0.0.1"}),
        ({"rdzv_conf": "join_timeout=60"}, {"timeouts": {"rendezvous_s": 60.0}}),
        ({"shutdown_timeout": "2"}, {"timeouts": {"shutdown_grace_s": 2.0}}),
        ({"rdzv_id": "job7", "role": "trainer"}, {"run_id": "job7", "role": "trainer"}),
        ({"start_method": "spawn"}, {"start_method": "spawn"}),
        ({"tee": "3", "redirects": "3"}, {"log": "all"}),
        ({"redirects": "3"}, {"log": "none"}),
        ({"local_ranks_filter": "0", "tee": "3"}, {"log": "0"}),
        ({"tee": "3", "log": "none"}, {"log": "none"}),
        ({"tee": "0:3,1:1"}, {"log": "all"}),
        ({"signals_to_handle": "SIGTERM,SIGINT", "run_path": True}, {}),
        ({"standby": 2}, {"standby": 2}),
    ],
)
def test_what_options_mean(options: dict[str, Any], values: dict[str, Any]) -> None:
    found = _translated(options)
    assert found.values == values and found.notices == ()


def test_nodes_of_the_configuration_file_count() -> None:
    assert _translated({"rdzv_endpoint": "n0:7"}, nnodes=2).values == {"controller": "n0:7"}
    assert _translated({"rdzv_endpoint": "n0:7"}, spare_nodes=1).values == {"controller": "n0:7"}


def test_where_run_directories_are_made() -> None:
    assert _translated({"log_dir": "/logs"}).runs == Path("/logs")


@pytest.mark.parametrize(
    ("options", "values", "notice"),
    [
        ({"nnodes": "2:3"}, {"nnodes": 2, "spare_nodes": 1}, "2 of the nodes train and 1 wait as spare ones"),
        ({"start_method": "fork"}, {"start_method": "zygote"}, "taken as zygote"),
        ({"monitor_interval": "5"}, {}, "--monitor-interval has no meaning here"),
        ({"event_log_handler": "console"}, {}, "events.jsonl"),
        ({"duplicate_stdout_filters": "a"}, {}, "logs/"),
        ({"rdzv_conf": "read_timeout=3"}, {}, "read_timeout=3 has no meaning here"),
        ({"shutdown_timeout": "30"}, {"timeouts": {"shutdown_grace_s": 4.0}}, "at most 4 s"),
        ({"redirects": "1"}, {}, "one file"),
        ({"local_ranks_filter": "0,1"}, {"log": "all"}, "all ranks are shown"),
    ],
)
def test_what_has_another_meaning_is_said(options: dict[str, Any], values: dict[str, Any], notice: str) -> None:
    found = _translated(options)
    assert found.values == values
    assert len(found.notices) == 1 and notice in found.notices[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"nnodes": "two"}, "--nnodes 'two': allowed"),
        ({"nnodes": "3:2"}, "1 <= MIN <= MAX"),
        ({"nnodes": "0"}, "1 <= MIN <= MAX"),
        ({"nnodes": "2:3", "spare_nodes": 2}, "1 spare nodes, and --spare-nodes 2"),
        ({"nproc_per_node": "xpu"}, "--nproc-per-node 'xpu'"),
        ({"nproc_per_node": "0"}, "--nproc-per-node '0'"),
        ({"rdzv_backend": "etcd-v2"}, "--rdzv-backend etcd-v2: allowed: static, c10d"),
        ({"standalone": True, "nnodes": "2"}, "--standalone is for one node, and there are 2"),
        ({"rdzv_conf": "join_timeout"}, "'join_timeout' is not KEY=VALUE"),
        ({"rdzv_conf": "timeout=soon"}, "'timeout=soon': a number of seconds"),
        ({"shutdown_timeout": "-1"}, "'-1': a number of seconds > 0"),
        ({"signals_to_handle": "SIGTERM,SIGUSR1"}, "SIGUSR1 does not end a job"),
        ({"tee": "4"}, "--tee '4': allowed"),
        ({"local_ranks_filter": "a"}, "--local-ranks-filter 'a'"),
        ({"logs_specs": "mine"}, "--logs-specs: .*--log"),
        ({"numa_binding": "node"}, "--numa-binding: "),
        ({"virtual_local_rank": True}, "--virtual-local-rank: "),
    ],
)
def test_what_is_refused_says_what_to_write(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        _translated(options)


def test_cpu_counts_the_processors_that_this_process_may_use() -> None:
    assert _translated({"nproc_per_node": "cpu"}).values == {"nproc_per_node": len(os.sched_getaffinity(0))}


def test_the_longest_grace_is_that_of_the_configuration() -> None:
    Timeouts(shutdown_grace_s=LONGEST_GRACE_S)
    with pytest.raises(ValueError, match="less than or equal"):
        Timeouts(shutdown_grace_s=LONGEST_GRACE_S + 0.1)


# -- PET_* -----------------------------------------------------------------------------------------------


def test_variables_as_torchrun_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each option, both ways: torchrun's parser finds the same under the same name."""
    from torch.distributed.run import get_args_parser

    values = {
        "max_restarts": "3",
        "monitor_interval": "2",
        "node_rank": "1",
        "master_port": "7",
        "shutdown_timeout": "2",
    }
    values["start_method"] = "fork"
    reading = [a.dest for a in _theirs() if type(a).__name__ in ("env", "check_env")]
    for action in _theirs():
        monkeypatch.setenv(f"PET_{action.dest.upper()}", values.get(action.dest, "1"))
    theirs = vars(get_args_parser().parse_args(["script.py"]))
    ours = from_environment(os.environ)
    assert ours.keys() == {*reading}
    for name, value in ours.items():
        assert theirs[name] in (value, [value]) or str(theirs[name]) == value or float(theirs[name]) == float(value), (
            name
        )


def test_variables_that_are_not_set() -> None:
    assert from_environment({}) == {}
    assert from_environment({"PET_STANDALONE": "0", "PET_NNODES": "", "PET_OTHER": "1"}) == {}
    with pytest.raises(ConfigError, match=r"PET_STANDALONE = 'yes'"):
        from_environment({"PET_STANDALONE": "yes"})
