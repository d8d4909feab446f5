"""The messages between controller, agents and workers: nothing in them is dead, and the documentation knows them all.

What is read and written is searched for in the sources: a name that stands there for another reason hides a dead field,
but no field that is used is called dead.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from flashrecovery.proto import flashrecovery_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
MESSAGES: dict[str, Descriptor] = dict(pb.DESCRIPTOR.message_types_by_name)
FIELDS = [(message, field) for message in MESSAGES.values() for field in message.fields]


@cache
def _sources() -> str:
    paths = (ROOT / "common" / "flashrecovery").rglob("*.py")
    return "\n".join(path.read_text() for path in paths if "_pb2" not in path.name)


@pytest.mark.parametrize(("message", "field"), FIELDS, ids=lambda x: x.name)
def test_each_field_is_written_and_read(message: Descriptor, field: FieldDescriptor) -> None:
    name = field.name
    # Bodies of a oneof are chosen by their names.
    quoted = field.containing_oneof is not None and re.search(rf"[\"']{name}[\"']", _sources())
    assert quoted or re.search(rf"\.{name}\b(?!\s*=[^=])(?!\()", _sources()), f"nothing reads {message.name}.{name}"
    written = rf"\b{name}=[^=]|\.{name}(?:, [\w.]+)* = |\.{name}\.(?:extend|append|add|CopyFrom|update)"
    assert quoted or re.search(written, _sources()), f"nothing writes {message.name}.{name}"


def test_the_documentation_has_every_message() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    assert [name for name in MESSAGES if f"`{name}`" not in text] == []
    services = pb.DESCRIPTOR.services_by_name
    assert [m.name for s in services.values() for m in s.methods if f"`{s.name}.{m.name}`" not in text] == []
