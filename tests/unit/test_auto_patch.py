"""``--auto=print``: what is written by hand for a loop, and what is refused, from its text alone."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import click
import pytest

from flashrecovery.cli.run import launch_of, run
from flashrecovery.config import run_config
from flashrecovery.errors import ConfigError
from flashrecovery.worker.auto.inline import inlined, without
from flashrecovery.worker.auto.patch import Running, by_hand
from flashrecovery.worker.auto.straight import NotByHand

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
        plain=lambda name, made: name in PLAIN or None,
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
            kept=flashrecovery.KeptAttributes(kept, "best", "total"),
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
        (f"for x in bare:\n{STEP}else:\n    pass\n", (1,), "5: .*else clause"),
        ("for x in bare:\n    model(next(x)).backward()\n    optimizer.step()\n", (1,), "2: .*next"),
        ("for x in bare:\n    model(x).backward(); optimizer.step()\n", (1,), "2: several statements"),
        (
            "for x in bare:\n    try:\n        model(x).backward()\n        optimizer.step()\n    finally: pass\n",
            (1,),
            "2: ",
        ),
        (f"for x in bare:\n{STEP}    print(f(x))\n", (1,), "4: .*calls f"),
        (f"def f():\n    g()\n    y = print(1)\nfor x in bare:\n{STEP}    f()\n", (4,), "3: .*prints"),
        (f"for x in bare:\n{STEP}    thing.n += 1\n", (1,), "1: thing.n .*changes"),
        (f"for x in bare:\n    s = '''a\n'''\n{STEP}", (1,), "2: a text"),
    ],
)
def test_what_cannot_be_written_is_refused(text: str, lines: tuple[int, ...], why: str) -> None:
    assert re.match(why, refused(text, *lines))


# -- break and continue in two loops ----------------------------------------------------------------

LEFT = """
    n = 0
    for epoch in range(1, 5):
        meter = M()
        for i, (x, y) in enumerate(bare):
            if skipped(x):
                continue
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            n += 1
            meter.add(loss)
            if i > 3:
                print(n)
                break
            scheduler.step()
        print(meter.mean)
        if n > 40:
            break
    print(n)
"""


def test_epochs_that_are_left() -> None:
    seen = replace(running(), plain=lambda name, made: name in (*PLAIN, "meter") or None)
    new = by_hand(textwrap.dedent(LEFT).lstrip(), 4, 2, seen)
    assert new[new.index("recovery = flashrecovery") :] == textwrap.dedent(
        """\
        recovery = flashrecovery.init()
        kept = types.SimpleNamespace(meter=None, n=n)
        recovery.register(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            kept=flashrecovery.KeptAttributes(kept, "meter", "n"),
            per_rank=["kept"],
        )
        data = recovery.data(bare)
        rounds = len(bare)
        for step in recovery.steps(sys.maxsize):
            epoch, number = data.epoch, data.position.batch
            epoch += 1
            meter = kept.meter
            n = kept.n
            if epoch >= 5:
                break
            with step:
                if number == 0:
                    meter = M()
                i = number
                x, y = next(data)
                left = False
                if not (skipped(x)):
                    loss = model(x, y)
                    loss.backward()
                    optimizer.step()
                    n += 1
                    meter.add(loss)
                    if i > 3:
                        print(n)
                        left = True
                    else:
                        scheduler.step()
            if left or number == rounds - 1:
                if step.committed:
                    print(meter.mean)
                if n > 40:
                    kept.meter = meter
                    kept.n = n
                    break
                data.next_epoch()
            kept.meter = meter
            kept.n = n
        n = kept.n
        print(n)
        """
    )


ROUND = "        model(x).backward()\n        optimizer.step()\n"
TWO = f"for epoch in range(3):\n    for x in bare:\n{ROUND}"


@pytest.mark.parametrize(
    ("above", "below", "block"),
    [
        ("", "        if x: continue\n        n += 1\n", "    if not (x):\n        n += 1\n"),
        ("", "        if x:\n            n += 1\n            continue\n", "    if x:\n        n += 1\n"),
        ("", "        if x:\n            continue\n", "    if x:\n        pass\n"),
        (
            "",
            "        if x:\n            n += 1\n            continue\n        # more\n        n += 2\n",
            "    if x:\n        n += 1\n    else:\n        # more\n        n += 2\n",
        ),
        (
            "        if x:\n            continue\n",
            "",
            "        if not (x):\n            model(x).backward()\n            optimizer.step()\n",
        ),
    ],
)
def test_rounds_that_are_gone_on_with(above: str, below: str, block: str) -> None:
    new = patched(f"n = 0\nfor epoch in range(3):\n    for x in bare:\n{above}{ROUND}{below}print(n)\n", 3, 2)
    assert block in new and "continue" not in new and "next_epoch" not in new


def test_an_outer_loop_that_counts_nothing() -> None:
    new = patched(f"n = 0\nwhile not n:\n    for x in bare:\n{ROUND}        n += 1\nprint(n)\n", 3, 2)
    assert "    number = step.index % rounds\n    n = kept.n\n    if number == 0 and n:\n        break\n" in new
    assert "for step in recovery.steps(sys.maxsize):" in new


@pytest.mark.parametrize(
    ("text", "lines", "why"),
    [
        (f"{TWO}        if x:\n            break\n        else:\n            n = 1\n", (2, 1), "6: `break` in a loop"),
        (f"{TWO}        try:\n            continue\n        finally:\n            n = 1\n", (2, 1), "6: `continue` in"),
        (f"{TWO}        if x:\n            if x:\n                break\n", (2, 1), "7: `break` in a loop"),
        (f"{TWO}    if x:\n        continue\n    n = 1\n", (2, 1), "6: `continue` in the loop of epochs"),
        (
            f"for epoch in range(3):\n    if n: break\n    for x in bare:\n{ROUND}",
            (3, 1),
            "2: `break` in the loop of epochs",
        ),
        (
            f"for epoch in range(3):\n    for i in range(9):\n{ROUND.replace('(x)', '(i)')}        if i: break\n",
            (2, 1),
            r"2: `break` in a loop over a range\(\)",
        ),
        (
            f"n = 0\nwhile n < 3:\n    for x in loader:\n{ROUND}        n += 1\n",
            (3, 2),
            "2: .*a `while` loop of epochs",
        ),
        (f"def f():\n    nonlocal n\n    n = 1\nfor x in bare:\n{STEP}", (4,), "2: .*nonlocal n"),
    ],
)
def test_jumps_that_cannot_be_written_are_refused(text: str, lines: tuple[int, ...], why: str) -> None:
    assert re.match(why, refused(text, *lines))


# -- variables of the file, and objects that are made again ------------------------------------------

COUNTED = """
    n = 0
    def count():
        global n
        n += 1

    def main():
        for x in bare:
            model(x).backward()
            optimizer.step()
            count()
        print(n)
"""


def test_what_functions_set_for_the_file_is_registered_with_it() -> None:
    seen = replace(running(), of_file=lambda name: name == "n")
    new = by_hand(textwrap.dedent(COUNTED).lstrip(), 7, 0, seen)
    assert 'variables=flashrecovery.KeptAttributes(sys.modules[__name__], "n"),' in new and "import sys\n" in new
    assert "kept" not in new


def test_a_file_with_the_loop_itself_keeps_what_functions_set() -> None:
    new = patched(f"n = 0\ndef f():\n    global n\n    n += 1\nfor x in bare:\n{STEP}    f()\n", 5)
    assert "    n = kept.n\n" in new and "    kept.n = n\n" in new


def test_other_things_that_functions_set_are_refused() -> None:
    seen = replace(running(), plain=lambda name, made: False, of_file=lambda name: True)
    text = textwrap.dedent(COUNTED).lstrip()
    with pytest.raises(NotByHand, match=r"`global n`|n changes from step to step") as found:
        by_hand(text, 7, 0, seen)
    assert found.value.line in (3, 7)


def test_what_modules_keep_is_registered() -> None:
    seen = replace(running(), in_modules={'sys.modules["helpers"]': ["count"]})
    new = by_hand(textwrap.dedent(EPOCHS).lstrip(), 7, 3, seen)
    assert 'sys_modules_helpers=flashrecovery.KeptAttributes(sys.modules["helpers"], "count"),' in new


def test_a_variable_of_another_function_is_refused() -> None:
    seen = replace(running(), of_function=lambda name: name == "n")
    with pytest.raises(NotByHand, match="n, which changes, is a variable of another function"):
        by_hand(f"n = 0\nfor x in bare:\n{STEP}    n += 1\nprint(n)\n", 2, 0, seen)


def test_an_object_that_others_lead_to_is_not_made_again_by_hand() -> None:
    text = f"for e in range(2):\n    meter = self.meter\n    for x in bare:\n{ROUND}        meter.add(x)\n"
    seen = replace(
        running(),
        own={"meter": ["sum"]},
        plain=lambda name, made: name != "meter",
        known=lambda name: name not in ("meter",),
    )
    with pytest.raises(NotByHand, match=r"meter.* changes"):
        by_hand(text, 3, 1, seen)


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


# -- micro-batches ----------------------------------------------------------------------------------

ACCUMULATED = """
    for i, (x, y) in enumerate({source}):
        last = {test}
        loss = model(x, y)
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            print(i, loss.item())
"""


def loop_of(text: str) -> str:
    return text[text.index("\nfor ") + 1 :]


def accumulated(test: str, source: str = "bare") -> str:
    return loop_of(patched(ACCUMULATED.format(test=test, source=source), 1))


@pytest.mark.parametrize(
    ("test", "source"),
    [
        ("(i + 1) % 4 == 0", "bare"),
        ("not (i + 1) % 4", "bare"),
        ("i % 4 == 3", "bare"),
        ("i % 4 == 4 - 1", "bare"),
        ("i % 4 == 0", "bare, 1"),
    ],
)
def test_rounds_of_one_step_are_a_loop_in_its_block(test: str, source: str) -> None:
    first = source.endswith("1")
    more = " + 1" if first else ""
    assert accumulated(test, source) == textwrap.dedent(
        f"""\
        for step in recovery.steps(len(bare) // 4):
            with step:
                for i in range(step.index * 4{more}, step.index * 4 + 4{more}):
                    x, y = next(data)
                    last = {test}
                    loss = model(x, y)
                    loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            if step.committed:
                print(i, loss.item())
        """
    )
    assert "assert len(bare) % 4 == 0" in patched(ACCUMULATED.format(test=test, source=source), 1)


@pytest.mark.parametrize("test", ["(i + 1) % n == 0 or i + 1 == len(bare)", "not (i + 1) % n or i == len(bare) - 1"])
def test_a_last_step_with_fewer_rounds(test: str) -> None:
    new = accumulated(test)
    assert new.startswith("for step in recovery.steps(-(-len(bare) // n)):")
    assert "for i in range(step.index * n, min(step.index * n + n, len(bare))):" in new


@pytest.mark.parametrize(
    ("test", "source"),
    [
        ("i % 4 == 0", "bare"),  # a first step of one round
        ("(i + 1) % 4 == 0", "bare, 1"),
        ("(i + 1) % 4 == 1", "bare"),
        ("i > 4", "bare"),
        ("(i + 1) % 4 == 0 and i > 4", "bare"),
        ("(i + 1) % 4 == 0 or i == len(loader)", "bare"),
        ("(i + 1) % f() == 0", "bare"),
        ("(i + 1) % loss == 0", "bare"),
    ],
)
def test_other_conditions_are_refused(test: str, source: str) -> None:
    assert refused(ACCUMULATED.format(test=test, source=source), 1).startswith("5: ")


def test_batches_that_belong_to_no_step_are_refused() -> None:
    text = textwrap.dedent(ACCUMULATED.format(test="(i + 1) % 4 == 0", source="bare")).lstrip()
    seen = replace(running(), value_of=lambda path: {"len(bare)": 10, "4": 4}.get(path))
    with pytest.raises(NotByHand, match=r"len\(bare\) is 10, of which steps of 4 micro-batches leave 2"):
        by_hand(text, 1, 0, seen)


def test_what_comes_below_the_step_in_each_round_stays_in_the_block() -> None:
    text = ACCUMULATED.format(test="(i + 1) % 4 == 0", source="bare") + "        print(i)\n"
    assert loop_of(patched(text, 1)).endswith("            print(i, loss.item())\n            print(i)\n")


# -- an epoch in a function -------------------------------------------------------------------------

FUNCTION = """
    def train(net, batches, epoch, clip=1.0):
        '''An epoch.'''
        net.train()
        total = 0.0
        for x, y in batches:
            loss = net(x, y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total


    def test(net):
        value = net(1)
        print(value.item())


    for epoch in range(1, 4):
        best = train(model, bare, epoch)
        test(model)
    print(best)
"""


def in_one(text: str, step_line: int, epoch_line: int) -> str:
    one = inlined(textwrap.dedent(text).lstrip(), step_line, epoch_line)
    seen = running()
    seen = replace(seen, sampler_of=lambda path: [] if path in ("bare", "batches") else None)
    seen = replace(seen, known=lambda name: name in ("net", "batches") or running().known(name))
    return without(by_hand(one.text, one.step_line, one.epoch_line, seen), one.function)


def test_a_function_with_the_loop_of_steps_takes_the_place_of_its_call() -> None:
    new = in_one(FUNCTION, 5, 18)
    assert "def train(" not in new
    assert new[new.index("def test") :].replace('"', "'") == textwrap.dedent(
        """\
        def test(net):
            value = net(1)
            if not flashrecovery.init().void:
                print(value.item())


        clip = 1.0
        net = model
        batches = bare
        recovery = flashrecovery.init()
        kept = types.SimpleNamespace(best=None, total=None)
        recovery.register(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            kept=flashrecovery.KeptAttributes(kept, 'best', 'total'),
            per_rank=['kept'],
        )
        data = recovery.data(batches)
        rounds = len(batches)
        for step in recovery.steps((4 - 1) * rounds):
            epoch, number = divmod(step.index, rounds)
            epoch += 1
            best = kept.best
            total = kept.total
            with step:
                if number == 0:
                    net.train()
                    total = 0.0
                x, y = next(data)
                loss = net(x, y)
                loss.backward()
                optimizer.step()
            total += loss.item()
            if number == rounds - 1:
                best = total
                test(model)
            kept.best = best
            kept.total = total
        best = kept.best
        print(best)
        """
    )


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("total = 0.0", "total = 0.0\n        if not batches: return 0", "is left in the midst"),
        ("        return total", "        best = total\n        return total", ""),
        ("    print(best)", "    print(best, total)", "have a variable total each"),
        ("    def test(net)", "    def test(net, other=lambda: total)", "have a variable total each"),
        ("net.train()", "net.train(); yield", "yield"),
        ("(net, batches,", "(*net, batches,", "any number of arguments"),
        ("best = train(", "best = 1 + train(", "in the midst of another statement"),
        ("        best = train(", "        train(model, bare, 2)\n        best = train(", "is called in 2 places"),
        ("clip=1.0", "clip=f()", "the default of clip"),
        ("best = train(model", "best = model.train(model", "is called in 0 places"),
    ],
)
def test_a_function_that_cannot_be_put_there_is_refused(old: str, new: str, why: str) -> None:
    text = FUNCTION.replace(old, new, 1)
    lines = textwrap.dedent(text).lstrip().splitlines()
    step_line = 1 + next(n for n, line in enumerate(lines) if "for x, y" in line)
    epoch_line = 1 + next(n for n, line in enumerate(lines) if line.startswith("for epoch"))
    if not why:
        assert "best = total" in in_one(text, step_line, epoch_line)
        return
    with pytest.raises(NotByHand, match=re.escape(why)):
        in_one(text, step_line, epoch_line)


def test_variables_of_one_name_that_differ_are_refused() -> None:
    text = """
    def train():
        for x in bare:
            model(x).backward()
            optimizer.step(n)

    def main(n):
        for epoch in range(3):
            train()
    """
    with pytest.raises(NotByHand, match="n is another variable in train"):
        in_one(text, 2, 7)


def test_a_checkpoint_may_say_where_the_loop_begins() -> None:
    text = (
        f"first = torch.load('x')\nfor epoch in range(first, 3):\n    for x in bare:\n{textwrap.indent(STEP, '    ')}"
    )
    assert "would find one that this job has saved" in refused(text, 3, 2)


def test_what_modules_keep_is_named_in_a_comment() -> None:
    paths = [f"helpers.count_{i}" for i in range(9)]
    text = by_hand(textwrap.dedent(EPOCHS).lstrip(), 7, 3, replace(running(), of_modules=paths))
    comments = [line for line in text.splitlines() if line.startswith("# ") and line != "# batches"]
    assert "Register an object" in " ".join(comments) and all(path in " ".join(comments) for path in paths)
    assert text.index(comments[-1]) < text.index("recovery = flashrecovery.init()")
    assert max(map(len, comments)) <= 100
