"""Tensors that consist of other tensors, taken apart and put together again.

A quantised weight or optimizer state is mostly an object of a subclass of torch.Tensor that holds codes, scales and a
table, and implements the few operations that its library needs: it can be neither copied nor sent. But such a subclass
says which tensors it consists of (``__tensor_flatten__``, which torch.compile needs, too), and is made of them by
``__tensor_unflatten__``. So a shard holds these, and a *form* that says in plain values how they belong together:
classes by name, what they say of themselves beside tensors, and where a DTensor among them lies.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from flashrecovery.adapter.placement import local_tensor, wrapped
from flashrecovery.errors import RestoreError, UnsupportedError

Form = dict[str, Any]
"""Plain values. Of a subclass: ``class``, ``meta``, ``outer`` (size and stride) and ``parts`` (name -> form, None for a
plain tensor). Of a DTensor: ``placements`` (None: those of its parameter), ``outer`` and
``local`` (a form or None)."""

SEPARATOR = "::"
"""Between the key of a tensor and the names of its parts."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_NAMED = (torch.layout, torch.memory_format)


def is_composite(tensor: torch.Tensor) -> bool:
    """Whether the local part of ``tensor`` is of a class that does other things than torch.Tensor when it is copied."""
    kind = type(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def is_plainly_placed(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether ``tensor``, which is ``parameter`` or its state, is an ordinary tensor, or a DTensor of such, placed like
    the parameter: everything that has no :class:`TensorParts`."""
    if is_composite(tensor):
        return False
    return not isinstance(tensor, DTensor) or _is_placed_like(tensor, parameter)


def _is_placed_like(tensor: DTensor, parameter: torch.Tensor) -> bool:
    return (
        isinstance(parameter, DTensor)
        and tensor.device_mesh == parameter.device_mesh
        and tensor.placements == parameter.placements
        and tensor.shape == parameter.shape
    )


def part_key(key: str, path: str) -> str:
    """The key of the part at ``path`` of the tensor with this key, among a shard's tensors."""
    return f"{key}{SEPARATOR}{path}"


def dtensors_in(tensor: torch.Tensor) -> Iterator[DTensor]:
    """``tensor`` itself, if it is one, or those of its parts that are."""
    if isinstance(tensor, DTensor):
        yield tensor
    elif is_composite(tensor):
        for _, part in _flattened(tensor, "a tensor")[0]:
            yield from dtensors_in(part)


def refuse_odd(tensor: torch.Tensor, what: str) -> None:
    """Raises UnsupportedError, naming ``what``, for a tensor that does not own ordinary memory."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if torch.nn.parameter.is_lazy(local):
        raise UnsupportedError(
            f"{what} has no shape yet (a lazy module): call the model once before it is wrapped and registered"
        )
    if is_composite(local):
        for _, part in _flattened(local, what)[0]:
            refuse_odd(part, what)
        return
    reasons = {
        f"is a tensor of layout {local.layout}": local.layout != torch.strided,
        f"is quantised ({local.dtype})": local.is_quantized,
        "lies on the meta device": local.is_meta,
        "is a conjugated or negated view of other memory": local.is_conj() or local.is_neg(),
    }
    for reason, odd in reasons.items():
        if odd:
            raise UnsupportedError(f"{what} {reason}: it cannot be kept; an ordinary tensor with its values can")


@dataclasses.dataclass(frozen=True)
class TensorParts:
    """A composite tensor taken apart.

    Attributes:
        tensors: the plain local tensors it consists of, by path, sharing its memory.
        form: see :data:`Form`.
        made_of: all objects on the way, and what they say of themselves; they tell whether it is still so.
        addresses: of the memory of ``tensors``.
    """

    whole: torch.Tensor
    tensors: dict[str, torch.Tensor]
    form: Form
    made_of: list[Any]
    addresses: list[int]

    @staticmethod
    def of(whole: torch.Tensor, what: str, parameter: torch.Tensor) -> TensorParts:
        """``whole``: a tensor that is no plain one. ``parameter``: the one that it belongs to.

        Raises:
            UnsupportedError: naming ``what``, for a class that does not say what it consists of, and for what could not
                be made again.
        """
        tensors: dict[str, torch.Tensor] = {}
        form = _form_of(whole, "", tensors, what, parameter)
        made_of = list(_objects(whole))
        return TensorParts(whole, tensors, form, made_of, [t.data_ptr() for t in tensors.values()])

    def unchanged(self) -> bool:
        """Whether the tensor still consists of the same objects, in the same memory."""
        found = list(_objects(self.whole))
        return len(found) == len(self.made_of) and all(map(_same, found, self.made_of)) and self._in_place()

    def _in_place(self) -> bool:
        leaves = [t for t in self.made_of if isinstance(t, torch.Tensor) and not is_composite(t)]
        return [(t._local_tensor if isinstance(t, DTensor) else t).data_ptr() for t in leaves] == self.addresses


def put_together(form: Form | None, tensors: Mapping[str, torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    """The inverse of :meth:`TensorParts.of`; ``tensors`` by path are the memory of what is made.

    Raises:
        RestoreError: this process does not know a class, or has no such mesh.
    """
    if form is None:
        (plain,) = tensors.values()
        return plain
    if "placements" in form:
        if not isinstance(parameter, DTensor):
            raise RestoreError("a part of a tensor arrived that lies on a device mesh, for a parameter that does not")
        local = put_together(form["local"], tensors, parameter)
        said = form["placements"]
        placements = parameter.placements if said is None else [_placement(p) for p in said]
        return wrapped(local, parameter, placements, *form["outer"])
    inner = {name: put_together(part, _below(tensors, name), parameter) for name, part in form["parts"].items()}
    kind = _found(form["class"])
    size, stride = form["outer"]
    with torch.no_grad():
        made: torch.Tensor = kind.__tensor_unflatten__(inner, decode(form["meta"]), torch.Size(size), tuple(stride))
    return made


def _below(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {
        path[len(name) :].removeprefix("/"): tensor
        for path, tensor in tensors.items()
        if path == name or path.startswith(f"{name}/")
    }


def _take_apart(
    tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor], what: str, parameter: torch.Tensor
) -> Form | None:
    """The form of a part; None: it is a plain tensor, and is among ``tensors`` now."""
    if isinstance(tensor, DTensor) or is_composite(tensor):
        return _form_of(tensor, path, tensors, what, parameter)
    refuse_odd(tensor, what)
    tensors[path] = tensor.detach()
    return None


def _form_of(
    tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor], what: str, parameter: torch.Tensor
) -> Form:
    """The form of a tensor that is no plain one. Its plain ones are added to ``tensors``."""
    if isinstance(tensor, DTensor):
        if not isinstance(parameter, DTensor) or tensor.device_mesh != parameter.device_mesh:
            raise UnsupportedError(f"{what} has a part on another device mesh than its parameter")
        local = _take_apart(local_tensor(tensor), path, tensors, what, parameter)
        placements = None if _is_placed_like(tensor, parameter) else _placements_of(tensor, what)
        return {"placements": placements, "outer": (tuple(tensor.shape), tensor.stride()), "local": local}
    inner, context = _flattened(tensor, what)
    parts = {name: _take_apart(t, f"{path}/{name}".lstrip("/"), tensors, what, parameter) for name, t in inner}
    return {
        "class": _name_of(type(tensor), what),
        "meta": encode(context, what),
        "outer": (tuple(tensor.shape), tensor.stride()),
        "parts": parts,
    }


_PLACEMENTS: dict[type[Placement], Callable[[Any], list[Any]]] = {
    Replicate: lambda placement: ["replicated"],
    Shard: lambda placement: ["sharded", placement.dim],
    Partial: lambda placement: ["partial", placement.reduce_op],
}


def _placements_of(tensor: DTensor, what: str) -> list[list[Any]]:
    """Raises UnsupportedError for others than these."""
    for placement in tensor.placements:
        if type(placement) not in _PLACEMENTS:
            raise UnsupportedError(f"{what} has placement {placement}, which is not known how to make again")
    return [_PLACEMENTS[type(placement)](placement) for placement in tensor.placements]


def _placement(plain: list[Any]) -> Placement:
    kinds: dict[str, type[Placement]] = {"replicated": Replicate, "sharded": Shard, "partial": Partial}
    return kinds[plain[0]](*plain[1:])


def _flattened(tensor: torch.Tensor, what: str) -> tuple[list[tuple[str, torch.Tensor]], Any]:
    """The tensors that one of a subclass consists of, by name, and what else there is to it."""
    kind = type(tensor)
    if not (hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")):
        raise UnsupportedError(
            f"{what} is a {kind.__module__}.{kind.__qualname__}, a class of tensors that does not say which tensors it "
            "consists of, so that it can be neither copied nor made again: __tensor_flatten__() and "
            "__tensor_unflatten__() say it, as torch.compile needs, too"
        )
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    found = [(name, getattr(tensor, name)) for name in names]
    for name, part in found:
        if getattr(tensor, name) is not part:
            raise UnsupportedError(f"{what}: part {name!r} of {kind.__qualname__} is re-created when it is asked for")
    return found, context


def _objects(tensor: torch.Tensor) -> Iterator[Any]:
    """All parts, from the outside to the inside, and what they say of themselves."""
    if not is_composite(tensor):
        yield tensor
        return
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    yield context
    for name in names:
        yield from _objects(getattr(tensor, name))


def _same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and bool(one == other))


# -- what a tensor says of itself, in plain values ------------------------------------------------------


def encode(value: Any, what: str) -> list[Any]:
    """``value`` in values that can be sent. Raises UnsupportedError, naming ``what``, if it cannot be."""
    if type(value) in _PLAIN:
        return ["value", value]
    if isinstance(value, enum.Enum):
        return ["member", _name_of(type(value), what), value.name]
    if isinstance(value, _NAMED):
        return ["torch", str(value).removeprefix("torch.")]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode(getattr(value, f.name), what) for f in dataclasses.fields(value)}
        return ["fields", _name_of(type(value), what), fields]
    if type(value) in (list, tuple, set, frozenset):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return [type(value).__name__, [encode(item, what) for item in items]]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ["named", _name_of(type(value), what), [encode(item, what) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(k, what), encode(v, what)] for k, v in value.items()]]
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return ["code", _name_of(value, what)]
    raise UnsupportedError(
        f"{what} says of itself something of type {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "kept: plain values, enumerations, dataclasses and containers of these can"
    )


def decode(plain: list[Any]) -> Any:
    """The inverse of :func:`encode`. Raises RestoreError if this process does not know a class."""
    kind, *rest = plain
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](decode(item) for item in rest[0])
    if kind == "dict":
        return {decode(k): decode(v) for k, v in rest[0]}
    if kind == "value":
        return rest[0]
    if kind == "torch":
        return getattr(torch, rest[0])
    if kind == "code":
        return _found(rest[0])
    known = _found(rest[0])
    if kind == "member" and issubclass(known, enum.Enum):
        return known[rest[1]]
    if kind == "named" and issubclass(known, tuple):
        return known(*(decode(item) for item in rest[1]))
    if kind == "fields" and isinstance(known, type) and dataclasses.is_dataclass(known):
        made = object.__new__(known)
        for name, value in rest[1].items():
            object.__setattr__(made, name, decode(value))
        return made
    raise RestoreError(f"{rest[0]} is not what it was where this comes from ({kind})")


_CONTAINERS: dict[str, Callable[..., Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def _name_of(thing: Any, what: str) -> str:
    name = f"{thing.__module__}:{thing.__qualname__}"
    if _look_up(name) is not thing:
        raise UnsupportedError(f"{what} needs {name}, which cannot be found by this name in another process")
    return name


def _found(name: str) -> Any:
    """What is called so in a module that this process has imported: nothing is imported by a name that was received."""
    thing = _look_up(name)
    if thing is None:
        module, _, qualified = name.partition(":")
        raise RestoreError(
            f"a tensor that arrived needs {qualified!r} of {module!r}, which this process has not imported before its "
            "first step: import it where the script begins"
        )
    return thing


def _look_up(name: str) -> Any:
    module, _, qualified = name.partition(":")
    thing: Any = sys.modules.get(module)
    for part in qualified.split("."):
        thing = getattr(thing, part, None)
    return thing
