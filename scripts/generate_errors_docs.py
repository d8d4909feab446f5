"""Write docs/errors_and_notices.md from the docstrings of errors, failure kinds and notices (a test compares them).

A docstring's first paragraph says what the thing means; the paragraph that begins with ``Do:`` says what to do.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "errors_and_notices.md"
_CORE = ROOT / "common" / "flashrecovery"
_ROOTS = (_CORE, ROOT / "fr_deepspeed", ROOT / "fr_megatron")
_BASE = "FlashRecoveryError"
_HEAD = """\
# Errors and notices

Every error, kind of failure and notice: what it means, and what to do. `scripts/generate_errors_docs.py` writes this
page from the docstrings of the code.

The message of an error names the key, the rank or the file. This page explains the type of the error.
Errors of the script are in the log of the rank and in `events.jsonl` of the run directory
([operations.md](operations.md#the-run-directory)).
"""
_FAILURES = """\
The field `kind` of the event `failure_detected`. The `cause` of a recovery is the kind of its first failure, or one
that begins with "A recovery without a failed rank" below.
"""
_NOTICES = """\
The field `kind` of the event `notice`. A notice changes nothing by itself. It says what has happened, or what you may
want to change. `flashrecovery run` prints the important ones.
"""


@dataclass(frozen=True)
class Entry:
    """One row of the page: an error, failure or notice; "": the docstring does not say it."""

    name: str
    means: str
    do: str


def parsed(name: str, docstring: str) -> Entry:
    """The first paragraph and the one that begins with ``Do:``, each in one line."""
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", docstring.strip())]
    do = next((p.removeprefix("Do:").strip() for p in paragraphs if p.startswith("Do:")), "")
    means = "" if not paragraphs or paragraphs[0].startswith("Do:") else paragraphs[0]
    return Entry(name, means, do[:1].upper() + do[1:])


def members(path: Path, enum: str) -> list[Entry]:
    """The members of an enum by name, with the strings below them."""
    (found,) = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == enum)
    entries = []
    for node, below in zip(found.body, [*found.body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            entries.append(parsed(str(node.value.value), str(text)))
    return sorted(entries, key=lambda entry: entry.name)


def _sources() -> Iterator[tuple[str, ast.Module]]:
    """Folder and tree of each file of the product: a folder of the core, ``core`` for its loose files, an adapter."""
    for root in _ROOTS:
        for path in sorted(root.rglob("*.py")):
            if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            inner = path.relative_to(root).parts
            folder = root.name if root != _CORE else inner[0] if len(inner) > 1 else "core"
            yield folder, ast.parse(path.read_text())


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@cache
def errors() -> tuple[list[Entry], dict[str, Sequence[str]]]:
    """All error types, bases first, and the folders that raise each of them."""
    trees = list(_sources())
    classes = [(node, tree) for _, tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    own = {node.name for node in ast.parse((_CORE / "errors.py").read_text()).body if isinstance(node, ast.ClassDef)}
    found = {node.name: node for node, _ in classes if node.name in own}
    more = True
    while more:
        fresh = {n.name: n for n, _ in classes if n.name not in found and any(_name(b) in found for b in n.bases)}
        found, more = found | fresh, bool(fresh)
    raised: dict[str, set[str]] = {name: set() for name in found}
    for folder, tree in trees:
        for node in ast.walk(tree):
            # an error may be made in one place and raised in another, or be raised as a bare class
            made = node.func if isinstance(node, ast.Call) else node.exc if isinstance(node, ast.Raise) else None
            if made is not None and _name(made) in raised:
                raised[_name(made)].add(folder)
    entries = [parsed(name, ast.get_docstring(node) or "") for name, node in found.items()]
    return entries, {name: sorted(folders) for name, folders in raised.items()}


def _cell(text: str) -> str:
    """Markdown: names of pages become links."""
    text = text.replace("``", "`").replace("|", "\\|")
    return re.sub(r"(?<![\w/`(])(\w+\.md)(#[\w-]+)?", lambda m: f"[{m[1]}]({m[0]})", text)


def table(what: str, entries: Sequence[Entry]) -> str:
    lines = [f"| {what} | means | what to do |", "|---|---|---|"]
    lines += [f"| `{entry.name}` | {_cell(entry.means)} | {_cell(entry.do)} |" for entry in entries]
    return "\n".join(lines) + "\n"


def render() -> str:
    """The whole page."""
    types, raised = errors()
    where = ["| error | raised in |", "|---|---|"]
    where += [f"| `{name}` | {', '.join(f'`{f}`' for f in raised[name])} |" for name in sorted(raised) if raised[name]]
    parts = (
        _HEAD,
        "## Errors\n",
        table("error", types),
        "### Where each error is raised\n",
        "Folders of `common/flashrecovery` (`core`: its files outside of a folder) and the adapters.\n",
        "\n".join(where) + "\n",
        "## Kinds of failure\n",
        _FAILURES,
        table("kind", members(_CORE / "kinds.py", "FailureKind")),
        "## Notices\n",
        _NOTICES,
        table("notice", members(_CORE / "kinds.py", "NoticeKind")),
    )
    return "\n".join(parts)


def main() -> int:
    DOC.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
