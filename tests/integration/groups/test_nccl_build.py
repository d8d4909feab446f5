"""With a torch that has NCCL (`make test-cuda-build`): what the product uses of it is there. Needs no GPU."""

from __future__ import annotations

import datetime
import inspect
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from flashrecovery.groups import torch_private
from flashrecovery.groups.torch_private import GroupRequest, HashStore, c10d
from flashrecovery.runtime.nccl_env import LAUNCH_DEFAULTS

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")

TIMEOUT = datetime.timedelta(seconds=10)


def test_torch_is_a_build_with_cuda() -> None:
    assert torch.version.cuda is not None and torch.cuda.nccl.version() >= (2, 20)


def test_the_options_of_a_backend_can_be_set() -> None:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    options.split_from = None
    options.global_ranks_in_group = [0]
    options.group_name = "g"
    assert (options._timeout, options.split_from, options.group_name) == (TIMEOUT, None, "g")


def test_a_backend_has_what_is_used_of_it() -> None:
    used = ["abort", "shutdown", "supports_coalescing", "_start_coalescing", "_end_coalescing", "get_error"]
    used += ["eager_connect_single_device", "_set_sequence_number_for_group", "_set_default_timeout"]
    assert [name for name in used if not hasattr(dist.ProcessGroupNCCL, name)] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_making_a_backend_comes_as_far_as_the_missing_gpu() -> None:
    request = GroupRequest("g", (0,), 0, 1, {"cuda": "nccl"}, TIMEOUT, None, None)
    with pytest.raises((RuntimeError, ValueError), match="no GPUs found"):
        torch_private.nccl_backend(HashStore(), request, TIMEOUT, None)


def test_torch_makes_groups_as_the_wrapper_expects() -> None:
    names = list(inspect.signature(inspect.unwrap(c10d._new_process_group_helper)).parameters)
    ours = ["group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name", "backend_options"]
    ours += ["timeout", "pg_tag", "device_id", "group_desc"]
    assert names[: len(ours)] == ours
    assert set(names[len(ours) :]) <= {"enable_reconfigure"}, "is it refused, if it asks for something?"
    for name in ("pg_map", "pg_backend_config", "pg_names", "pg_group_ranks", "pg_coalesce_state"):
        assert hasattr(c10d._world, name)


def test_a_group_that_torch_itself_would_change_is_refused() -> None:
    """torch 2.14 can be asked for groups whose members it changes."""
    if "enable_reconfigure" not in inspect.signature(dist.init_process_group).parameters:
        pytest.skip("this torch cannot")
    code = (
        "import torch.distributed as dist; from flashrecovery import errors, groups\n"
        "groups.install()\n"
        "try: dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True)\n"
        "except errors.UnsupportedError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("enable_reconfigure: "), done.stdout + done.stderr


def test_torch_knows_the_variables_that_the_launcher_sets() -> None:
    """Those of torch itself, by their names in its library."""
    library = (torch.__path__[0] + "/lib/libtorch_cuda.so").encode()
    with open(library, "rb") as file:
        text = file.read()
    assert [name for name in LAUNCH_DEFAULTS if name.startswith("TORCH_") and name.encode() not in text] == []
