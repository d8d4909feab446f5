"""How objects are made and changed.

An object is changed by its own methods: no code outside of a class sets an attribute of its objects. What a name refers
to is followed through annotations, constructors and assignments, as far as they tell; a container counts as what is in
it. That finds what a type checker would, in a few seconds. A private class (``_Name``) is part of its file, which may
set what it likes, and a property with a setter is a method. Messages (protobuf) and objects of other libraries are not
of our classes.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "common" / "flashrecovery", ROOT / "fr_deepspeed", ROOT / "fr_megatron")

ALLOWED: dict[str, str] = {}
"""``Class.attribute`` -> why it is set from outside all the same."""

_OF_CONTAINERS = {"copy", "get", "items", "pop", "popitem", "setdefault", "values"}
"""Methods that give what is in a container."""
_PASSING = {"dict", "enumerate", "iter", "list", "max", "min", "next", "replace", "set", "sorted", "tuple", "zip"}
"""Functions that give what they are given, or a part of it."""

Kinds: TypeAlias = frozenset[str]
"""Names of classes that something may be an object, or a container of objects, of."""
NONE: Kinds = frozenset()


@dataclass
class Scope:
    """A function, a class or a file, with the names in it.

    Attributes:
        values: names -> what they are set to, or a part of it.
        annotations: names -> what is said of them; of functions, of what they return.
        known: names -> what they may be, as far as that is known so far.
        owner: of a method, its class.
    """

    around: Scope | None
    owner: str = ""
    values: list[tuple[str, ast.expr]] = field(default_factory=list)
    annotations: list[tuple[str, ast.expr]] = field(default_factory=list)
    known: dict[str, Kinds] = field(default_factory=dict)
    sets: list[ast.Attribute] = field(default_factory=list)


@dataclass
class Class:
    """One of ours. ``members``: what they may be, as far as that is known so far."""

    name: str
    path: Path
    bases: list[str]
    members: dict[str, Kinds] = field(default_factory=dict)
    setters: set[str] = field(default_factory=set)
    values: list[tuple[str, ast.expr, Scope]] = field(default_factory=list)


class Reader(ast.NodeVisitor):
    """Reads one file."""

    def __init__(self, path: Path, scope: Scope) -> None:
        self.classes: list[Class] = []
        self.scopes = [scope]
        self.annotations: list[tuple[Class, str, ast.expr]] = []
        self._path, self._scope = path, scope
        self._class: Class | None = None  # whose body this is
        self._self: Class | None = None  # whose method this is

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self._class, self._self
        self._class = self._self = Class(node.name, self._path, [b.id for b in node.bases if isinstance(b, ast.Name)])
        self.classes.append(self._class)
        self.generic_visit(node)
        self._class, self._self = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, of_class = self._scope, self._class
        if of_class is not None and any(
            isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list
        ):
            of_class.setters.add(node.name)
        if node.returns is not None:
            self._says(node.name, node.returns)
        self._scope, self._class = Scope(outer, "" if self._self is None else self._self.name), None
        self.scopes.append(self._scope)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if argument.annotation is not None:
                self._scope.annotations.append((argument.arg, argument.annotation))
            elif argument.arg not in ("self", "cls"):
                self._scope.known[argument.arg] = NONE
        self.generic_visit(node)
        self._scope, self._class = outer, of_class

    visit_AsyncFunctionDef = visit_FunctionDef

    def _says(self, name: str, annotation: ast.expr) -> None:
        if self._class is None:
            self._scope.annotations.append((name, annotation))
        else:
            self.annotations.append((self._class, name, annotation))

    def _takes(self, target: ast.expr, value: ast.expr | None) -> None:
        """``target`` is set, perhaps to a part of ``value``; None: what it is set to says nothing."""
        match target, value:
            case ast.Tuple(elts=targets) | ast.List(elts=targets), ast.Tuple(elts=values) if len(targets) == len(
                values
            ):
                for one, its in zip(targets, values, strict=True):
                    self._takes(one, its)
            case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), _):
                for one in targets:
                    self._takes(one, value)
            case ast.Starred(value=one), _:
                self._takes(one, value)
            case ast.Name(id=name), ast.expr() if self._class is not None:
                self._class.values.append((name, value, self._scope))
            case ast.Name(id=name), ast.expr():
                self._scope.values.append((name, value))
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name), ast.expr() if self._self is not None:
                self._self.values.append((name, value, self._scope))
            case ast.Attribute(value=ast.Name(id="self" | "cls")), _:
                pass
            case ast.Attribute(), _:
                self._scope.sets.append(target)

    def generic_visit(self, node: ast.AST) -> None:
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._takes(target, node.value)
            case ast.AnnAssign(target=ast.Name(id=name)):
                self._says(name, node.annotation)
            case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name)) if self._self is not None:
                self.annotations.append((self._self, name, node.annotation))
            case ast.AugAssign() | ast.AnnAssign() | ast.NamedExpr():
                self._takes(node.target, node.value)
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._takes(node.target, node.iter)
            case ast.withitem() if node.optional_vars is not None:
                self._takes(node.optional_vars, node.context_expr)
            case ast.Delete():
                for target in node.targets:
                    self._takes(target, None)
        super().generic_visit(node)


class Code:
    """All of these files (their paths and texts)."""

    def __init__(self, files: Iterable[tuple[Path, str]]) -> None:
        self.classes: dict[str, list[Class]] = defaultdict(list)
        self._scopes: list[tuple[Path, Scope]] = []
        self._shared = Scope(None)  # what a file has is known in all of them
        readers = []
        for path, text in files:
            reader = Reader(path, self._shared)
            reader.visit(ast.parse(text))
            self._scopes += [(path, scope) for scope in reader.scopes[1:]]
            for one in reader.classes:
                self.classes[one.name].append(one)
            readers.append(reader)
        self._scopes.append((Path(), self._shared))
        for annotated in (said for reader in readers for said in reader.annotations):
            one, name, annotation = annotated
            one.members[name] = one.members.get(name, NONE) | self._named(annotation)
        for _, scope in self._scopes:
            for name, annotation in scope.annotations:
                scope.known[name] = scope.known.get(name, NONE) | self._named(annotation)
        while self._learn():
            pass

    def _named(self, annotation: ast.expr) -> Kinds:
        """The classes of ours that an annotation names, wherever in it; ``pb.Name`` is none."""
        return frozenset(re.findall(r"(?<![\w.])\w+", ast.unparse(annotation))) & self.classes.keys()

    def _learn(self) -> bool:
        """Follow all assignments once. Returns whether that has shown anything."""
        news = False
        for one in (one for of_name in self.classes.values() for one in of_name):
            for name, value, scope in one.values:
                news |= self._adds(one.members, name, self._kinds(value, scope))
        for _, scope in self._scopes:
            for name, value in scope.values:
                news |= self._adds(scope.known, name, self._kinds(value, scope))
        return news

    @staticmethod
    def _adds(known: dict[str, Kinds], name: str, kinds: Kinds) -> bool:
        before = known.get(name)
        known[name] = kinds if before is None else before | kinds
        return known[name] != before

    def _lines_of(self, kind: str) -> Iterator[Class]:
        """The classes of this name, and what they inherit from."""
        for one in self.classes.get(kind, ()):
            yield one
            for base in one.bases:
                if base != kind:
                    yield from self._lines_of(base)

    def _kinds(self, node: ast.expr, scope: Scope) -> Kinds:
        """What ``node`` may be there, as far as that is known so far."""
        match node:
            case ast.Name(id="self" | "cls") if scope.owner:
                return frozenset({scope.owner})
            case ast.Name(id=name):
                while name not in scope.known and scope.around is not None:
                    scope = scope.around
                return frozenset({name}) if name in self.classes else scope.known.get(name, NONE)
            case ast.Attribute(value=base, attr=name):
                held = self._kinds(base, scope)
                members = (one.members.get(name, NONE) for kind in held for one in self._lines_of(kind))
                return NONE.union(*members, held if name in _OF_CONTAINERS else NONE)
            case ast.Call(func=ast.Name(id=name), args=parts) if name in _PASSING:
                return NONE.union(*(self._kinds(part, scope) for part in parts))
            case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                return NONE.union(*(self._kinds(part, scope) for part in parts))
            case ast.Dict(values=parts):
                return NONE.union(*(self._kinds(part, scope) for part in parts))
            case ast.IfExp(body=one, orelse=other):
                return self._kinds(one, scope) | self._kinds(other, scope)
            case ast.Call(func=part) | ast.Subscript(value=part) | ast.Starred(value=part) | ast.Await(value=part):
                return self._kinds(part, scope)
            case ast.NamedExpr(value=part) | ast.DictComp(value=part):
                return self._kinds(part, scope)
            case ast.ListComp(elt=part) | ast.SetComp(elt=part) | ast.GeneratorExp(elt=part):
                return self._kinds(part, scope)
            case _:
                return NONE

    def set_from_outside(self) -> Iterator[tuple[str, str]]:
        """``Class.attribute``, and where it is set."""
        for path, scope in self._scopes:
            for target in scope.sets:
                for kind in sorted(self._kinds(target.value, scope)):
                    if self._is_set(kind, target.attr, path):
                        yield f"{kind}.{target.attr}", f"{path}:{target.lineno}"

    def _is_set(self, kind: str, name: str, path: Path) -> bool:
        """Whether it is an attribute of that class, which this file may not set."""
        owners = [one for one in self._lines_of(kind) if name in one.members]
        private = any(one.name.startswith("_") and one.path == path for one in self.classes[kind])
        return bool(owners) and not private and not any(name in one.setters for one in owners)


def _files() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted(folder.rglob("*.py")) if "_pb2" not in path.name]


@cache
def _trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in _files()]


@cache
def _of_product() -> dict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    for what, where in Code((path.relative_to(ROOT), path.read_text()) for path in _files()).set_from_outside():
        found[what].append(where)
    return found


def test_no_attribute_is_set_from_outside() -> None:
    found = {what: where for what, where in _of_product().items() if what not in ALLOWED}
    assert not found, "give the class a method for it, with a name that says what happens"


def test_every_exception_is_needed() -> None:
    assert ALLOWED.keys() <= _of_product().keys(), "not set from outside any more: take it out of ALLOWED"


def _of_none(node: ast.AST) -> bool:
    """Whether it is an assertion that something is there."""
    return isinstance(node, ast.Assert) and any(
        isinstance(part, ast.Compare)
        and any(isinstance(op, ast.IsNot) for op in part.ops)
        and any(isinstance(one, ast.Constant) and one.value is None for one in part.comparators)
        for part in ast.walk(node.test)
    )


def test_what_is_there_is_said_by_its_type() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in _trees()
        for node in ast.walk(tree)
        if _of_none(node)
    ]
    assert not found, (
        "`assert x is not None`: pass it as an argument, hold it in an object that exists only where it is there, or "
        "raise an error that says what the caller has to do first"
    )


@pytest.mark.parametrize("line", ["assert x is not None", "assert x is not None, 'y'", "assert a and x.y is not None"])
def test_such_an_assertion_is_found(line: str) -> None:
    (statement,) = ast.parse(line).body
    assert _of_none(statement)


LATE: dict[str, str] = {
    "Background._job": "a queue of one job for a thread",
    "BetaPowers._fault": "armed for one step",
    "CallBatches._fetch_pre_hook": "the script makes it, perhaps before there is a job",
    "ElasticBatches._fetch_pre_hook": "the script makes it, perhaps before there is a job",
    "EngineSteps._check": "made with the engine, before the script's loops are known",
    "Link._put": "of the connection that there is now; a link outlives several",
    "LoopFiles._tell": "the process's only one, made on import; told of the job when there is one",
    "StepData._fetch_post_hook": "the script makes it, perhaps before there is a job",
    "StepData._fetch_pre_hook": "the script makes it, perhaps before there is a job",
    "_Leave._way": "what ends the node's part differs before and after the job has begun",
}
"""Callbacks that an object is given after its construction, and why not in it."""


def _late_callbacks(tree: ast.AST) -> Iterator[str]:
    """``Class.attribute`` of each attribute that is declared a callable, and set to an argument of a method other than
    the constructor."""
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        declared = {
            ast.unparse(node.target).removeprefix("self.")
            for node in ast.walk(owner)
            if isinstance(node, ast.AnnAssign) and "Callable" in ast.unparse(node.annotation)
        }
        for method in owner.body:
            if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and method.name != "__init__":
                given = {one.arg for one in (*method.args.args, *method.args.kwonlyargs)} - {"self"}
                for name, value in _set_in(method):
                    used = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
                    if name in declared and used & given:
                        yield f"{owner.name}.{name}"


def _set_in(method: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Attributes of ``self``, and what they are set to."""
    for node in ast.walk(method):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            assert isinstance(node, ast.Assign)
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = zip(target.elts, node.value.elts, strict=False) if several else [(target, node.value)]  # type: ignore[attr-defined]
            for one, value in pairs:
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
                    yield one.attr, value


def test_callbacks_are_given_to_the_constructor() -> None:
    found = {name for _, tree in _trees() for name in _late_callbacks(tree)}
    assert found <= LATE.keys(), "make what it calls first, and give it to the constructor"
    assert LATE.keys() <= found, "not bound late any more: take it out of LATE"


@pytest.mark.parametrize("line", ["self.call = given", "self.call, self.n = given, 1", "self.call = partial(given, 1)"])
def test_a_late_callback_is_found(line: str) -> None:
    text = "class Service:\n    call: Callable[[], str] | None = None\n    def bind(self, given):\n        "
    assert list(_late_callbacks(ast.parse(text + line))) == ["Service.call"]
    assert not list(_late_callbacks(ast.parse((text + line).replace("bind", "__init__"))))


SINGLE: dict[str, str] = {
    "AbortOrder": "QuietAbort",
    "Accelerator": "Cuda",
    "AutoStart": "AutoProtection",
    "Below": "Loop",
    "ControllerConnection": "ControllerSession",
    "DeviceMark": "CudaMark",
    "Elsewhere": "Fetched",
    "Hearer": "ControllerService",
    "Limits": "Timeouts",
    "LocalStates": "_LocalStates",
    "LogicalState": "MegatronLogical",
    "Network": "PacedNetwork",
    "OwnObjects": "ScriptLoops",
    "Places": "Guards",
    "ProcessObserver": "Agent",
    "Protected": "Loop",
    "Restorable": "Loop",
    "ScriptPlace": "ScriptLoops",
    "SessionEvents": "ControllerService",
    "ShardLayout": "RuledShardLayout",
    "SideStream": "CudaStream",
    "Stream": "Link",
    "StreamHold": "CudaHold",
    "Watched": "Agent",
}
"""Interfaces with one implementation, and that one. Each says in its docstring why it is there all the same: what
implements it lies above, where its folder may not import from, or tests and other projects have an own one."""

SEVERAL: dict[str, str] = {
    "Accumulation": "AutoSteps, EngineSteps",
    "Adapter": "adapters of all frameworks",
    "CheckpointFormat": "EngineCheckpoint, MegatronCheckpoint",
    "Child": "subprocess.Popen, Adopted, ForeignProcess",
    "Dataset": "torch's, and any object of a script",
    "GlobalBatches": "CallBatches, ElasticBatches",
    "HasBox": "LocalBox, Share, Segment, ...",
    "HealthPlugin": "HostPlugin, NvidiaPlugin",
    "Keys": "torch's TCPStore, which an agent may not import",
    "LoopState": "FitState, TrainerLoop, LMLoop",
    "Numbered": "two messages of the protocol",
    "Pattern": "Whole, EqualRanges, Slices, ...",
    "PeerCopies": "NeighbourCopies, ParityCopies",
    "PlacedLoop": "FitState, LMLoop",
    "Prepared": "ReadyTensors, _PreparedFSDP2",
    "Probe": "Attributes, Parameters, Uses, ...",
    "ProcessProvider": "Guards, Spawned, Zygotes, ...",
    "Shard": "ObjectShard, ParamShard, ...",
    "Stateful": "any object of a script",
    "StepData": "DataStream, LoopData",
    "StepHooks": "Transaction, TimedHooks",
    "StepRules": "ElasticRules, ParallelismRules",
    "StoreSource": "OneStore, Servers",
    "StoredElsewhere": "StoredTensors, StoredLocalState",
    "Switchable": "torch's FSDPModule, which is made at run time",
    "TextSink": "any stream of a script",
    "Wrapper": "Buckets, OnMesh",
    "Xor": "NativeXor, NumpyXor",
    "_Hasher": "hashlib's, xxhash's",
}
"""Interfaces with several implementations, or with one of another library."""


def _classes() -> Iterator[ast.ClassDef]:
    for _, tree in _trees():
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def test_an_interface_has_several_implementations_or_says_why_not() -> None:
    classes = list(_classes())
    interfaces = {
        one.name: one
        for one in classes
        if any(ast.unparse(base).partition("[")[0] in ("ABC", "Protocol") for base in one.bases)
    }
    assert interfaces.keys() == SINGLE.keys() | SEVERAL.keys(), "a single implementation needs no interface"
    assert set(SINGLE.values()) <= {one.name for one in classes}
    said = {name: " ".join((ast.get_docstring(interfaces[name]) or "").split()) for name in SINGLE}
    unexplained = [name for name, text in said.items() if not re.search(r"\babove\b|A protocol, as|others may", text)]
    assert not unexplained, "say in the docstring why there is an interface for one implementation"


_CLASSES = """
class Node:
    def __init__(self) -> None:
        self.lost = False
        self._speed = 0.0

    @property
    def speed(self) -> float: ...

    @speed.setter
    def speed(self, value: float) -> None:
        self._speed = value

    def declare_lost(self) -> None:
        self.lost = True


class _Seen:
    lost = False


class Job:
    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.first = Node()

    def newest(self) -> Node | None: ...


JOB = Job()
"""


@pytest.mark.parametrize(
    "line",
    [
        "node.lost = True",
        "node.lost, other = True, 1",
        "node.lost |= True",
        "del node.lost",
        "for node.lost in (1, 2): pass",
        "job.first.lost = True",
        "job.nodes['a'].lost = True",
        "JOB.nodes['a']._speed = 1.0",
        "for name, one in job.nodes.items(): one.lost = True",
        "one = next((n for n in job.nodes.values() if n.lost), None) or Node(); one.lost = True",
        "(job.newest() or node).lost = True",
        "seen.lost = True",
    ],
)
def test_it_is_found_in_every_form(line: str) -> None:
    body = line.replace("\n", "\n    ")
    text = f"def change(job: Job, node: 'Node', seen: _Seen) -> None:\n    {body}\n"
    found = list(Code([(Path("classes.py"), _CLASSES), (Path("other.py"), text)]).set_from_outside())
    assert [where for _, where in found] == ["other.py:2"], found


@pytest.mark.parametrize(
    "line", ["node.declare_lost()", "node.speed = 1.0", "node.elsewhere = 1", "message.lost = True", "lost = node.lost"]
)
def test_what_is_none_of_that_is_let_through(line: str) -> None:
    text = f"def change(node: Node, message: pb.Node) -> None:\n    {line}\n"
    assert not list(Code([(Path("classes.py"), _CLASSES), (Path("other.py"), text)]).set_from_outside())


def test_a_file_may_set_what_its_private_classes_have() -> None:
    text = f"{_CLASSES}\ndef change(seen: _Seen) -> None:\n    seen.lost = True\n"
    assert not list(Code([(Path("classes.py"), text)]).set_from_outside())
