"""The text of the script and of its own modules, with the loops that take its steps under recovery.

Rewritten is what speaks of DeepSpeed and makes a step's calls (:mod:`flashrecovery.worker.own_loops.rewrite`); with
``--auto``, all that makes them. Where nothing is protected, the rewritten text does what it did before. Nothing of it
is kept on disk.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from flashrecovery.config import protects_as_it_is
from flashrecovery.util.import_hooks import install
from flashrecovery.worker.preimport.own_files import FRAMEWORKS, is_own_file

if TYPE_CHECKING:
    from flashrecovery.worker.auto.steps import AutoProtection
    from flashrecovery.worker.own_loops.rewrite import Makes
    from flashrecovery.worker.recovery import Recovery

_OF_DEEPSPEED = (b"deepspeed", b"accelerate")
"""accelerate may make the engine without a word of it in the script."""
_CALLS = (b".backward(", b".step(")
_IMPORTS = re.compile(
    rb"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#;]+)|import[ \t]+([^\n#;]+))", re.MULTILINE
)
_COMMENTS = re.compile(rb"#[^\n]*")
_PACKAGE = "__init__.py"
_LIGHTNING = re.compile(rb"^\s*(?:from|import)\s+lightning\b(?!\.fabric)", re.MULTILINE)
_FILES = 500
"""The most modules of a script that are read to see what they call."""
_replacement = False
_auto: Callable[[], AutoProtection] | None = None
"""Where a script is protected as it is (``--auto``). It imports torch, when it is called for the first time."""
_hook: Any = None
"""Looks at the steps of torch's optimizers before the first protected one."""
_folders: list[str] = []
_sources: OwnSources | None = None


def compiled_text(text: bytes, file: str) -> CodeType:
    """The compiled text of the script. Raises SyntaxError as the compiler does."""
    global _sources
    if _sources is None or not _sources.are_of(text, file, any_framework=_auto is not None):
        _sources = OwnSources(text, file, any_framework=_auto is not None)
    return _rewritten(text, file) or compile(text, file, "exec", dont_inherit=True)


def _rewritten(text: bytes, file: str) -> CodeType | None:
    _take_output(text)
    if _sources is None or not _sources.take_steps:
        return None
    from flashrecovery.worker.own_loops.rewrite import may_make_steps, rewrite

    elsewhere = _sources.made_in_imported(text, file)
    if not may_make_steps(text, elsewhere):
        return None
    rewritten = rewrite(text, file, elsewhere)
    if not rewritten.loops and not rewritten.iterators:
        return None
    try:
        code = compile(rewritten.tree, file, "exec", dont_inherit=True)
    except SyntaxError:  # more blocks in one another than Python has: its steps are refused
        return None
    from flashrecovery.worker.own_loops.loops import LOOPS

    if _auto is not None:
        LOOPS.start_by(_auto())
    LOOPS.take(rewritten, file, replacement=_replacement)
    return code


def _take_output(text: bytes) -> None:
    """What hooks of Lightning's Trainer print belongs to its steps."""
    if _auto is not None and _LIGHTNING.search(text):
        from flashrecovery.worker.own_loops.loops import LOOPS

        LOOPS.output.take(replacement=_replacement)


def read_ahead(file: str) -> None:
    """In a zygote: its forks need not read again what has not changed. ``file``: the script."""
    global _sources, _folders
    _folders = _own_places()
    with contextlib.suppress(OSError):
        text = Path(file).read_bytes()
        _sources = OwnSources(text, file, any_framework=protects_as_it_is(os.environ))
        if _sources.take_steps:
            from flashrecovery.worker.script_text.script_modules import read_module

            _sources.made_in_imported(text, file)
            for path in _sources.files:
                read_module(path)


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    """The stamp of a file: it changes with the file and with each write to it."""
    return status.st_ino, status.st_size, status.st_mtime_ns


class OwnSources:
    """The texts of the script and of its own modules, as far as import statements lead to them.

    Args:
        file: of the script.
        any_framework: they need not speak of DeepSpeed.
    """

    def __init__(self, text: bytes, file: str, *, any_framework: bool = False) -> None:
        self._made: dict[str, Makes] = {}
        self._texts: dict[str, bytes] = {}
        self._imported: dict[str, list[str]] = {}
        self._script, self._any_framework = (text, file), any_framework
        self._read_at: dict[str, tuple[int, int, int]] = {}
        self._read(text, file)
        texts = self._texts.values()
        of_deepspeed = any(word in one.lower() for one in texts for word in _OF_DEEPSPEED)
        self.take_steps = (any_framework or of_deepspeed) and all(any(call in one for one in texts) for call in _CALLS)
        if not self.take_steps:
            self._texts.clear()

    def _read(self, text: bytes, file: str) -> None:
        waiting = [(text, file)]
        while waiting and len(self._texts) < _FILES:
            text, file = waiting.pop()
            self._texts[file] = text
            self._imported[file] = [*_imported_by(text, file)]
            for path in self._imported[file]:
                if path not in self._texts:
                    with contextlib.suppress(OSError), open(path, "rb") as source:
                        self._read_at[path] = _stamp(os.fstat(source.fileno()))
                        waiting.append((source.read(), path))

    @property
    def files(self) -> list[str]:
        return [*self._texts]

    def are_of(self, text: bytes, file: str, *, any_framework: bool) -> bool:
        """Whether they are those of this script, and what has been read is still there."""
        if (text, file) != self._script or any_framework != self._any_framework:
            return False
        try:
            return all(_stamp(os.stat(path)) == stamp for path, stamp in self._read_at.items())
        except OSError:
            return False

    def made_in_imported(self, text: bytes, file: str) -> Makes:
        """By functions of the modules that this one imports, and of those that these import."""
        from flashrecovery.worker.own_loops.rewrite import Makes

        if file not in self._texts:
            self._read(text, file)
        made = Makes()
        for path in self._imported[file]:
            made |= self._made_in(path)
        return made

    def _made_in(self, file: str) -> Makes:
        from flashrecovery.worker.own_loops.rewrite import Makes, made_in, may_make_steps

        if file not in self._made:
            self._made[file] = made = Makes()  # of modules that import each other
            for path in self._imported.get(file, ()):
                made |= self._made_in(path)
            text = self._texts.get(file, b"")
            if may_make_steps(text, made):
                with contextlib.suppress(SyntaxError):
                    made |= made_in(ast.parse(text), made)
            self._made[file] = made
        return self._made[file]


def _imported_by(text: bytes, file: str) -> Iterator[str]:
    """Files of the script's own modules. Read without parsing: each replacement does it, and most scripts speak of no
    DeepSpeed."""
    for found in _IMPORTS.finditer(_COMMENTS.sub(b"", text)):
        dots, module, taken, plain = (part.decode(errors="replace") if part else "" for part in found.groups())
        names = [words[0] for one in (taken or plain).strip("() \t\r\n").split(",") if (words := one.split())]
        if plain:
            for name in names:
                yield from _files_of(name, _own_folders(file))
            continue
        folder = os.path.dirname(file)
        for _ in dots[1:]:
            folder = os.path.dirname(folder)
        for name in names:
            yield from _files_of(".".join(filter(None, (module, name))), [folder] if dots else _own_folders(file))


def _own_folders(file: str) -> list[str]:
    return [os.path.dirname(file), *_folders]


def _files_of(name: str, folders: Sequence[str]) -> Iterator[str]:
    """The files of a dotted name: the module, the packages around it, and the module that may hold its last part."""
    parts = name.split(".")
    if parts[0] in FRAMEWORKS:
        return
    for folder in folders:
        found = [
            path
            for number in range(1, len(parts) + 1)
            for path in (f"{os.path.join(folder, *parts[:number])}.py", os.path.join(folder, *parts[:number], _PACKAGE))
            if os.path.isfile(path) and is_own_file(path)
        ]
        if found:
            yield from found
            return


class OwnModules(MetaPathFinder):
    """Finds the script's own modules before anybody else does. ``folders``: where they lie."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = [os.path.abspath(folder) for folder in folders]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in FRAMEWORKS:
            return None
        places = self._folders if path is None else [place for place in path if is_own_file(os.path.join(place, "x"))]
        spec = PathFinder.find_spec(fullname, places, target) if places else None
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = _OwnText(spec.loader.name, spec.loader.path)
        return spec


class _OwnText(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        return _rewritten(self.get_data(self.path), self.path) or super().get_code(fullname)


def find_own_modules(init: Callable[[], Recovery], *, replacement: bool) -> None:
    """From now on, before the script's first line.

    Args:
        init: ``flashrecovery.init()``, for scripts that do not call it.
        replacement: this is not the first process of its rank.
    """
    global _replacement, _folders, _auto
    _replacement = replacement
    if protects_as_it_is(os.environ):
        _auto = functools.cache(functools.partial(_auto_protection, init))
        install({"torch.optim.optimizer": functools.partial(_watch_steps, _auto)})
    _folders = _own_places()
    sys.meta_path.insert(0, OwnModules(_folders))


def _own_places() -> list[str]:
    return [place for place in sys.path if place and is_own_file(os.path.join(place, "x")) and os.path.isdir(place)]


def _auto_protection(init: Callable[[], Recovery]) -> AutoProtection:
    from flashrecovery.worker.auto.steps import AutoProtection

    return AutoProtection(init, _stop_watching, _made_in_imported)


def _made_in_imported(text: bytes, file: str) -> Makes:
    """See :meth:`OwnSources.made_in_imported`."""
    sources = _sources or OwnSources(text, file)
    return sources.made_in_imported(text, file)


def _watch_steps(auto: Callable[[], AutoProtection], optimizers: ModuleType) -> None:
    """torch.optim.optimizer has just been imported, and torch perhaps not yet as a whole."""
    global _hook

    def stepping(optimizer: Any, *_: Any) -> None:
        auto().check_step(sys._getframe(1), optimizer)

    _hook = optimizers.register_optimizer_step_pre_hook(stepping)


def _stop_watching() -> None:
    """The first protected step begins."""
    global _hook
    if _hook is not None:
        _hook.remove()
        _hook = None


def script_is_over() -> None:
    """All that it has printed is shown."""
    loops = sys.modules.get("flashrecovery.worker.own_loops.loops")
    if loops is not None:
        loops.LOOPS.output.show_all()
