"""What has made a collective outside of a step: the innermost frame that is neither torch's nor ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
import torchlike
import typing_extensions
from flashrecovery.worker.script_checks import stray_collectives
def collective():
    return stray_collectives.script_line(sys._getframe(1))
print(torch.compiler.disable(collective)())
print(torchlike.call(torch.compiler.disable(collective)))
print(typing_extensions.deprecated("", category=None)(torch.compiler.disable(collective))())
"""


def test_the_innermost_line_that_is_not_torchs_also_where_torch_is_reached_by_a_link(tmp_path: Path) -> None:
    """A library whose name begins like torch's is no part of torch. A decorator of
    the standard kind is no place of a call."""
    links, script = tmp_path / "links", tmp_path / "script.py"
    links.mkdir()
    (links / "torch").symlink_to(Path(torch.__file__).parent)
    (links / "torchlike.py").write_text("def call(f):\n    return f()\n")
    script.write_text(SCRIPT)
    found = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(links), str(ROOT / "common")])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = [f"{script}:9", f"{links / 'torchlike.py'}:2", f"{script}:11"]
    assert found.stdout.split() == lines, found.stderr[-3000:]
