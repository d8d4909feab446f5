"""FSDP2 in another size: how ``fully_shard`` divides parameters and their optimizer state, and how its objects become
those of another number of ranks.

Handles stay valid: parameters, modules and the device mesh are the objects that the script knows, and only what is in
them is exchanged. A parameter's local tensor and its spec are replaced, and all that FSDP2 has derived from the number
of ranks (sizes, padding, memory for the gathered parameter) is re-created as its own constructor does it.

All that is private to torch about this stands in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flashrecovery.adapter import fsdp2_state, meshes
from flashrecovery.adapter.optimizer_state import HOST, PLACED
from flashrecovery.adapter.placement import like_placed, mesh_spans_world
from flashrecovery.adapter.shards import PARAM, ParamShard
from flashrecovery.adapter.state_order import StateOrder
from flashrecovery.capabilities.of_torch import FSDP2_RESIZING, TORCH
from flashrecovery.contract.shard_layout import Prepared, RuledShardLayout
from flashrecovery.errors import UnsupportedError
from flashrecovery.plan.reshard.layouts import chunked
from flashrecovery.plan.reshard.placements import Rows, Whole
from flashrecovery.plan.reshard.rules import TensorRule

_MESHES = {"FSDPMeshInfo": "a mesh of one dimension", "HSDPMeshInfo": "a mesh of (replicate, shard)"}
"""By what FSDP2 calls it."""


def replicates(root: FSDPModule) -> bool:
    """Whether it is HSDP: on a mesh that also has a dimension in which parameters are replicated."""
    return any(group._is_hsdp for group in fsdp2_state.groups(root))


def refuse_unresizable(root: FSDPModule) -> None:
    """Raises UnsupportedError, by name, for what cannot become that of another number of ranks, or if this torch lacks
    something of the inside that is needed."""
    TORCH.require((FSDP2_RESIZING,))
    assert isinstance(root, nn.Module)
    for name, module in root.named_modules():
        if module._compiled_call_impl is not None:
            raise _refused(f"a compiled module ({name or 'the model'!r})", "modules that are not compiled are")
    for group in fsdp2_state.groups(root):
        info = group.mesh_info
        kind = type(info).__name__
        if kind not in _MESHES:
            raise _refused(f"a mesh of kind {kind}", f"{' and '.join(_MESHES.values())} are")
        if group._is_hsdp != replicates(root):
            raise _refused("modules on meshes of one dimension and others on (replicate, shard)", "meshes alike are")
        for mesh_info in (info, *(p.mesh_info for p in group.fsdp_params)):
            _refuse_mesh(mesh_info.mesh, 1 + group._is_hsdp)
            if group._is_hsdp and (mesh_info.replicate_mesh_dim, mesh_info.shard_mesh_dim) != (0, 1):
                raise _refused(f"{mesh_info.mesh}, which does not replicate first", f"{_MESHES[kind]} is")
            if getattr(mesh_info, "reduce_scatter_process_group", None) is not None:
                raise _refused("set_separate_reduce_scatter_group", "the mesh's own group is")
        if group.post_forward_mesh_info not in (None, info):
            raise _refused("reshard_after_forward = a number", "True and False are")
        if group.gradient_divide_factor is not None:
            raise _refused("set_gradient_divide_factor", "the mean over the ranks is")
        for part in (group._all_gather_comm, group._reduce_scatter_comm):
            if not type(part).__name__.startswith("Default"):
                raise _refused(f"communication by {type(part).__name__}", "torch's default is")
        for parameter in group.fsdp_params:
            _refuse_parameter(parameter)


def _refuse_mesh(mesh: DeviceMesh, dimensions: int) -> None:
    if mesh.ndim != dimensions or not meshes.whole(mesh) or not mesh_spans_world(mesh):
        allowed = _MESHES["FSDPMeshInfo" if dimensions == 1 else "HSDPMeshInfo"]
        raise _refused(f"{mesh}, a part of a mesh or of the ranks", f"{allowed}, of all ranks, is")


def _refuse_parameter(parameter: Any) -> None:
    name = parameter._module_info.param_name
    if parameter.is_dtensor:
        raise _refused(f"{name!r}, which was a DTensor before (tensor parallelism)", "plain parameters are")
    if parameter.fsdp_placement.dim != 0:
        raise _refused(f"{name!r}, sharded in dimension {parameter.fsdp_placement.dim}", "dimension 0 is")
    if parameter.offload_to_cpu:
        raise _refused("an offload policy", "parameters on their device are")
    if hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):
        raise _refused(f"{name!r}, a tensor with its own all-gather (fsdp_pre_all_gather)", "plain ones are")


def _refused(what: str, allowed: str) -> UnsupportedError:
    return UnsupportedError(f"an elastic job with FSDP2 and {what}: that has not been tried in another size; {allowed}")


@dataclass(frozen=True)
class Sharded:
    """One parameter: its name, FSDP2's object for it, and its shard."""

    fqn: str
    entry: Any
    shard: ParamShard


class FSDP2ShardLayout(RuledShardLayout):
    """How the parameters of one model are sharded. ``forget``: called when they have been replaced.

    Raises UnsupportedError for what cannot be sharded otherwise.
    """

    def __init__(
        self, root: FSDPModule, optimizers: Sequence[Optimizer], sharded: Sequence[Sharded], forget: Callable[[], None]
    ) -> None:
        refuse_unresizable(root)
        self._root = root
        self._optimizers = optimizers
        self._sharded = {one.fqn: one for one in sharded}
        self._forget = forget

    @property
    def size(self) -> int:
        return int(next(iter(self._sharded.values())).entry.mesh_info.shard_mesh_size)

    def describe(self) -> dict[str, Any]:
        """By parameter: its tensors (key, shape, dtype, and where optimizer state lies), and the shard's values."""
        found = {}
        for fqn, one in self._sharded.items():
            tensors, values = one.shard.tensors_and_values()
            where = values.get("layout", {})
            for key, form in values.get("forms", {}).items():
                raise UnsupportedError(
                    f"an elastic job with FSDP2 and {key!r} of {fqn!r}, a {form.get('class', 'DTensor')}: it is not "
                    "known how what it consists of is sharded in another size; numbers and ordinary tensors that are "
                    "sharded like their parameter are allowed"
                )
            lines = []
            for key, tensor in tensors.items():
                placed = key == PARAM or where[key] == PLACED
                if not placed and tensor.ndim:
                    raise UnsupportedError(
                        f"an elastic job with FSDP2 and optimizer state {key!r} of {fqn!r}, of shape "
                        f"{tuple(tensor.shape)} on each rank: it is not known how that is sharded in another size; "
                        "numbers and what is sharded like its parameter are allowed"
                    )
                shape = tuple(one.entry.sharded_param.shape) if placed else ()
                lines.append([key, shape, str(tensor.dtype)[6:], PLACED if placed else where[key]])
            found[fqn] = {"tensors": lines, "values": values}
        return found

    def outline(self, description: Mapping[str, Any]) -> list[Any]:
        return [
            [fqn, list(shape), dtype]
            for fqn, of_parameter in description.items()
            for key, shape, dtype, _ in of_parameter["tensors"]
            if key == PARAM
        ]

    def ruled(self, description: Mapping[str, Any]) -> Sequence[tuple[TensorRule, torch.dtype]]:
        found = []
        for fqn, of_parameter in description.items():
            beginning = self._shard_prefix(fqn)
            for key, shape, dtype_name, where in of_parameter["tensors"]:
                dtype: torch.dtype = getattr(torch, dtype_name)
                pattern = Rows() if where == PLACED else Whole()
                rule = TensorRule(f"{fqn}/{key}", tuple(shape), dtype.itemsize, pattern, beginning, key)
                found.append((rule, dtype))
        return found

    def _shard_prefix(self, fqn: str) -> str:
        names = self._sharded[fqn].entry.mesh_info.mesh.mesh_dim_names
        return f"param/{fqn}#{names[0] if names else 'shard'}="

    def _shard_name(self, fqn: str, place: int, size: int) -> str:
        return f"{self._shard_prefix(fqn)}{place}/{size}"

    def prepare(self, description: Mapping[str, Any], place: int, size: int) -> Prepared:
        parameters = {}
        for fqn, of_parameter in description.items():
            entry = self._sharded[fqn].entry
            length, chunk = _lengths(entry._orig_size[0], place, size)
            reference = entry._sharded_param_data
            padded = reference.new_zeros((chunk, *entry._orig_size[1:]))
            states = {}
            for key, shape, dtype, where in of_parameter["tensors"][1:]:
                wanted = (length, *entry._orig_size[1:]) if where == PLACED else tuple(shape)
                device = torch.device("cpu") if where == HOST else reference.device
                states[key] = torch.zeros(wanted, dtype=getattr(torch, dtype), device=device)
            parameters[fqn] = _NewParameter(padded, length, states, of_parameter)
        return _PreparedFSDP2(self, place, size, parameters)

    # -- put in place -----------------------------------------------------------------------------

    def install(self, place: int, size: int, parameters: Mapping[str, _NewParameter]) -> None:
        """See :meth:`Prepared.install`."""
        infos = mesh_infos(self._root)
        for mesh in meshes_of(infos):
            meshes.renumber(mesh, torch.arange(size), place)
        for info in infos:
            info.shard_mesh_size, info.shard_mesh_rank = size, place
        for fqn, new in parameters.items():
            one = self._sharded[fqn]
            _exchange(one.entry, new.padded, new.length)
            self._put_state(one, new)
            one.shard.rename(self._shard_name(fqn, place, size))
            one.shard.hold_by((place,))
        for optimizer in self._optimizers:
            StateOrder.of(optimizer).settle()
        forget_dispatch()
        self._forget()

    def _put_state(self, one: Sharded, new: _NewParameter) -> None:
        """The optimizers' state of a parameter, in the same order as it was."""
        parameter = one.entry.sharded_param
        values = new.description["values"]
        for prefix, optimizer in one.shard.optimizers:
            keys = [line[0] for line in new.description["tensors"][1:] if line[0].startswith(prefix)]
            plain = {key: value for key, value in values.get("plain", {}).items() if key.startswith(prefix)}
            if not keys and not plain:
                continue
            state = optimizer.state[parameter]
            order = [key for key in values.get("order", []) if key.startswith(prefix)] or keys
            state.clear()
            for key in order:
                name = key.removeprefix(prefix)
                if key in plain:
                    state[name] = plain[key]
                else:
                    placed = values["layout"][key] == PLACED
                    state[name] = like_placed(new.states[key], parameter) if placed else new.states[key]
            StateOrder.of(optimizer).put(parameter, values["places"][prefix])


@dataclass(frozen=True)
class _NewParameter:
    """The memory of a parameter in another size: with its padding, how many rows are the parameter's own, and its
    optimizer state by key."""

    padded: torch.Tensor
    length: int
    states: Mapping[str, torch.Tensor]
    description: Mapping[str, Any]


class _PreparedFSDP2(Prepared):
    def __init__(
        self, shard_layout: FSDP2ShardLayout, place: int, size: int, parameters: Mapping[str, _NewParameter]
    ) -> None:
        self._shard_layout, self._place, self._size, self._parameters = shard_layout, place, size, parameters
        self.tensors = {}
        self.values = {}
        for fqn, new in parameters.items():
            self.tensors[f"{fqn}/{PARAM}"] = new.padded.narrow(0, 0, new.length)
            self.tensors |= {f"{fqn}/{key}": tensor for key, tensor in new.states.items()}
            self.values[shard_layout._shard_name(fqn, place, size)] = new.description["values"]

    def install(self) -> None:
        self._shard_layout.install(self._place, self._size, self._parameters)


def _lengths(rows: int, place: int, size: int) -> tuple[int, int]:
    """How many rows a place has, and how many with padding."""
    low, high = chunked(rows, size)[place]
    return high - low, -(-rows // size)


def mesh_infos(root: FSDPModule) -> list[Any]:
    """All that FSDP2 has read from meshes for a model, each once."""
    found = [
        info
        for group in fsdp2_state.groups(root)
        for info in (group.mesh_info, *(parameter.mesh_info for parameter in group.fsdp_params))
    ]
    return list({id(info): info for info in found}.values())


def meshes_of(infos: Sequence[Any]) -> list[DeviceMesh]:
    """From which that was read, each once."""
    return list({id(info.mesh): info.mesh for info in infos}.values())


def _exchange(entry: Any, padded: torch.Tensor, length: int) -> None:
    """Give a parameter another local tensor, as FSDPParam._init_sharded_param and reset_sharded_param do it."""
    parameter = entry.sharded_param
    parameter.grad = None
    local = padded.narrow(0, 0, length)
    old = parameter._spec
    spec = type(old)(old.mesh, old.placements, tensor_meta=old.tensor_meta)
    entry.sharded_size = torch.Size(local.shape)
    entry.contiguous_sharded_stride = torch.empty(local.shape, device="meta").stride()
    entry.padded_sharded_param_size = padded.size()
    entry._sharded_param_data = padded.view(-1)
    entry._sharding_spec = spec
    parameter._local_tensor, parameter._spec = local, spec
    # The gathered parameter lies in memory of the old size.
    entry.all_gather_outputs, entry._unsharded_inner_tensors = [], []
    if hasattr(entry, "_unsharded_param"):
        del entry._unsharded_param


def forget_dispatch() -> None:
    """What DTensor has concluded from the meshes as they were."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
