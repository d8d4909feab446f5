"""The shared page: rank-local state is held whole or not at all."""

from __future__ import annotations

import os
import signal
import time

import pytest

from flashrecovery import Recovery
from flashrecovery.errors import ConfigError
from flashrecovery.runtime.page import TAG_NONE, Page


@pytest.fixture
def page():  # type: ignore[no-untyped-def]
    p = Page.create("test")
    yield p
    p.close()


def test_three_versions_are_kept_and_the_oldest_is_replaced(page: Page) -> None:
    assert page.local_state_versions() == [] and page.tag == TAG_NONE and page.committed == -1
    for version in range(5):
        page.write_local_state(version, b"v%d" % version * 100)
    assert page.local_state_versions() == [2, 3, 4]
    assert page.read_local_state(4) == b"v4" * 100
    assert page.read_local_state(1) is None


def test_tokens_of_a_step(page: Page) -> None:
    assert page.tokens_per_step == 0
    page.set_tokens_per_step((1 << 63) - 1)
    assert page.tokens_per_step == (1 << 63) - 1 and page.local_state_versions() == []
    plain = Recovery(None)
    plain.report(tokens_per_step=4096)
    for wrong in (-1, 1 << 63, 2.5, True, "4096", None):
        with pytest.raises(ConfigError, match=r"tokens_per_step = .*a whole number from 0"):
            plain.report(tokens_per_step=wrong)  # type: ignore[arg-type]


def test_a_local_state_cut_off_while_it_was_written_is_not_held(page: Page) -> None:
    page.write_local_state(6, b"a" * 1000)
    page._map[4096 + 500] = 0  # what a process killed in the middle of writing leaves
    assert page.local_state_versions() == []


def test_a_local_state_over_the_limit_is_named() -> None:
    page = Page.create("small", 1 << 20)
    page.write_local_state(1, b"x" * (1 << 20))
    with pytest.raises(ValueError, match=r"1,048,577 bytes; at most 1,048,576 fit.*data loader state"):
        page.write_local_state(2, b"x" * ((1 << 20) + 1))
    assert page.local_state_versions() == [1]
    page.close()


def test_tags_are_seen_by_another_process_and_outlive_it(page: Page) -> None:
    pid = os.fork()
    if pid == 0:
        child = Page(page.fd)
        child.set_tag(7)
        child.set_committed(8, 5_000_000)
        child.write_local_state(8, b"rank-only")
        child.write_setup_log(b"log")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    health = page.health()
    assert (health.tag, health.committed, health.step_s) == (8, 8, 0.005)
    assert abs(health.progress_at - time.monotonic()) < 5
    assert page.shown == (0, 0)
    page.set_shown(7, 2)
    heir = Page.create("heir")
    heir.inherit(page)
    assert heir.read_local_state(8) == b"rank-only" and heir.read_setup_log() == b"log"
    assert heir.shown == (7, 2)
    heir.close()


class Interrupted:
    """The header's words; before the given read of one, the worker resumes."""

    def __init__(self, page: Page, at: int) -> None:
        self.words, self.page, self.left = page._words, page, at

    def __getitem__(self, index: int) -> int:
        if self.left == 0:
            writer = Page(os.dup(self.page.fd))
            writer.resume(7, 3, 0)
            writer.close()
        self.left -= 1
        return self.words[index]

    def release(self) -> None:
        self.words.release()


def test_a_version_is_never_taken_for_that_of_another_generation(page: Page) -> None:
    """Whenever the worker resumes while its page is being read."""
    page.resume(9, 2, 0)
    seen = set()
    for at in range(14):
        page.resume(9, 2, 0)
        page._words = Interrupted(page, at)  # type: ignore[assignment]
        health = page.health()
        page._words = page._words.words  # type: ignore[attr-defined]
        seen.add((health.generation, health.committed))
    assert seen == {(2, 9), (3, 7)}


def test_the_age_of_a_kept_copy_begins_with_its_version(page: Page) -> None:
    assert page.health().kept == -1
    page.set_kept(4)
    first = page.health()
    assert first.kept == 4 and abs(first.kept_at - time.monotonic()) < 5
    page.set_kept(4)
    assert page.health() == first
    page.set_kept(5)
    assert page.health().kept == 5 and page.health().kept_at > first.kept_at
    page.set_kept(-1)
    assert page.health().kept == -1


def test_a_committed_version_says_which_generation_it_belongs_to(page: Page) -> None:
    page.set_committed(5, 1_000)
    assert (page.health().committed, page.health().generation) == (5, 0)
    page.resume(4, 1, 1_000)
    assert (page.health().committed, page.health().generation, page.tag) == (4, 1, 4)


def test_iterations_of_the_newest_steps(page: Page) -> None:
    assert page.iterations() == {} and page.step_text(3) == "step 3"
    for step in range(9):
        page.set_iteration(step, 100 + step // 2)
    assert page.iterations() == {5: 102, 6: 103, 7: 103, 8: 104}
    assert page.step_text(7) == "iteration 103 (call 7)" and page.step_text(2) == "step 2"
