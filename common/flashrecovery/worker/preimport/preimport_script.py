"""What a zygote and a standby import ahead of a script: the imports in its text, then those of live workers.

The first part follows the order of the script (:mod:`.script_imports`). For the second part it is unknown when a module
was imported, and so in which environment, and after which changes to other modules. So these modules must not read a
variable that the script has set meanwhile, a trial must show that they become what they are in the workers
(:mod:`.import_trial`), and the second part is omitted if the script's text is only partly known.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from flashrecovery.config import CONFIG_ENV
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.worker.preimport import import_trial
from flashrecovery.worker.preimport.import_environment import ImportEnvironment
from flashrecovery.worker.preimport.preimport import Installed, find_spec, import_ahead, with_packages
from flashrecovery.worker.preimport.script_imports import Import, ScriptFacts, Setting, read_script

USUALLY = {
    "torch": ("torch.distributed", "torch.nn.parallel", "torch.optim", "torch.utils.data"),
    "torch.distributed": ("torch.distributed.fsdp", "torch.distributed.tensor"),
    "flashrecovery": (
        "flashrecovery.torch_native",
        "flashrecovery.worker.session",
        "flashrecovery.worker.startup.warm_up",
    ),
}
"""What scripts that have imported the one usually import later, in functions or through this package."""
LATER = {
    "torch": ("torch._dynamo",),
    "deepspeed": ("torch._inductor.compile_fx",),
    "megatron.core": ("torch._inductor.compile_fx",),
}
"""What such scripts import later still, in the library's functions: an optimizer's first step brings torch._dynamo, and
the engines of both frameworks bring the compiler; together up to a thousand modules. They read variables of the
environment, which the script may set before, in whatever function."""
OF_SETTINGS = {
    "parity": "flashrecovery.redundancy.parity.copies",
    "parallelism": "flashrecovery.worker.reshard.relayout",
}
"""What only jobs import that ask for it, when their first step comes."""
_READ_LATER = re.compile("TORCH|TRITON|INDUCTOR")
"""Variables that they read, mostly. Where the script sets such a one, these imports are not even begun."""
Tried = Callable[[str, "BaseException | None"], None]


def asked_for(settings: str) -> list[str]:
    """The modules in :data:`OF_SETTINGS` that a job with these settings (JSON, as workers get them) needs."""
    values = json.loads(settings)
    wanted = {"parity": values.get("redundancy") == "parity", "parallelism": values.get("parallelism") is not None}
    return [module for what, module in OF_SETTINGS.items() if wanted[what]]


class ScriptPreimport:
    """The imports made ahead of one script.

    Args:
        command: the script with its arguments, or ``-m module`` with them; the directory of its modules is already
            first on the module path.
        tried: called after each import; may raise.
        imported: receives the environment variables set by the imports in the script's text. Those set by other
            imports are dropped: it is unknown when the script would import these.
        facts: what this process, or its parent, has read of the script; None: it is read now.
    """

    def __init__(
        self,
        command: list[str],
        left_out: Iterable[str] = (),
        tried: Tried | None = None,
        imported: ImportEnvironment | None = None,
        facts: ScriptFacts | None = None,
    ) -> None:
        self._command = command
        self._left_out = frozenset(left_out)
        self._tried = tried
        self._imported = ImportEnvironment() if imported is None else imported
        self._installed = Installed.beside(command)
        self._uncertain: set[str] = set()
        self.facts = self._read() if facts is None else facts

    def _read(self) -> ScriptFacts:
        file = self.script_file()
        gpus = any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))
        if file is None:
            return ScriptFacts()
        return read_script(file, self._own_file, gpus=gpus, absent=self._is_nowhere)

    def _is_nowhere(self, top: str) -> bool:
        return top not in sys.modules and not self._installed.has(top) and find_spec(top) is None

    def script_file(self) -> Path | None:
        """None: a module that is installed, or is nowhere."""
        if self._command[0] != "-m":
            return Path(self._command[0])
        top, *parts = self._command[1].split(".")
        own = self._own_file(top)
        if own is None:
            return None
        if not parts:
            return own.with_name("__main__.py") if own.name == "__init__.py" else own
        place = (own if own.is_dir() else own.parent).joinpath(*parts)
        return place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__main__.py"

    def _own_file(self, top: str) -> Path | None:
        """See :data:`.script_imports.FindOwn`."""
        if top == "__main__" or self._installed.has(top):
            return None
        spec = find_spec(top)
        if spec is None:
            return None
        if spec.origin is not None and spec.has_location:
            return Path(spec.origin)
        places = list(spec.submodule_search_locations or ())
        return Path(places[0]) if places else None

    def import_all(self, learned: pb.Modules) -> None:
        """``learned``: what live workers have imported, and which variables their script has set. Those in ``unset``
        are not equal on all of them, or not there any more."""
        batch: list[str] = []
        for action in self.facts.actions:
            if isinstance(action, Import):
                if not action.member:
                    batch.append(action.name)
                    continue
                self._of_text(batch)
                batch = [action.name] if self._is_module(action.name) else []
            else:
                self._of_text(batch)
                batch = []
                self._set(action, learned)
        self._of_text(batch)
        for place in filter(None, (self.facts.changes_at, self.facts.ends_at)):
            print(f"{place}: what is imported after that is left to each rank", flush=True)
        if self.facts.ends_at:
            return
        for top, names in USUALLY.items():
            if top in sys.modules:
                self._ahead(names)
        if "flashrecovery" in sys.modules:
            self._ahead(asked_for(os.environ.get(CONFIG_ENV, "{}")))
        self._later()
        set_by_text = {action.name for action in self.facts.actions if isinstance(action, Setting)}
        self._uncertain |= (learned.env.keys() - set_by_text) | set(learned.unset)
        new = [name for name in learned.names if name not in sys.modules and self._is_where_it_was(name, learned)]
        self._ahead(import_trial.equal_ones(new, learned.outcomes, self._ahead_in_trial))

    def _later(self) -> None:
        if self.facts.sets is None or any(map(_READ_LATER.search, self.facts.sets)):
            return
        uncertain, self._uncertain = self._uncertain, self._uncertain | self.facts.sets
        for top, names in LATER.items():
            if top in sys.modules:
                self._ahead(names)
        self._uncertain = uncertain

    def _set(self, setting: Setting, learned: pb.Modules) -> None:
        value = learned.env.get(setting.name) if setting.value is None else setting.value
        self._uncertain.discard(setting.name)
        if value is None:
            self._uncertain.add(setting.name)
            os.environ.pop(setting.name, None)  # hide it from code that iterates over all variables
        elif setting.default:
            os.environ.setdefault(setting.name, value)
        else:
            os.environ[setting.name] = value

    def _of_text(self, names: Iterable[str]) -> None:
        with self._imported.noting():
            self._ahead(names)

    def _ahead(self, names: Iterable[str]) -> None:
        allowed = [name for name in names if self._left_out.isdisjoint(with_packages(name))]
        import_ahead(allowed, self._installed, uncertain=self._uncertain, tried=self._tried)

    def _ahead_in_trial(self, names: Sequence[str], tried: Tried) -> None:
        allowed = [name for name in names if self._left_out.isdisjoint(with_packages(name))]
        import_ahead(allowed, self._installed, uncertain=self._uncertain, tried=tried)

    def _is_module(self, name: str) -> bool:
        """Whether ``from package import it`` imports a module; the package has been imported if it can be."""
        package, _, member = name.rpartition(".")
        known = sys.modules.get(package)
        if known is None or not hasattr(known, "__path__") or hasattr(known, member):
            return False
        return find_spec(name) is not None

    def _is_where_it_was(self, name: str, learned: pb.Modules) -> bool:
        """Whether here the same file would be imported as in the workers, whose script may have changed the path."""
        top = name.partition(".")[0]
        if top not in learned.origins or top in sys.modules:
            return True
        spec = find_spec(top)
        return spec is not None and (spec.origin or "") == learned.origins[top]


def imported_so_far(setting: Mapping[str, str | None], outcomes: Mapping[str, int]) -> pb.Modules:
    """What this process has imported, and from where. ``setting``: what its script has done to the environment;
    ``outcomes``: what has become of the modules that it has imported since its first line.
    Modules generated at run time (torch.compile's) are omitted: they cannot be imported."""
    found = {n: m for n, m in list(sys.modules.items()) if m is not None and not n.startswith("__")}
    modules = {name: module for name, module in found.items() if not _was_made(name, module, found)}
    specs = {n: getattr(m, "__spec__", None) for n, m in modules.items() if "." not in n}
    origins = {n: getattr(spec, "origin", None) or "" for n, spec in specs.items()}
    env = {name: value for name, value in setting.items() if value is not None}
    kept = {name: outcome for name, outcome in outcomes.items() if name in modules}
    unset = setting.keys() - env.keys()
    return pb.Modules(names=list(modules), origins=origins, env=env, unset=unset, outcomes=kept)


def _was_made(name: str, module: object, beside: Mapping[str, object]) -> bool:
    package = name.rpartition(".")[0]
    inside = not package or hasattr(beside.get(package), "__path__")
    return getattr(module, "__spec__", None) is None and not inside
