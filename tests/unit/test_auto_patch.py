"""``--auto=print``: what is written by hand for a loop, and what is refused, from its text alone."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import click
import pytest

from flashrecovery.cli.run import launch_of, run
from flashrecovery.config import run_config
from flashrecovery.errors import ConfigError
from flashrecovery.worker.auto.patch import NotByHand, Running, by_hand

PLAIN = ("total", "best", "seen", "n", "step", "losses", "count")
LOADERS = ("loader", "bare")
SAMPLER = object()


def running() -> Running:
    return Running(
        models=[("model", ["optimizer"])],
        objects={"scheduler": "scheduler"},
        generators=frozenset(),
        own={},
        sampler_of=lambda path: {"loader": [SAMPLER], "bare": []}.get(path),
        value_of=lambda path: SAMPLER if path == "sampler" else None,
        plain=lambda name: name in PLAIN or None,
        known=lambda name: name in ("model", "optimizer", "scheduler", "sampler", *LOADERS),
    )


def patched(text: str, step_line: int, epoch_line: int = 0) -> str:
    return by_hand(textwrap.dedent(text).lstrip(), step_line, epoch_line, running())


def refused(text: str, step_line: int, epoch_line: int = 0) -> str:
    with pytest.raises(NotByHand) as found:
        patched(text, step_line, epoch_line)
    return f"{found.value.line}: {found.value}"


EPOCHS = """
    import torch
    total, best = 0.0, None
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = 0.0
        # batches
        for x, y in loader:
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step()
        best = total if best is None else min(best, total)
        print(epoch, total)
    print(best)
"""


def test_epochs() -> None:
    new = patched(EPOCHS, 7, 3)
    loop = new[new.index("recovery = flashrecovery.init()") :]
    assert loop == textwrap.dedent(
        """\
        recovery = flashrecovery.init()
        kept = types.SimpleNamespace(best=best, total=total)
        recovery.register(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            kept=Attributes(kept, "best", "total"),
            per_rank=["kept"],
        )
        data = recovery.data(loader)
        rounds = len(loader)
        for step in recovery.steps(3 * rounds):
            epoch, number = divmod(step.index, rounds)
            best = kept.best
            total = kept.total
            with step:
                if number == 0:
                    total = 0.0
                    # batches
                x, y = next(data)
                loss = model(x, y)
                loss.backward()
                optimizer.step()
            total += loss.item()
            if number == rounds - 1:
                scheduler.step()
                best = total if best is None else min(best, total)
                if step.committed:
                    print(epoch, total)
            kept.best = best
            kept.total = total
        best = kept.best
        print(best)
        """
    )


def test_a_while_loop_and_its_break_keep_what_the_round_has_changed() -> None:
    new = patched(
        """
        n = 0
        while n < 9:
            model(n).backward()
            optimizer.step()
            n += 1
            if n == 7:
                break
        print(n)
        """,
        2,
    )
    assert "for step in recovery.steps(sys.maxsize):\n    n = kept.n\n    if not (n < 9):\n        break\n" in new
    assert "        kept.n = n\n        break\n" in new and "import sys\n" in new
    assert new.endswith("    kept.n = n\nn = kept.n\nprint(n)\n")


def test_names_of_the_script_are_left_alone() -> None:
    new = patched(
        """
        step, data, recovery = 0, 1, 2
        for step in range(9):
            model(step).backward()
            optimizer.step()
            print(step)
        """,
        2,
    )
    assert "for attempt in flash_recovery.steps(9):" in new and "step = attempt.index" in new
    ast.parse(new)


STEP = "    model(x).backward()\n    optimizer.step()\n"
INNER = "for e in range(2):\n    for x in {}:\n        model(x).backward()\n        optimizer.step()\n"


@pytest.mark.parametrize(
    ("text", "lines", "why"),
    [
        (
            "for x in bare:\n    model(x).backward()\n    if x:\n        optimizer.step()\n",
            (1,),
            "3: .*some rounds only",
        ),
        (f"for x in f():\n{STEP}", (1,), "1: .*neither a range"),
        (INNER.format("loader"), (2, 1), "1: .*sampler its epoch"),
        (INNER.format("bare") + "        if x:\n            break\n", (2, 1), "6: `break`"),
        (f"for x in bare:\n{STEP}else:\n    pass\n", (1,), "5: .*else clause"),
        (f"def f():\n    global n\n    n = 1\nfor x in bare:\n{STEP}", (4,), "2: .*global n"),
        ("for x in bare:\n    model(next(x)).backward()\n    optimizer.step()\n", (1,), "2: .*next"),
        ("for x in bare:\n    model(x).backward(); optimizer.step()\n", (1,), "2: several statements"),
        (
            "for x in bare:\n    try:\n        model(x).backward()\n        optimizer.step()\n    finally: pass\n",
            (1,),
            "2: ",
        ),
        (f"for x in bare:\n{STEP}    print(f(x))\n", (1,), "4: .*calls f"),
        (f"def f():\n    g()\n    print(1)\nfor x in bare:\n{STEP}    f()\n", (4,), "3: .*prints"),
        (f"for x in bare:\n{STEP}    thing.n += 1\n", (1,), "1: thing.n .*changes"),
        (f"for x in bare:\n    s = '''a\n'''\n{STEP}", (1,), "2: a text"),
    ],
)
def test_what_cannot_be_written_is_refused(text: str, lines: tuple[int, ...], why: str) -> None:
    assert re.match(why, refused(text, *lines))


# -- the option -------------------------------------------------------------------------------------


def launched(*words: str) -> object:
    with run.make_context("run", list(words)) as context:
        return launch_of(context.params).config.auto


def test_the_option_and_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("c.yaml").write_text("auto: print\n")
    assert launched("--auto", "train.py") is True
    assert launched("--standby", "1", "--auto=print", "train.py", "--auto=7") == "print"
    assert launched("train.py", "--auto") is False
    assert launched("--config", "c.yaml", "train.py") == "print"
    assert launched("--", "train.py", "--auto") is False


@pytest.mark.parametrize("value", ["patch", 7, None, ["print"]])
def test_a_bad_value_names_key_value_and_what_is_allowed(value: object) -> None:
    with pytest.raises(ConfigError, match=r"auto = .*allowed: true, false, print"):
        run_config({"auto": value}, "c.yaml")
    with pytest.raises((ConfigError, click.UsageError), match=r"auto = 'patch'.*allowed: true, false, print"):
        launched("--auto=patch", __file__)


def test_several_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="auto = 'print'"):
        run_config({"auto": "print", "nnodes": 2, "controller": "localhost"}, "c.yaml")
