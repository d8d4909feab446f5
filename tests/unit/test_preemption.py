"""What says that a node is about to be taken away, and how often the controller is told."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from flashrecovery.agent.monitoring import preemption
from flashrecovery.config import NoticeSettings, run_config
from flashrecovery.errors import ConfigError


def heard(settings: NoticeSettings, *, warning: str = "", refusals: int = 0, within_s: float = 0.3) -> list[str]:
    """What is told; the first ``refusals`` times no one takes it in."""
    said: list[str] = []

    def told(seen: str) -> bool:
        said.append(seen)
        return len(said) > refusals

    async def look() -> None:
        try:
            await asyncio.wait_for(preemption.watch(settings, lambda: warning, told), within_s)
        except asyncio.TimeoutError:
            said.append("still looking")

    asyncio.run(look())
    return said


def settings(**values: object) -> NoticeSettings:
    return NoticeSettings.model_validate({"poll_s": 0.01, **values})


def test_nothing_is_asked_where_nothing_is_set() -> None:
    assert heard(settings(), warning="it breaks") == []


def test_a_file_a_command_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "preempted"
    assert heard(settings(file=file)) == ["still looking"]
    file.touch()
    assert heard(settings(file=file)) == [f"the file {file} is there (notice.file)"]
    assert heard(settings(command=["false"])) == ["still looking"]
    assert heard(settings(command=["true"])) == ["'true' has ended with 0 (notice.command)"]
    assert heard(settings(warnings=True)) == ["still looking"]
    assert heard(settings(warnings=True), warning="GPU 1: hot") == [
        "a device plugin warns: GPU 1: hot (notice.warnings)"
    ]


def test_a_warning_is_no_notice_unless_somebody_says_so(tmp_path: Path) -> None:
    assert heard(settings(file=tmp_path / "not there"), warning="GPU 1: hot") == ["still looking"]


def test_it_is_told_until_somebody_takes_it_in(tmp_path: Path) -> None:
    assert len(heard(settings(warnings=True), warning="hot", refusals=3, within_s=5)) == 4


def test_who_cannot_be_asked_now_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system does not answer, and the command is not there: neither ends the looking."""
    file, exists = tmp_path / "preempted", Path.exists
    file.touch()
    stale = iter([OSError(errno.ESTALE, "Stale file handle")] * 2)

    def does_not_answer(path: Path) -> bool:
        if path == file and (error := next(stale, None)) is not None:
            raise error
        return exists(path)

    monkeypatch.setattr(Path, "exists", does_not_answer)
    command = [str(tmp_path / "not there")]
    assert heard(settings(file=file, command=command), within_s=5) == [f"the file {file} is there (notice.file)"]


def test_warnings_need_plugins() -> None:
    with pytest.raises(ConfigError, match=r"notice.warnings: .*health: none"):
        run_config({"health": "none", "notice": {"warnings": True}}, "here")
