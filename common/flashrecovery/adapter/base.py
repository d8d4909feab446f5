"""The base of adapters whose state is tensors and torch optimizers: shards, the moments of a step, hyper-parameters,
buffers.

An adapter of an elastic job is an ElasticAdapter, too. Where replicas have several ranks it says which ranks are
data-parallel peers of this one (``replicas``), and brings what depends on their number to another size (``resized``).
Shards need nothing: those that every replica has are held by as many ranks as there are replicas. That is, a shard's
holders, in the launch's size, are the same places in every replica, and its name does not say how many replicas there
are.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from flashrecovery.adapter import faults
from flashrecovery.adapter.beside import AttributesShard, OptimizerAttributes, keeps_beside
from flashrecovery.adapter.buffers import BufferTracker
from flashrecovery.adapter.gradients import GradientWatch
from flashrecovery.adapter.modes import AttributeTracker, ModeTracker
from flashrecovery.adapter.optimizer_state import (
    capture_hyperparameters,
    check_optimizers,
    check_state,
    restore_hyperparameters,
    restore_scaling,
    scaling_of,
)
from flashrecovery.adapter.parts import is_composite, refuse_odd
from flashrecovery.adapter.placement import like_placed, local_tensor, zeros_backed_by_pages
from flashrecovery.adapter.setters import Method, Setters
from flashrecovery.adapter.shards import ParamRecord, ParamShard, constant, owners_of
from flashrecovery.adapter.state_order import StateOrder
from flashrecovery.contract.adapter import InspectableAdapter, Shard, StepHooks
from flashrecovery.errors import RegistrationError, RestoreError, UnsupportedError
from flashrecovery.worker.local_state.own_hook import OwnHook, not_traced
from flashrecovery.worker.local_state.version_counters import ParameterTable, TensorTable
from flashrecovery.worker.script_checks.unprotected_steps import is_made_by_step

_LOOKS = 128
"""After this many checks of the shards' tensors (two in each step) they are looked up again."""


class TorchAdapter(InspectableAdapter):
    """Base of the DDP, FSDP2 and plain adapters.

    ``root`` is the module that the script calls; its forward seals a step. The start values of the buffers are taken
    when the adapter is made, so make it after the model has been built (and loaded), before the first step.

    Raises:
        RegistrationError: an optimizer is given twice or does not belong to the model.
        UnsupportedError: a layout or option that cannot be protected, by name.
    """

    framework_packages: frozenset[str] = frozenset()
    """Packages of the framework, which keeps the plain attributes of their modules itself."""
    framework_attributes: tuple[str, ...] = ()
    """Prefixes of attributes in which the framework keeps its books, in any module."""

    def __init__(self, root: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.root = root
        self.optimizers = tuple(optimizers)
        self._records = self._find_parameters()
        self._of_records = self._records, ParameterTable([record.get for record in self._records])
        self._parameters_checked = False
        for record in self._records:
            refuse_odd(record.get(), f"parameter {record.fqn!r}")
        check_optimizers(self.optimizers, [r.get() for r in self._records])
        self._buffers = BufferTracker(self.inner)
        self._modes = ModeTracker(self.root, ParameterTable(self._trainable()))
        self._attributes = AttributeTracker(self.inner, self.framework_packages, self.framework_attributes)
        self._besides = [self._attributes_of(o) for o in self.optimizers if self._is_foreign(o)]
        self._beside_shards: dict[int, AttributesShard] = {}
        self._shards: tuple[Shard, ...] | None = None
        self._hooks: StepHooks | None = None
        self._handles: list[RemovableHandle] = []
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}  # outputs that are there still, by id()
        self._stepped: set[int] = set()
        self._scaling: list[dict[str, Any]] = []  # of each optimizer, when the forward pass was over
        self._seen_tensors = TensorTable(())
        self._seen_states: list[int] = []
        self._looks = 0
        self._setters = Setters()
        self._gradients = self._gradient_watch()
        self._zero: frozenset[int] = frozenset()  # addresses of storages of gradients that a restore has set to zero
        self._fault_in_optimizer = faults.OptimizerFault(self.optimizers)

    # -- what the subclasses say ----------------------------------------------------------------

    @property
    def inner(self) -> nn.Module:
        """The user's module, whose names are the parameters' names."""
        return self.root

    def entry_modules(self) -> Sequence[nn.Module]:
        """What the script calls: the end of a forward pass of any of them seals the step."""
        return (self.root,)

    @abstractmethod
    def _find_parameters(self) -> tuple[ParamRecord, ...]:
        """Every parameter once (tied ones under their first name), equal order on all ranks."""

    def _gradient_watch(self) -> GradientWatch:
        """The watch for gradients that live across steps; it has no parameters if the adapter itself sees gradients
        that live across steps."""
        return GradientWatch(lambda: [p for o in self.optimizers for group in o.param_groups for p in group["params"]])

    def _trainable(self) -> Sequence[Callable[[], nn.Parameter]]:
        """Give the parameters that a script freezes and unfreezes by ``requires_grad_()``, one each."""
        return [*map(constant, self.inner.parameters())]

    def _computing(self) -> Sequence[torch.Tensor]:
        """What the module computes with, where the shards have its memory under other version counters."""
        return ()

    def _setting(self) -> Iterable[Method]:
        """The framework's methods that change shards behind their version counters when a script calls them."""
        return ()

    def _tracked_streams(self) -> Mapping[str, torch.Tensor] | None:
        """The states of the random streams that the framework tracks by name, as byte tensors; None if it tracks none.
        Not those of torch, Python and numpy."""
        return None

    def _restore_streams(self, states: dict[str, Any]) -> None:
        """Set what :meth:`_tracked_streams` returned on this rank."""

    def _synchronises(self) -> bool:
        """Whether the backward pass that follows may hold this rank's last contribution to the gradient
        synchronisation; asked at the end of a forward pass. False on all ranks alike."""
        return True

    def _gradients_ready(self) -> None:
        """All gradients of this step are reduced, nothing has been changed yet. May come several times a step."""

    def _reset_framework(self) -> None:
        """Bring the wrapper back to the state between two steps."""

    def known(self) -> Sequence[object]:
        return (self.root, *self.optimizers)

    # -- shards ---------------------------------------------------------------------------------

    def shards(self) -> Sequence[Shard]:
        if self._shards is None:
            self._beside_shards = self._find_beside()
            of_parameters = [ParamShard(r, owners_of(r.get(), self.optimizers)) for r in self._records]
            self._shards = (*of_parameters, *self._beside_shards.values())
        return self._shards

    def _is_foreign(self, optimizer: Optimizer) -> bool:
        """Whether it may keep state in attributes, and no framework looks after it."""
        package = type(optimizer).__module__.partition(".")[0]
        return keeps_beside(optimizer) and package not in self.framework_packages

    def _attributes_of(self, optimizer: Optimizer) -> OptimizerAttributes:
        return OptimizerAttributes(optimizer, self.optimizers)

    def _find_beside(self) -> dict[int, AttributesShard]:
        """By the number of the optimizer. Those have it that have its least spread parameter."""
        found = {}
        for number, beside in enumerate(self._besides):
            ids = {id(p) for group in beside.optimizer.param_groups for p in group["params"]}
            records = [r for r in self._records if id(r.get()) in ids]
            if records and beside.needs_a_shard():
                least = min(records, key=lambda r: len(r.holders))
                suffix = "".join(least.name.partition("#")[1:])
                found[number] = AttributesShard(f"optimizer/{number}{suffix}", least.holders, beside)
        return found

    def kept_beside(self) -> list[str]:
        """The classes of optimizers that keep tensors in their attributes, or another optimizer, as a shard."""
        self.shards()
        return [type(self._besides[number].optimizer).__name__ for number in self._beside_shards]

    def stepped_by_others(self) -> Sequence[Optimizer]:
        """Optimizers that a registered one steps by itself."""
        for beside in self._besides:
            beside.read()
        return [nested for beside in self._besides for nested in beside.nested]

    def not_brought_back(self, known: Collection[int]) -> Sequence[str]:
        """Attributes of optimizers."""
        return [f"{path} ({kind})" for beside in self._besides for path, kind in beside.not_read(known).items()]

    # -- moments of a step ----------------------------------------------------------------------

    def watch(self, hooks: StepHooks) -> None:
        if self._hooks is not None:
            raise RegistrationError(f"{self.name}: this adapter is registered already; register each model once")
        self._hooks = hooks
        self._setters = Setters(self._setting())
        for module in self.entry_modules():
            self._handles.append(module.register_forward_hook(OwnHook(not_traced(self._after_forward))))
        for optimizer in self.optimizers:
            _make_hookable(optimizer)
            self._handles.append(optimizer.register_step_pre_hook(not_traced(self._before_optimizer)))
            self._handles.append(optimizer.register_step_post_hook(not_traced(self._after_optimizer)))

    def _after_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._hooks is None:
            return
        if not torch.is_grad_enabled():
            self._hooks.evaluated()
            return
        self._stepped.clear()
        self._scaling = [scaling_of(optimizer) for optimizer in self.optimizers]
        self._hooks.sealed()
        if self._synchronises():
            self._hooks.synchronising()
        # Once more when backward starts: the loss, or data fetched ahead, may have used random numbers or samples.
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self._see_backward_start(leaf)

    def _see_backward_start(self, output: torch.Tensor) -> None:
        """Once for each: what the model returns may be a parameter, which outlives the step. Other tensors have a graph
        in each step, also where the same object is changed in place."""
        if not output.is_leaf:
            output.register_hook(self._backward_starts)
            return
        key = id(output)
        known = self._hooked.get(key)
        if known is None or known() is not output:
            output.register_hook(self._backward_starts)
            self._hooked[key] = weakref.ref(output, lambda gone: self._forget_output(key, gone))

    def _forget_output(self, key: int, gone: weakref.ref[torch.Tensor]) -> None:
        if self._hooked.get(key) is gone:
            del self._hooked[key]

    def _backward_starts(self, _grad: torch.Tensor) -> None:
        self._gradients.backward()
        if self._hooks is not None:
            with self._modes.again():
                self._hooks.sealed(recheck=True)

    def _before_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_made_by_step():
            return  # what it changes is seen by touch_mark
        if any(callable(a) for a in args) or callable(kwargs.get("closure")):
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step(closure) is not supported: "
                "forward and backward would run while the state is being changed"
            )
        if id(optimizer) in self._stepped:
            self._stepped.clear()  # a second round without a forward in between
        if not self.whole_framework:  # whose kernels may write without counting
            self._gradients.stepping(optimizer.param_groups)
        if self._hooks is not None:
            self._gradients_ready()
            with self._modes.again():
                self._hooks.mutating(None if self.whole_framework else optimizer)

    def _after_optimizer(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if is_made_by_step():
            return
        if self._hooks is not None:
            self._hooks.launched()
        self._stepped.add(id(optimizer))
        self._gradients.stepped()
        if not self._parameters_checked:
            check_state(self.optimizers, [r.get() for r in self._records])
            self._parameters_checked = True
        if self._hooks is not None and len(self._stepped) == len(self.optimizers):
            self._stepped.clear()
            self._hooks.mutated()

    # -- reset, capture, restore ----------------------------------------------------------------

    def reset(self) -> None:
        self._stepped.clear()
        for optimizer, scaling in zip(self.optimizers, self._scaling, strict=False):
            restore_scaling(optimizer, scaling)
        self._fault_in_optimizer.disarm()
        self._reset_framework()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for record in self._records:
            record.get().grad = None

    def capture_common(self) -> dict[str, Any]:
        return {
            "hyperparameters": capture_hyperparameters(self.optimizers),
            "gradients": self._gradient_presence(),
            "beside": [
                beside.capture() for number, beside in enumerate(self._besides) if number not in self._beside_shards
            ],
        }

    def restore_common(self, state: dict[str, Any]) -> None:
        self._looks = 0
        for optimizer in self.optimizers:
            StateOrder.of(optimizer).settle()
        restore_hyperparameters(self.optimizers, state["hyperparameters"])
        small = [beside for number, beside in enumerate(self._besides) if number not in self._beside_shards]
        saved = state.get("beside", [])
        if saved and len(saved) != len(small):
            raise RestoreError(
                f"{len(small)} optimizers here keep something in their attributes, and {len(saved)} there: it belongs "
                "to this parallel layout alone"
            )
        for beside, captured in zip(small, saved, strict=False):
            beside.restore(captured)
        self._restore_gradient_presence(state["gradients"])

    def _gradient_presence(self) -> str | list[int]:
        """Which parameters have a ``.grad`` at the boundary. A script that zeroes gradients in place makes optimizers
        treat an unused parameter otherwise than one that never had any."""
        if self._of_records[0] is not self._records:
            self._of_records = self._records, ParameterTable([record.get for record in self._records])
        count = self._of_records[1].gradients()
        if count in (0, len(self._records)):
            return "all" if count else "none"
        return [i for i, record in enumerate(self._records) if record.get().grad is not None]

    def _restore_gradient_presence(self, presence: str | list[int]) -> None:
        wanted = self._presence_indices(presence)
        for index, record in enumerate(self._records):
            parameter = record.get()
            if index not in wanted:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = _no_gradient(parameter)
            elif not (self._zero and parameter.grad.untyped_storage().data_ptr() in self._zero):
                with torch.no_grad():
                    parameter.grad.zero_()

    def _presence_indices(self, presence: str | list[int]) -> set[int]:
        if presence == "none":
            return set()
        if presence == "all":
            return set(range(len(self._records)))
        if isinstance(presence, str):
            raise RestoreError(f"unknown gradient presence {presence!r}")
        return set(presence)

    def capture_rank(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "buffers": self._buffers.capture(),
            "modes": self._modes.capture(),
            "attributes": self._attributes.capture(),
        }
        streams = self._tracked_streams()
        return own if streams is None else {**own, "rng_tracker": streams}

    def local_state_mark(self) -> Any:
        own = (self._buffers.mark(), self._modes.mark(), self._attributes.mark())
        streams = self._tracked_streams()
        if streams is None:
            return own
        return own, {name: xxhash.xxh3_128_digest(state.numpy().data) for name, state in streams.items()}

    def look_closely(self, closely: bool) -> None:
        self._buffers.look_closely(closely)
        self._gradients.begin(closely)

    def silent(self) -> list[str]:
        return self._buffers.silent

    def adopt_silent(self, names: Collection[str]) -> None:
        self._buffers.adopt_silent(names)

    def rank_bytes(self) -> Mapping[str, int]:
        return {f"buffer {fqn!r}": nbytes for fqn, nbytes in self._buffers.nbytes().items()}

    def moved_buffers(self) -> Sequence[str]:
        return self._buffers.moved()

    def touch_mark(self) -> Any:
        """Compared by version counters, which no supported framework moves between the yield of a step and its
        mutation, and by the calls of :meth:`_setting`.

        The tensors are looked up again when an optimizer has got or lost state, after :meth:`restore_common`, and now
        and then: that takes much longer than to look at them.
        """
        states = [len(optimizer.state) for optimizer in self.optimizers]
        self._looks -= 1
        if self._looks < 0 or states != self._seen_states:
            self._looks, self._seen_states = _LOOKS, states
            stepped = {id(record.get()) for record in self._records}
            seen = [t for shard in self.shards() for t in shard.watched()]
            seen += [weight for weight in self._computing() if id(weight) not in stepped]
            self._seen_tensors = TensorTable(seen)
        return self._seen_tensors.digest(), self._setters.calls

    def restore_rank(self, state: dict[str, Any]) -> None:
        self._buffers.restore(state["buffers"])
        self._modes.restore(state["modes"])
        self._attributes.restore(state["attributes"])
        if "rng_tracker" in state:
            self._restore_streams(state["rng_tracker"])

    # -- fault injection ------------------------------------------------------------------------

    def fault_points(self) -> Mapping[str, Callable[[Callable[[], None]], None]]:
        points: dict[str, Callable[[Callable[[], None]], None]] = {
            "forward": lambda callback: faults.in_forward(self.inner, callback, self.root),
            "backward": lambda callback: faults.in_backward(self.inner, callback, self.root),
        }
        if self.optimizers:
            points["optimizer"] = lambda callback: self._fault_in_optimizer.arm(callback, self._middle_parameter())
        return points

    def _middle_parameter(self) -> torch.nn.Parameter:
        """A parameter about half-way through the first optimizer's work."""
        owned = [p for group in self.optimizers[0].param_groups for p in group["params"]]
        trained = [p for p in owned if p.requires_grad] or owned  # fp32 copies of 16-bit parameters need no gradient
        result: torch.nn.Parameter = trained[len(trained) // 2]
        return result


def _no_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A gradient of zeros: an ordinary tensor also where the parameter is none."""
    if type(parameter) is torch.nn.Parameter and parameter.layout is torch.strided:
        return zeros_backed_by_pages(torch.empty_like(parameter, requires_grad=False))
    if not is_composite(parameter):
        return torch.zeros_like(parameter, requires_grad=False)
    shape = local_tensor(parameter).shape
    zeros = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
    return like_placed(zeros, parameter) if isinstance(parameter, DTensor) else zeros


def _make_hookable(optimizer: Optimizer) -> None:
    """Wrappers of optimizers that do without ``Optimizer.__init__`` have no hooks, or plain dictionaries of them, which
    ``register_step_pre_hook`` cannot use."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks = vars(optimizer).get(name)
        if not isinstance(hooks, OrderedDict):
            setattr(optimizer, name, OrderedDict(hooks or {}))
