"""Write the tables of docs/configuration.md from the settings' own models (a test checks that they agree)."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel

from flashrecovery.config import CheckpointSettings, ObserveSettings, RunConfig, SnapshotSettings, Timeouts, TlsSettings

DOC = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
_BEGIN, _END = "<!-- begin {} -->", "<!-- end {} -->"


def table(model: type[BaseModel]) -> str:
    """Key, default and reason of every field."""
    lines = ["| key | default | why, what |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            default = "see below"
        lines.append(f"| `{name}` | `{default}` | {field.description or ''} |")
    return "\n".join(lines)


def render(text: str) -> str:
    """``text`` with its marked tables replaced by current ones."""
    models = (RunConfig, Timeouts, CheckpointSettings, SnapshotSettings, ObserveSettings, TlsSettings)
    names = ("run", "timeouts", "checkpoint", "snapshots", "observe", "tls")
    for name, model in zip(names, models, strict=True):
        begin, end = _BEGIN.format(name), _END.format(name)
        head, rest = text.split(begin)
        text = f"{head}{begin}\n\n{table(model)}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    DOC.write_text(render(DOC.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
