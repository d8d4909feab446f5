"""Imports before there is a rank, in a standby or a zygote: installed packages, never the user's own modules.

A module is run when it is imported, and what it reads then it keeps: a default taken from ``sys.argv``, from the
environment or from a file. The libraries that are installed beside torch are the same for every rank. A script's own
modules are not, and the script imports them itself, when the process has its rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import site
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from flashrecovery.runtime.environment import NEW_RANK_ENV, PER_TASK_ENV

_RANK_KEYS = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT", NEW_RANK_ENV})
"""What the environment of a standby cannot contain yet."""
_ALL_MODULES = "(?s:.*)"
"""The pattern of our own warnings filter; no other filter has it."""
_OURS = frozenset({"flashrecovery", "fr_deepspeed", "fr_megatron"})


class DeviceAskedError(BaseException):
    """A module uses a GPU while it is imported: it would take memory on GPU 0, which may belong to another rank. A
    BaseException, so that no ``except Exception`` of a library swallows it."""


class RankUnknownError(BaseException):
    """A module asks for its rank while it is imported. No ``except Exception`` of a library may swallow it."""


def import_ahead(
    names: Sequence[str],
    installed: Installed,
    *,
    uncertain: Iterable[str] = (),
    tried: Callable[[str, BaseException | None], None] | None = None,
) -> int:
    """Import these modules, as far as they are installed. What cannot be imported here, the script will import itself.
    Returns how many modules that were.

    Args:
        uncertain: variables of the environment, besides a rank's own, for which no module may ask.
        tried: called after each import with its name, and what it has raised. May raise.
    """
    count = 0
    failed: set[str] = set()
    # torch first, so that it can be kept from the GPU before anything that is built on it is imported.
    ordered = [*(name for name in ("torch",) if name in names), *names]
    per_task = os.environ.get(PER_TASK_ENV, "").split()
    with _unwarned(), _without({*_RANK_KEYS, *per_task, *uncertain}), _without_device() as keep_off:
        for name in ordered:
            keep_off()
            if name in sys.modules or not installed.has(name) or not failed.isdisjoint(with_packages(name)):
                continue
            error: BaseException | None = None
            try:
                importlib.import_module(name)
                count += 1
            except (Exception, RankUnknownError, DeviceAskedError) as e:  # noqa: BLE001 - any module may raise anything at import
                print(f"{name} not imported ahead: {type(e).__name__}: {e}", file=sys.stderr)
                error = e
                failed.add(not_imported(name))
            if tried is not None:
                tried(name, error)
    return count


def with_packages(name: str) -> list[str]:
    """``a.b.c`` lies in ``a`` and ``a.b``; these come first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def not_imported(name: str) -> str:
    """What to blame when the import of ``name`` has failed: the outermost of its packages that is not there. Without it
    none of its modules can be imported."""
    return next((n for n in with_packages(name) if n not in sys.modules), name)


def find_spec(name: str) -> ModuleSpec | None:
    """Where a module would be imported from; None if it is not there, or its package cannot be imported."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


class Installed:
    """Which modules belong to Python or to installed packages.

    Packages installed from a checkout ("editable") are work in progress, and do not count. In folders of PYTHONPATH,
    modules count that an installer has put there, as clusters' module systems and ``pip install --target`` do: they are
    in its records ("*.dist-info/RECORD").

    Args:
        own: top-level package of the script itself.
    """

    def __init__(self, own: str = "") -> None:
        paths = sysconfig.get_paths()
        places = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
        places += [*site.getsitepackages(), site.getusersitepackages()]
        places += [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]  # by a .pth file
        self._places = {Path(p).resolve() for p in places} | _recorded()
        self._own = own
        self._known: dict[str, bool] = {}
        self._files: dict[str, bool] = {}
        specs = [find_spec(name) for name in _OURS]
        self._of_ours = {Path(s.origin).resolve().parent for s in specs if s is not None and s.origin is not None}

    @staticmethod
    def beside(command: Sequence[str]) -> Installed:
        """For the script of this command, or of ``-m module`` with its arguments."""
        return Installed(own=command[1].partition(".")[0] if command[0] == "-m" else "")

    def has(self, name: str) -> bool:
        top = name.partition(".")[0]
        if top not in self._known:
            self._known[top] = top not in (self._own, "__main__") and self._found(top)
        return self._known[top]

    def has_file(self, name: str) -> bool:
        """Whether a file belongs to one of them; code without a file does ("<frozen os>")."""
        if name not in self._files:
            self._files[name] = name.startswith("<frozen") or _lies_in(self._places | self._of_ours, name)
        return self._files[name]

    def _found(self, top: str) -> bool:
        if top in _OURS or top in sys.builtin_module_names:
            return True
        spec = find_spec(top)
        if spec is None:
            return False
        if spec.origin in ("built-in", "frozen"):
            return True
        where = [spec.origin] if spec.origin is not None else list(spec.submodule_search_locations or ())
        return bool(where) and all(_lies_in(self._places, w) for w in where)


def _lies_in(places: Set[Path], name: str) -> bool:
    path = Path(name).resolve()
    return not places.isdisjoint((path, *path.parents))


def _recorded() -> set[Path]:
    """The packages and modules, as resolved paths, that an installer has put into folders of PYTHONPATH."""
    found = set()
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        for record in Path(folder).glob("*.dist-info/RECORD"):
            tops = {
                line.partition(",")[0].partition("/")[0] for line in record.read_text("utf-8", "replace").splitlines()
            }
            found |= {(Path(folder) / top).resolve() for top in tops if not top.startswith("..")}
    return found


@contextmanager
def _unwarned() -> Iterator[None]:
    """Nothing that is imported warns. What it does to the filters, and to where warnings go, it does for the script,
    too: :func:`warnings.catch_warnings` would take it back."""
    warnings.filterwarnings("ignore", message="", module=_ALL_MODULES)
    ours = warnings.filters[0]
    try:
        yield
    finally:
        with suppress(ValueError):  # a module has called warnings.resetwarnings()
            warnings.filters.remove(ours)  # type: ignore[attr-defined]


@contextmanager
def _without_device() -> Iterator[Callable[[], None]]:
    """Within, using a GPU through torch raises DeviceAskedError, once the yielded function was called after the import
    of torch."""
    found: list[tuple[Any, Any]] = []

    def refuse() -> None:
        raise DeviceAskedError("it uses a GPU")

    def keep_off() -> None:
        cuda = sys.modules.get("torch.cuda")
        if cuda is not None and not found and not cuda.is_initialized():
            found.append((cuda, cuda._lazy_init))
            cuda._lazy_init = refuse  # type: ignore[attr-defined]

    try:
        yield keep_off
    finally:
        for cuda, original in found:
            cuda._lazy_init = original


@contextmanager
def _without(keys: Set[str]) -> Iterator[None]:
    """Within, reading one of these environment variables raises RankUnknownError."""
    environment = type(os.environ)
    original = environment.__getitem__

    def guarded(self: Mapping[str, str], key: str) -> str:
        if key in keys and self is os.environ:
            raise RankUnknownError(f"it reads {key} from the environment")
        return original(self, key)  # type: ignore[arg-type]

    environment.__getitem__ = guarded  # type: ignore[method-assign]
    try:
        yield
    finally:
        environment.__getitem__ = original  # type: ignore[method-assign]
