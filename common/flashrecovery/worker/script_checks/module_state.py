"""What the script's modules keep beside the variables of the functions that are running: their other variables, and
what classes, functions and objects hold that these lead to. Nothing of the script's code runs for it."""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flashrecovery.worker.local_state.fingerprints import is_plain
from flashrecovery.worker.local_state.generators import as_stateful
from flashrecovery.worker.script_text.held_state import held_by, objects_from
from flashrecovery.worker.script_text.loop_carried import SharedByFunctions, shared_by_functions
from flashrecovery.worker.script_text.script_frames import carried_by_loop_at, tree_of
from flashrecovery.worker.script_text.script_modules import ScriptModules


class ScriptModuleState:
    """``variables``: of all modules of the script, by the path that its text has for them."""

    def __init__(self) -> None:
        self._modules = ScriptModules()

    def variables(self, around: Sequence[types.FrameType]) -> dict[str, tuple[str, Any]]:
        """By path: the module's name, and the value. Without the module's name in the path if it is one of ``around``,
        the functions that are running; without those of theirs that these functions' loops set, and those of others
        that each round of these sets before it reads them."""
        running = {id(one.f_globals) for one in around}
        by_loops, remade = set[str](), set[str]()
        for one in around:
            carried = carried_by_loop_at(one.f_code.co_filename, one.f_lineno)
            by_loops |= carried.names | carried.set_here | carried.remade
            remade |= {_in_module(one, path) for path in carried.remade}
        found = {}
        for name, module in self._modules.besides({}):
            prefix = "" if id(vars(module)) in running else f"{name}."
            for variable, value in list(vars(module).items()):
                path = prefix + variable
                if not variable.startswith("__") and path not in (remade if prefix else by_loops):
                    found[path] = name, value
        return found

    def plain(
        self, variables: Mapping[str, tuple[str, Any]], known: frozenset[int], paths: Mapping[int, str]
    ) -> Iterator[tuple[str, str, Any]]:
        """The plain ones of ``variables``, and plain values that others hold: path, name of the module, value.

        Args:
            known: identities of what is protected.
            paths: of things that the running functions lead to, by identity.
        """
        for path, (module, value) in variables.items():
            if is_plain(value):
                yield paths.get(id(value), path), module, value
        seen: set[int] = set()
        for path, (module, value) in variables.items():
            for place, thing in objects_from([(path, value)], known, seen):
                if as_stateful(thing) is None:
                    where = paths.get(id(thing), place)
                    for name, part in held_by(thing).items():
                        if is_plain(part):
                            yield f"{where}.{name}", module, part

    def may_change(self, around: Sequence[types.FrameType], known: frozenset[int]) -> list[str]:
        """Paths of what changes from step to step as far as the text says; see :meth:`plain`."""
        found = self.plain(self.variables(around), known, {})
        return sorted({path for path, module, value in found if self.is_shared(path, module)})

    def is_shared(self, path: str, module: str) -> bool:
        """Whether the text of one of the modules may change what has this path, and one may read it later. ``module``:
        the one that leads to it."""
        name = path.rpartition(".")[2].rstrip("=").partition("[")[0]
        texts = [(one == module, _shared_in(str(it.__file__))) for one, it in self._modules.besides({})]
        read = (text.names_read[0 if own else 1] for own, text in texts)
        changed = (text.names_changed[0 if own else 1] for own, text in texts)
        return any(name in names for names in changed) and any(name in names for names in read)


def _in_module(frame: types.FrameType, path: str) -> str:
    """``path`` with the name of the module that its first part leads to."""
    root, dot, rest = path.partition(".")
    found = frame.f_locals.get(root, frame.f_globals.get(root)) if dot else None
    return f"{found.__name__}.{rest}" if isinstance(found, types.ModuleType) else path


@functools.lru_cache(4096)
def _shared_in(file: str) -> SharedByFunctions:
    tree = tree_of(file)
    return shared_by_functions(tree) if isinstance(tree, ast.Module) else SharedByFunctions()
