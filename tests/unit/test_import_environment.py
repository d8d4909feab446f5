"""What imports set in the environment is there for the script that finds them done, unless that sets it itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashrecovery.worker.preimport.import_environment import ImportEnvironment


def test_changes_are_made_where_the_variables_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GONE", "OTHER"):
        monkeypatch.setenv(name, "before")
    for name in ("NEW", "TWICE", "OWN"):
        monkeypatch.delenv(name, raising=False)
    imported = ImportEnvironment()
    with imported.noting():
        os.environ["NEW"] = os.environ["TWICE"] = os.environ["OWN"] = os.environ["OTHER"] = "import"
        del os.environ["GONE"]
    os.environ["NEW"] = "outside"
    with pytest.raises(ImportError), imported.noting():
        os.environ["TWICE"] = "later"
        raise ImportError
    env = {"GONE": "before", "OTHER": "a rank's", "OWN": "a rank's"}
    imported.apply(env)
    assert env == {"NEW": "import", "TWICE": "later", "OTHER": "a rank's", "OWN": "a rank's"}


def test_a_variable_of_a_zygotes_own_is_set_in_a_rank_by_who_would_have_set_it_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `import deepspeed` does."""
    for name in ("DEFAULT", "UNTOUCHED", "SET"):
        monkeypatch.setenv(name, "1")
    imported = ImportEnvironment(("DEFAULT", "UNTOUCHED", "SET"))
    with imported.noting():
        assert os.environ.setdefault("DEFAULT", "2") == "1", "it stays what it is in the zygote"
        os.environ["SET"] = "3"
        assert os.environ.setdefault("OTHER", "4") == "4"
    monkeypatch.delenv("OTHER")
    os.environ.setdefault("UNTOUCHED", "5")
    ranks: list[dict[str, str]] = [{}, {"DEFAULT": "0"}]
    for env in ranks:
        imported.apply(env)
    assert ranks == [
        {"DEFAULT": "2", "SET": "3", "OTHER": "4"},
        {"DEFAULT": "0", "SET": "3", "OTHER": "4"},
    ]


STANDBY = """
import os, sys
from flashrecovery.proto import flashrecovery_pb2 as pb
from flashrecovery.worker.startup import bootstrap
from flashrecovery.worker.preimport import preimport_script
from flashrecovery.worker.preimport.preimport_script import ScriptPreimport

preimport_script.USUALLY.clear()  # torch, and what goes with it

class Channel:
    left = [pb.ToWorker(warm=pb.Warm()), pb.ToWorker(assign=pb.Assign(rank=1))]
    def receive(self):
        return self.left.pop(0)
    def send(self, message):
        assert message.HasField("warmed")

facts = ScriptPreimport([sys.argv[1]]).facts if sys.argv[2] == "forked" else None
if facts is not None:
    os.unlink(sys.argv[1])  # no process reads it again
assert bootstrap._wait_for_assignment(Channel(), [sys.argv[1]], facts).rank == 1
import sets_variables
print([os.environ.get(name) for name in ("BY_IMPORT", "BY_SCRIPT", "SEEN")])
"""


@pytest.mark.parametrize("start", ["started", "forked"])
def test_a_standby_has_what_its_imports_have_set_and_nothing_of_the_scripts_own(start: str, tmp_path: Path) -> None:
    """That its script sets itself, when it has a rank. One that is forked from a zygote has what that has read."""
    place = tmp_path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    place.mkdir(parents=True)
    text = "import os\nos.environ['BY_IMPORT'] = 'yes'\nos.environ['SEEN'] = os.environ.get('BY_SCRIPT', 'nothing')\n"
    (place / "sets_variables.py").write_text(text)
    (tmp_path / "script.py").write_text("import os\nos.environ['BY_SCRIPT'] = 'yes'\nimport sets_variables\n")
    path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONUSERBASE": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", STANDBY, str(tmp_path / "script.py"), start],
        env=env,
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "['yes', None, 'yes']", done.stdout + done.stderr
