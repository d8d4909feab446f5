"""What saves and object collectives do in the post-step code of a discarded attempt.

After a stop the script runs on to its next step; nothing can prevent that (:mod:`.discarded_run`). On the way its peers
do not answer, its values are incomplete, and a file that it writes would stay. So in the training thread:

* A save is skipped while the attempt is discarded, and returns what its caller expects. A save that many ranks make
  together (a *joint* save) is skipped as soon as a stop has come, and ends if a rank dies in it.
* A file that was not written is not renamed either (``torch.save(x, tmp); os.replace(tmp, path)``).
* An object collective returns to a receiving rank what it last received at that line of the script: a stand-in leaves
  no valid object in its buffer.
* A barrier in which a rank dies is over: no rank got a value from it.

Saves in other threads continue: what they write comes from a step that counts. An asynchronous joint save under way
when the groups are exchanged is given up; its future ends without an error.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import wraps
from types import ModuleType
from typing import Any, Protocol

from flashrecovery import groups
from flashrecovery.errors import UnsupportedError
from flashrecovery.util.import_hooks import install
from flashrecovery.worker.data.accelerate import saved_again
from flashrecovery.worker.script_checks.stray_collectives import line_of_script, script_line

Callee = Callable[..., Any]

KEPT_BYTES = 1 << 20
"""What an object collective gave is kept up to this size."""
ADVICE = "ask `step.committed` below the block for what is not to be done twice"


class Below(Protocol):
    """What is asked of the loop. A protocol, as it lies above."""

    @property
    def void(self) -> bool:
        """The attempt does not count."""

    @property
    def outside(self) -> bool:
        """The script is below the block of a step that has been committed here."""

    @property
    def cut_off(self) -> bool:
        """No peer answers the script's collectives, or soon none will."""

    @property
    def can_go_back(self) -> bool:
        """This rank keeps the state before the step."""

    def explains(self, error: BaseException) -> bool:
        """Whether ``error`` is the consequence of a stop. May wait for it."""

    def saving(self) -> AbstractContextManager[None]:
        """Within it the script writes a checkpoint: a hang has another deadline there."""

    def stood_in(self) -> None:
        """The script has been given what no peer has said."""

    def not_saved(self, text: str) -> None:
        """Tell that something was not written."""

    def exchanges(self) -> int:
        """How often the communication of this process has been abandoned."""


class CutShort(BaseException):
    """Raised within a joint save that is left. No :class:`Exception`: libraries catch those."""


class _Here(threading.local):
    depth = 0
    """Joint saves that this thread is in."""
    in_barrier = False
    with_objects = False
    """In a collective that gives objects."""
    began_at: int | None = None
    """For an asynchronous save: how often communication had been abandoned when it was requested."""


_here = _Here()
_below: Below | None = None
_skipped: set[str] = set()
_moves: dict[str, Callee] = {}  # as they are without ours
_given: dict[tuple[str, str], bytes] = {}
_ordered: deque[int] = deque()


def watch(below: Below) -> None:
    """From now on ``below`` is asked."""
    global _below
    _below = below


def attempt_is_over() -> None:
    """The script has come to its next step."""
    if _skipped:
        _skipped.clear()
        for name, real in _moves.items():
            setattr(os, name, real)
        _moves.clear()


def handles_errors() -> bool:
    """Whether the training thread is in something that a rank's death does not end with an error in the script."""
    return _here.depth > 0 or _here.in_barrier or _here.with_objects


def is_harmless() -> bool:
    """Whether the training thread is in something that a rank's death costs nothing."""
    return _here.depth > 0 or _here.in_barrier


def _asked() -> Below | None:
    """What is asked in this thread."""
    return _below if _on_training_thread() else None


def _on_training_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _left_out(below: Below, text: str) -> None:
    why = "the attempt does not count" if below.void else "a rank has just died"
    below.not_saved(f"{text}: nothing was written, {why}; {ADVICE}")


# -- saves ----------------------------------------------------------------------------------------


def _alone(real: Callee, name: str, target: Callable[..., object]) -> Callee:
    """A save by one rank. ``target``: of its arguments, the file."""

    @wraps(real)
    def save(*arguments: Any, **options: Any) -> Any:
        below, file = _asked(), target(*arguments, **options)
        if below is None or isinstance(file, _InMemory):
            return real(*arguments, **options)
        if _here.depth and below.cut_off:
            raise CutShort
        if not below.void:
            with below.saving():
                return real(*arguments, **options)
        if isinstance(file, (str, os.PathLike)):
            _skip(file)
        _left_out(below, f"{name} to {_shown(file)} at {line_of_script(sys._getframe(1))}")
        return None

    return save


def _skip(file: str | os.PathLike[str]) -> None:
    _skipped.add(os.path.abspath(os.fspath(file)))
    for name in () if _moves else ("replace", "rename"):
        _moves[name] = getattr(os, name)
        setattr(os, name, _moving(_moves[name]))


class _InMemory:
    """Something that is no file."""


def _file_of(thing: object) -> object:
    """What ``torch.save`` writes to: a path, a file, or something in memory."""
    if isinstance(thing, (str, os.PathLike)):
        return thing
    try:
        thing.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return _InMemory()
    return thing


def _shown(file: object) -> str:
    shown = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", file)
    return os.fsdecode(shown) if isinstance(shown, (str, bytes, os.PathLike)) else repr(shown)


def _jointly(real: Callee, name: str, target: Callable[..., object], answer: Callee) -> Callee:
    """A save that several ranks make together. ``answer``: what it returns if it is left out."""

    @wraps(real)
    def save(*arguments: Any, **options: Any) -> Any:
        below = _asked()
        if below is None or _here.depth:
            with contextlib.nullcontext() if _on_training_thread() else _in_thread():
                return real(*arguments, **options)
        text = f"{name} to {_shown(target(*arguments, **options))} at {line_of_script(sys._getframe(1))}"
        if below.cut_off:
            _left_out(below, text)
            _do_again(below)
            return answer(*arguments, **options)
        _here.depth += 1
        try:
            with below.saving():
                return real(*arguments, **options)
        except BaseException as e:
            if not below.outside or not any(below.explains(one) for one in _errors(e)):
                raise
            below.not_saved(f"{text}: a rank has died in it; what is there may not be whole until it is saved again")
            _do_again(below)
            return answer(*arguments, **options)
        finally:
            _here.depth -= 1

    return save


def _do_again(below: Below) -> None:
    """The step of a joint save that has not been made is to be done again, if that is possible."""
    if below.can_go_back:
        below.stood_in()


def _errors(error: BaseException) -> Iterator[BaseException]:
    """``error``, and what other ranks have sent (torch's CheckpointException)."""
    yield error
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict):
        yield from (one[0] for one in failures.values())


def _moving(real: Callee) -> Callee:
    @wraps(real)
    def move(source: Any, *arguments: Any, **options: Any) -> Any:
        if _skipped and _asked() is not None and os.path.abspath(os.fspath(source)) in _skipped:
            return None
        return real(source, *arguments, **options)

    return move


# -- asynchronous ones ----------------------------------------------------------------------------


@contextlib.contextmanager
def _in_thread() -> Iterator[None]:
    """A joint save in a separate thread: it ends with the exchange of the groups."""
    ours = threading.current_thread().name.startswith("flashrecovery-")  # fallback checkpoints do not communicate
    if _below is None or _here.began_at is not None or ours:
        yield
        return
    _here.began_at = _ordered.popleft() if _ordered else _below.exchanges()
    try:
        with groups.apart_from_steps():
            yield
    finally:
        _here.began_at = None


def _later(real: Callee, name: str, answer: Callee) -> Callee:
    """torch's ``async_save``."""

    @wraps(real)
    def save(*arguments: Any, **options: Any) -> Any:
        below = _asked()
        if below is None:
            return real(*arguments, **options)
        kind = options.get("async_checkpointer_type")
        if getattr(kind, "name", "THREAD") != "THREAD":
            line = line_of_script(sys._getframe(1))
            raise UnsupportedError(
                f"{name}(async_checkpointer_type={kind}) at {line}: its processes have a process group of their "
                "own, in which a replacement could not take part; AsyncCheckpointerType.THREAD is allowed"
            )
        text = f"{name} to {_shown(_checkpoint(*arguments, **options))} at {line_of_script(sys._getframe(1))}"
        if below.cut_off:
            _left_out(below, text)
            _do_again(below)
            return answer(*arguments, **options)
        began_at = below.exchanges()
        _ordered.append(began_at)
        try:
            with below.saving():
                result = real(*arguments, **options)
        except BaseException:
            with contextlib.suppress(ValueError):
                _ordered.remove(began_at)
            raise
        if isinstance(result, Future):
            return _forgiving(result, text, began_at, below)
        result.upload_completion = _forgiving(result.upload_completion, text, began_at, below)
        return result

    return save


def _forgiving(save: Future[Any], text: str, began_at: int, below: Below) -> Future[Any]:
    """A future that has no error if ``save`` has failed because a rank has died."""
    told: Future[Any] = Future()

    def ended(_: Future[Any]) -> None:
        error = save.exception()
        if error is None:
            told.set_result(save.result())
        elif began_at != below.exchanges() or any(below.explains(one) for one in _errors(error)):
            below.not_saved(f"{text}: a rank has died while it was under way, and it is given up: it is not whole")
            told.set_result(_nothing())
        else:
            told.set_exception(error)

    save.add_done_callback(ended)
    return told


def _nothing(*_: Any, **__: Any) -> Any:
    """The description of a checkpoint in which there is nothing."""
    return sys.modules["torch.distributed.checkpoint.metadata"].Metadata(state_dict_metadata={})


def _nothing_later(*arguments: Any, **options: Any) -> Any:
    """What ``async_save`` gives of such a one."""
    done: Future[Any] = Future()
    done.set_result(_nothing())
    stager = options.get("async_stager")
    if not getattr(getattr(stager, "_config", None), "use_async_staging", False):
        return done
    staged: Future[None] = Future()
    staged.set_result(None)
    saver = sys.modules["torch.distributed.checkpoint.state_dict_saver"]
    return saver.AsyncSaveResponse(staging_completion=staged, upload_completion=done)


def _checkpoint(_: object = None, storage_writer: object = None, *__: object, **options: object) -> object:
    """The directory of a checkpoint of torch."""
    writer = options.get("storage_writer") or storage_writer
    return options.get("checkpoint_id") or getattr(writer, "checkpoint_id", None) or getattr(writer, "path", writer)


# -- collectives ----------------------------------------------------------------------------------


def _guard_thread() -> None:
    """Raises DistBackendError in the thread of a save that is given up."""
    began_at = _here.began_at
    if began_at is not None and _below is not None and (_below.exchanges() != began_at or _below.cut_off):
        raise sys.modules["torch.distributed"].DistBackendError("the save was given up: a rank has died")


def _asked_outside() -> Below | None:
    """What is asked in this thread below the block, and in a discarded attempt. Elsewhere only a save's thread is
    guarded."""
    below = _asked()
    if below is not None and (below.outside or below.void):
        return below
    _guard_thread()
    return None


def _barrier(real: Callee) -> Callee:
    @wraps(real)
    def barrier(*arguments: Any, **options: Any) -> Any:
        below = _asked_outside()
        if below is None:
            return real(*arguments, **options)
        if below.cut_off:
            if _here.depth:
                raise CutShort
            if not (arguments[1:2] == (True,) or options.get("async_op")):
                return None
        _here.in_barrier = True
        try:
            return real(*arguments, **options)
        except RuntimeError as e:
            if _here.depth or not below.explains(e):
                raise
            return None
        finally:
            _here.in_barrier = False

    return barrier


def _receiving(real: Callee, name: str, given: Callable[..., list[Any] | None]) -> Callee:
    """An object collective. ``given``: of its arguments, the list in which this rank gets something; None: it sends."""

    @wraps(real)
    def collective(*arguments: Any, **options: Any) -> Any:
        below = _asked_outside()
        if below is None:
            return real(*arguments, **options)
        place = (script_line(sys._getframe(1)), name)
        if not below.cut_off:
            _here.with_objects = True
            try:
                result = real(*arguments, **options)
            except RuntimeError as e:
                if _here.depth or not below.explains(e):
                    raise
            else:
                _keep(place, given(*arguments, **options))
                return result
            finally:
                _here.with_objects = False
        elif _here.depth:
            raise CutShort
        objects = given(*arguments, **options)
        if objects is not None:
            below.stood_in()
            if place in _given:
                objects[:] = pickle.loads(_given[place])
        elif name == "scatter_object_list":
            _scatter_to_itself(*arguments, **options)
        return None

    return collective


def _keep(place: tuple[str, str], objects: list[Any] | None) -> None:
    if objects is None or _here.depth:
        return
    written = _Bounded()
    try:
        pickle.Pickler(written, pickle.HIGHEST_PROTOCOL).dump(objects)
    except Exception:  # noqa: BLE001 - code of the objects' own runs here
        _given.pop(place, None)
    else:
        _given[place] = bytes(written.content)


class _Bounded:
    """Takes :data:`KEPT_BYTES`."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, data: bytes) -> int:
        if len(self.content) + len(data) > KEPT_BYTES:
            raise BufferError("too large to be kept")
        self.content += data
        return len(data)


def _broadcast(object_list: list[Any], src: Any = None, group: Any = None, *_: Any, **options: Any) -> list[Any] | None:
    return None if _is_source(src, group, options) else object_list


def _scatter(
    scatter_object_output_list: list[Any], _: Any = None, src: Any = None, group: Any = None, **options: Any
) -> list[Any] | None:
    return None if _is_source(src, group, options) else scatter_object_output_list


def _scatter_to_itself(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any],
    src: Any = None,
    group: Any = None,
    group_src: Any = None,
) -> None:
    rank = sys.modules["torch.distributed"].get_rank(group)
    scatter_object_output_list[0] = scatter_object_input_list[rank]


def _receive(object_list: list[Any], *_: Any, **__: Any) -> list[Any]:
    return object_list


def _is_source(src: Any, group: Any, options: dict[str, Any]) -> bool:
    dist = sys.modules["torch.distributed"]
    if options.get("group_src") is not None:
        return bool(dist.get_rank(group) == options["group_src"])
    return bool(dist.get_rank() == (0 if src is None else src))


# -- where ----------------------------------------------------------------------------------------


def install_hooks() -> None:
    """Before the script imports anything: code that takes a function by its name gets ours."""
    install(
        {
            "torch.serialization": _torch,
            "torch.distributed.distributed_c10d": _collectives,
            "torch.distributed.checkpoint.state_dict_saver": _checkpoints,
            "safetensors": _safetensors,
            "transformers.modeling_utils": _transformers,
            "accelerate.accelerator": _accelerate,
            "deepspeed.runtime.engine": _deepspeed,
            "megatron.core.dist_checkpointing.serialization": _megatron,
        }
    )


def _put(module: Any, name: str, new: Callee, *packages: str) -> None:
    """Also in the packages that have the function by its name already."""
    old = getattr(module, name)
    for owner in (module, *(sys.modules[p] for p in packages if p in sys.modules)):
        if getattr(owner, name, None) is old:
            setattr(owner, name, new)


def _torch(module: ModuleType) -> None:
    new = _alone(getattr(module, "save"), "torch.save", lambda obj=None, f=None, *_, **__: _file_of(f))  # noqa: B009
    _put(module, "save", new, "torch")


def _collectives(module: ModuleType) -> None:
    received: dict[str, Callable[..., list[Any] | None]] = {
        "broadcast_object_list": _broadcast,
        "scatter_object_list": _scatter,
        "recv_object_list": _receive,
    }
    for name, given in received.items():
        _put(module, name, _receiving(getattr(module, name), name, given), "torch.distributed")
    for name in ("all_gather_object", "gather_object"):
        _put(module, name, _collected(getattr(module, name)), "torch.distributed")
    _put(module, "barrier", _barrier(getattr(module, "barrier")), "torch.distributed")  # noqa: B009


def _collected(real: Callee) -> Callee:
    """Objects of all ranks. Stand-ins give each rank its own."""

    @wraps(real)
    def collective(*arguments: Any, **options: Any) -> Any:
        below = _asked()
        if below is None:
            _guard_thread()
            return real(*arguments, **options)
        if _here.depth and below.cut_off:
            raise CutShort
        if _here.depth or below.cut_off or not below.outside:
            return real(*arguments, **options)
        _here.with_objects = True
        try:
            return real(*arguments, **options)
        except RuntimeError as e:
            if not below.explains(e):
                raise
        finally:
            _here.with_objects = False
        return real(*arguments, **options)  # by a stand-in

    return collective


def _checkpoints(module: Any) -> None:
    package = "torch.distributed.checkpoint"
    for name in ("save", "save_state_dict"):
        new = _jointly(getattr(module, name), f"{package}.{name}", _checkpoint, _nothing)
        _put(module, name, new, package)
    _put(module, "async_save", _later(module.async_save, f"{package}.async_save", _nothing_later), package)


def _safetensors(module: Any) -> None:
    new = _alone(module.serialize_file, "safetensors", lambda _=None, filename=None, *__, **___: filename)
    _put(module, "serialize_file", new, "safetensors.torch", "safetensors.numpy", "safetensors.flax")


def _joint(owner: Any, name: str, target: Callable[..., object], answer: Callee) -> None:
    setattr(owner, name, _jointly(getattr(owner, name), f"{owner.__name__}.{name}", target, answer))


def _first(_: object = None, path: object = None, *__: object, **options: object) -> object:
    """The destination of a method whose first argument it is."""
    named = (options.get(name) for name in ("output_dir", "save_directory", "save_dir", "checkpoint_dir"))
    return path if path is not None else next((one for one in named if one is not None), "its directory")


def _none(*_: Any, **__: Any) -> None:
    return None


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _transformers(module: Any) -> None:
    owner = module.PreTrainedModel
    owner.save_pretrained = _alone(owner.save_pretrained, "save_pretrained", _first)


def _accelerate(module: Any) -> None:
    module.Accelerator.save_state = saved_again(module.Accelerator.save_state)
    _joint(module.Accelerator, "save_state", _first, lambda *a, **o: str(_first(*a, **o)))
    _joint(module.Accelerator, "save_model", _first, _none)


def _deepspeed(module: Any) -> None:
    for name in ("save_checkpoint", "save_16bit_model"):
        _joint(module.DeepSpeedEngine, name, _first, _yes)


def _megatron(module: Any) -> None:
    def answer(*_: Any, async_sharded_save: bool = False, **__: Any) -> Any:
        if not async_sharded_save:
            return None
        requests = sys.modules["megatron.core.dist_checkpointing.strategies.async_utils"]
        return requests.AsyncRequest(None, (), [])

    real = module.save
    new = _jointly(real, "megatron.core.dist_checkpointing.save", _first, answer)
    _put(module, "save", new, "megatron.core.dist_checkpointing")
