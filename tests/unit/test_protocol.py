"""The messages between controller, agents and workers, and the dataclasses: each field is written and read. The
documentation has every message."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor

from flashrecovery.proto import flashrecovery_pb2 as pb
from tests.support.field_uses import FieldUses, field_uses

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"flashrecovery": ROOT / "common", "fr_deepspeed": ROOT, "fr_megatron": ROOT}
GENERATED = "flashrecovery.proto.flashrecovery_pb2"
MESSAGES = dict(pb.DESCRIPTOR.message_types_by_name)
SEEN_AS = {"flashrecovery.runtime.link.Numbered": ("AgentMessage", "Command")}
"""Code that handles several messages alike knows them as this class."""

READ_AS_A_WHOLE = {
    "flashrecovery.cli.history": {"FailureRecord", "RecoveryRecord"},  # JSON of `flashrecovery report`
    "flashrecovery.cli.measured": {"Measured"},  # JSON of `flashrecovery plan --run`
    "flashrecovery.cli.status": {"JobView", "RecoveryView"},  # JSON of `flashrecovery status`
    "flashrecovery.observe.facts": {
        "FailureFacts",
        "PastRecovery",
        "RecoveryFacts",
        "StartFacts",
        "WorkerFacts",
    },  # JSON of the page
    "flashrecovery.observe.picture": {"Bar", "Line", "Panel", "Picture"},  # the templates
    "flashrecovery.plan.estimates.footprint": {"Footprint"},  # JSON of `flashrecovery plan`
    "flashrecovery.plan.hang": {"Group"},  # a key
    "flashrecovery.groups.exchange": {"DrainReport"},  # the text of an error
    "flashrecovery.state.codec": {"StateMark"},  # compared with another one
    "flashrecovery.worker.script_text.plain_values": {"_View"},  # a tuple in what is taken down
}
FOR_CALLERS = {
    "flashrecovery.groups.exchange": {"AttachReport"},  # docs/groups.md: its own library
    "flashrecovery.groups.registry": {"OpInfo.sequence"},
    "flashrecovery.plan.parity.code": {"Traffic.frames"},  # what tests hold a plan to
    "flashrecovery.plan.parity.decode": {"DecodePlan", "DecodeTask"},  # the same
    "flashrecovery.plan.parity.groups": {"Grouping", "Uncovered"},  # the same
    "flashrecovery.plan.membership.node_failures": {"Rating.counted", "Rating.common"},  # what tests hold a rating to
    "flashrecovery.plan.strategy.strategy": {"StrategyChoice"},  # docs/elastic.md: not carried out yet
    "flashrecovery.plan.restore.types": {
        "LocalRestore",
        "NoCut",
        "RestorePlan",
        "Transfer",
    },  # what tests hold a decision to
    "flashrecovery.worker.data.global_batches": {"MicroBatch"},  # what scripts read
    "flashrecovery.worker.reshard.redistribution": {"Moved.total"},  # what tests hold a plan to
    "flashrecovery.worker.transfer.transfer": {"TransferReport.bytes_sent", "TransferReport.bytes_read"},
}
"""Fields, or all fields of a dataclass, that no code of the packages reads by name, and why they are not dead."""


def _modules() -> dict[str, Path]:
    found = {}
    for package, root in PACKAGES.items():
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            found[name] = path
    return {name: path for name, path in found.items() if "_pb2" not in name}


def _dead_in_messages(uses: FieldUses) -> Iterator[str]:
    fields = [field for message in MESSAGES.values() for field in message.fields]
    element_of = {field.name: field.message_type.name for field in fields if field.message_type is not None}
    added = {(element_of.get(name.removeprefix("."), ""), keyword) for name, keyword in uses.given if name[:1] == "."}
    for message in MESSAGES.values():
        names = [GENERATED + "." + message.name, *(other for other, alike in SEEN_AS.items() if message.name in alike)]
        for field in message.fields:
            read = any(uses.read[f"{name}.{field.name}"] for name in names) or _is_a_known_body(field, uses)
            given = uses.given[message.name, field.name] or (message.name, field.name) in added
            written = given or any(uses.written[f"{name}.{field.name}"] for name in names)
            if not (read and written):
                yield f"{message.name}.{field.name} is never {'written' if read else 'read'}"


def _is_a_known_body(field: FieldDescriptor, uses: FieldUses) -> bool:
    """Bodies of a oneof are told apart by their names, and some have nothing inside that could be read."""
    return field.containing_oneof is not None and bool(uses.quoted[field.name])


def _dead_in_dataclasses(uses: FieldUses, modules: dict[str, Path]) -> Iterator[str]:
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            facts = isinstance(node, ast.ClassDef) and "dataclass" in "".join(map(ast.unparse, node.decorator_list))
            if not isinstance(node, ast.ClassDef) or not facts:
                continue
            names = [ast.unparse(line.target) for line in node.body if isinstance(line, ast.AnnAssign)]
            unread = [name for name in names if not uses.read[f"{module}.{node.name}.{name}"]]
            known = {*READ_AS_A_WHOLE.get(module, ()), *FOR_CALLERS.get(module, ())}
            dead = [name for name in unread if not known & {node.name, f"{node.name}.{name}"}]
            yield from (f"{module}.{node.name}.{name} is never read" for name in dead)
            if not unread and any(name.partition(".")[0] == node.name for name in known):
                yield f"{module}.{node.name} needs no exception any more"


def test_each_field_is_written_and_read() -> None:
    modules = _modules()
    stub = Path(pb.__file__).with_suffix(".pyi")
    uses = field_uses(modules, {GENERATED: stub})
    assert len(uses.read) > 1000, "too few: the search itself is broken"
    assert [*_dead_in_messages(uses), *_dead_in_dataclasses(uses, modules)] == []


def test_a_field_is_dead_though_another_class_has_one_of_its_name(tmp_path: Path) -> None:
    source = tmp_path / "sample.py"
    source.write_text(
        "from dataclasses import dataclass, field\n"
        "@dataclass\n"
        "class Alive:\n"
        "    pid: int\n"
        "    inner: 'Dead'\n"
        "@dataclass\n"
        "class Dead:\n"
        "    pid: int\n"
        "    seen: set[int] = field(default_factory=set)\n"
        "    age: int = 0\n"
        "    name: str = ''\n"
        "def use(alive: Alive | None, dead: list[Dead]) -> str:\n"
        "    for each in dead:\n"
        "        each.seen.add(1)\n"
        "        each.age += 1\n"
        "    if alive is not None and alive.pid:\n"
        "        alive.inner.age = 2\n"
        "        print(alive.inner)\n"
        "    return max(each.name for each in dead)\n"
    )
    uses = field_uses({"sample": source})
    assert set(uses.read) == {"sample.Alive.pid", "sample.Alive.inner", "sample.Dead.name"}
    assert set(uses.written) == {"sample.Alive.inner", "sample.Dead.seen", "sample.Dead.age"}
    assert list(_dead_in_dataclasses(uses, {"sample": source})) == [
        f"sample.Dead.{name} is never read" for name in ("pid", "seen", "age")
    ]


def test_the_documentation_has_every_message() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    assert [name for name in MESSAGES if f"`{name}`" not in text] == []
    services = pb.DESCRIPTOR.services_by_name
    assert [m.name for s in services.values() for m in s.methods if f"`{s.name}.{m.name}`" not in text] == []
