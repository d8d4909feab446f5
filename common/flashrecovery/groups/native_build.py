"""Compiles and loads the C++ backend, once per torch build, source and interpreter.

The binary is tied to the torch it was compiled against, so it is built on the machine where it runs and kept in a
cache directory (``$FLASHRECOVERY_CACHE``, else ``~/.cache/flashrecovery``) under a name that contains all it
depends on. Many ranks may ask for it at once: a file lock lets one of them compile.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flashrecovery.errors import BuildError
from flashrecovery.terminal import say


@dataclass(frozen=True)
class Extension:
    """A C++ extension: the folder with ``module.cpp``, the module's name, and what a message calls it.

    ``headers``: folders with more headers that it includes.
    """

    sources: Path
    module: str
    what: str
    headers: tuple[Path, ...] = ()


BACKEND = Extension(
    Path(__file__).parent / "native", "flashrecovery_groups_native", "recoverable process-group backend"
)
_COMPILER_HINT = "install a C++20 compiler and the Python headers (Debian/Ubuntu: apt install g++ python3-dev)"

_COMPILE_SECONDS = 900  # a loaded single core needs about 60
_SANITIZE_ENV = "FLASHRECOVERY_SANITIZE"  # for `make test-asan` and `make test-tsan`; see tests/sanitizers/README.md
_SANITIZERS = ("address", "thread")

_lock = threading.Lock()
_module: ModuleType | None = None


def build(progress: Callable[[str], None] | None = None, extension: Extension = BACKEND) -> Path:
    """Compile the backend (or another extension) if it is not in the cache yet; return the path of the shared object.

    ``progress`` gets one line before a compilation starts (it takes 10-40 s) and one after it.
    Raises :class:`~flashrecovery.errors.BuildError` without a compiler, headers or a writable cache.
    """
    target = _target(extension)
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _file_lock(target.parent / f"{target.name}.lock"):
            if not target.exists():
                _compile(extension, target, progress or say)
    except OSError as error:
        raise BuildError(f"cannot write the build cache {target.parent}: {error}; set FLASHRECOVERY_CACHE") from error
    return target


def cached() -> Path | None:
    """The backend compiled for this torch and interpreter, or None if :func:`build` would have to compile it."""
    target = _target(BACKEND)
    return target if target.exists() else None


def native() -> Any:
    """The loaded extension module (compiled first if needed)."""
    global _module
    with _lock:
        if _module is None:
            _module = load(BACKEND)
        return _module


def loaded() -> Any | None:
    """The extension module if it has been loaded, without building it."""
    return _module


def load(extension: Extension) -> ModuleType:
    """The extension, compiled first if needed; each call loads it again. Raises BuildError."""
    return _load(build(extension=extension), extension.module)


def _target(extension: Extension) -> Path:
    digest = hashlib.sha256()
    for folder in (extension.sources, *extension.headers):
        for source in sorted(folder.iterdir()):
            if source.suffix in {".cpp", ".h"}:
                digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for part in (
        torch.__version__,
        torch.version.git_version,
        sys.version,
        str(sysconfig.get_config_var("SOABI")),
        *_sanitizer_flags(),
    ):
        digest.update(part.encode() + b"\0")
    cache = os.environ.get("FLASHRECOVERY_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "flashrecovery")
    return Path(cache) / "groups" / f"torch-{torch.__version__}-{digest.hexdigest()[:16]}" / f"{extension.module}.so"


def _sanitizer_flags() -> tuple[str, ...]:
    """What makes a sanitized build. Its runtime has to be in the process from the start (LD_PRELOAD)."""
    wanted = os.environ.get(_SANITIZE_ENV, "")
    if not wanted:
        return ()
    if wanted not in _SANITIZERS:
        raise BuildError(f"{_SANITIZE_ENV}={wanted}: allowed are {', '.join(_SANITIZERS)}")
    return (f"-fsanitize={wanted}", "-g", "-fno-omit-frame-pointer", "-O1")


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released with the file, also if the process dies
        yield


def _compile(extension: Extension, target: Path, progress: Callable[[str], None]) -> None:
    compiler = os.environ.get("CXX", "g++")
    python_headers = Path(sysconfig.get_paths()["include"])
    if shutil.which(compiler) is None:
        raise BuildError(f"no C++ compiler ({compiler!r} not found): {_COMPILER_HINT}")
    if not (python_headers / "Python.h").exists():
        raise BuildError(f"Python.h not found in {python_headers}: {_COMPILER_HINT}")
    root = Path(torch.__file__).parent
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    command = [
        *(compiler, "-shared", "-fPIC", "-std=c++20", "-O2", "-fvisibility=hidden"),
        *_sanitizer_flags(),
        *(
            f"-DTORCH_EXTENSION_NAME={extension.module}",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ),
        *("-isystem", str(root / "include"), "-isystem", str(root / "include/torch/csrc/api/include")),
        *("-isystem", str(python_headers)),
        *(f"-I{folder}" for folder in extension.headers),
        *(str(extension.sources / "module.cpp"), "-o", str(scratch)),
        *(f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]
    progress(f"compiling the {extension.what} (once per torch build, about 20 s) ...")
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        if done.returncode != 0:
            raise BuildError(
                f"compiling the {extension.what} failed; {_COMPILER_HINT}\n{' '.join(command)}\n{done.stderr[-4000:]}"
            )
        os.replace(scratch, target)
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"compiling the {extension.what} took over {_COMPILE_SECONDS} s: build it first with "
            "`flashrecovery doctor --build`"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)
    progress(f"compiled in {time.monotonic() - began:.0f} s: {target}")


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BuildError(f"cannot load {path}")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"cannot load {path}: {error}; delete it to have it compiled again") from error
    return module
