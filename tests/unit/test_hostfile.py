"""DeepSpeed's hostfile and filters: the same hosts and slots as DeepSpeed's own parser finds."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from flashrecovery.errors import ConfigError
from flashrecovery.launchers.hostfile import Filters, Resources, chosen, parse, read

FILE = "# the pool\nworker-0 slots=4\n\nworker-1   slots=2 max_slots=4\nworker-2\tslots=4\n"
POOL = {"worker-0": 4, "worker-1": 2, "worker-2": 4}


def test_a_hostfile() -> None:
    assert parse(FILE, "f") == POOL


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("worker-0", "line 1: 'worker-0' is not HOST slots=NUMBER"),
        ("a slots=2\nb slots=x", "line 2"),
        ("a slots=0", "NUMBER >= 1"),
        ("a slots=1\n\na slots=2", "line 3: host a stands there twice"),
        ("# nothing\n", "no host"),
    ],
)
def test_a_wrong_hostfile_is_refused_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse(text, "pool")


def test_a_hostfile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: No such file"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(), {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1), "worker-2": (0, 1, 2, 3)}),
        (Filters(include="worker-2@worker-0:2,0"), {"worker-0": (0, 2), "worker-2": (0, 1, 2, 3)}),
        (Filters(include="worker-0:1@worker-0:3"), {"worker-0": (1, 3)}),
        (Filters(exclude="worker-1@worker-0:0"), {"worker-0": (1, 2, 3), "worker-2": (0, 1, 2, 3)}),
        (Filters(exclude="worker-1:0,1"), {"worker-0": (0, 1, 2, 3), "worker-2": (0, 1, 2, 3)}),
        (Filters(num_nodes=2), {"worker-0": (0, 1, 2, 3), "worker-1": (0, 1)}),
        (Filters(num_nodes=1, num_gpus=2), {"worker-0": (0, 1)}),
    ],
)
def test_filters(filters: Filters, expected: Resources) -> None:
    found = chosen(POOL, filters)
    assert found == expected and list(found) == list(expected)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"include": "worker-9"}, "'worker-9' is not in the hostfile"),
        ({"exclude": "worker-1:2"}, "host worker-1 has no slot 2; there are 2"),
        ({"include": "worker-1:a"}, "is not HOST or HOST:SLOT"),
        ({"include": "a", "exclude": "b"}, "only one of them"),
        ({"include": "worker-1", "num_nodes": 1}, "--num-nodes 1: not allowed with --include"),
        ({"num_gpus": 0}, "--num-gpus 0: allowed: a number >= 1"),
        ({"exclude": "worker-0@worker-1@worker-2"}, "no slot is left"),
    ],
)
def test_wrong_filters_are_named(filters: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        chosen(POOL, Filters(**filters))  # type: ignore[arg-type]


def test_the_same_as_deepspeeds_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On random files and filters, right ones and wrong ones."""
    runner = pytest.importorskip("deepspeed.launcher.runner")
    monkeypatch.setattr(runner.logger, "disabled", True)
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    numbers = random.Random(1)
    right = 0
    for _ in range(3000):
        case = _random_case(numbers)
        theirs = _theirs(runner, *case)
        assert _ours(*case) == theirs, case
        right += theirs is not None
    assert 500 < right < 2500, right


def _random_case(numbers: random.Random) -> tuple[str, str, str, int, int]:
    hosts = [f"h{i}" for i in range(numbers.randint(1, 4))]
    hosts += ["h0"] if numbers.random() < 0.05 else []
    lines = [
        numbers.choice(["", "# h0 slots=1\n", "\n"])
        + f"{host}{numbers.choice([' ', '  ', chr(9)])}slots={numbers.randint(1, 4)}{numbers.choice(['', ' max=9'])}"
        for host in hosts
    ]
    lines += ["h9 slots"] if numbers.random() < 0.05 else []
    include = _random_filter(numbers) if numbers.random() < 0.4 else ""
    exclude = _random_filter(numbers) if numbers.random() < 0.3 else ""
    num_nodes, num_gpus = numbers.choice([-1, -1, 1, 2]), numbers.choice([-1, -1, 1, 3])
    if (include or exclude) and numbers.random() < 0.9:
        num_nodes = num_gpus = -1
    return "\n".join(lines), include, exclude, num_nodes, num_gpus


def _random_filter(numbers: random.Random) -> str:
    slots = ("", "", "", ":0", ":1", ":0,1", ":1,0,0", ":3", ":x", ":0:1")
    return "@".join(
        f"h{numbers.randint(0, numbers.randint(1, 4))}{numbers.choice(slots)}" for _ in range(numbers.randint(1, 3))
    )


def _theirs(runner, text: str, include: str, exclude: str, nodes: int, gpus: int):  # type: ignore[no-untyped-def]
    """As its ``main()`` does it."""
    try:
        pool = runner._parse_hostfile(text.splitlines(keepends=True))
        if (nodes >= 0 or gpus >= 0) and (include or exclude):
            return None
        active = runner.apply_num_nodes_and_gpus(runner.parse_inclusion_exclusion(pool, include, exclude), nodes, gpus)
    except ValueError:
        return None
    return [(host, tuple(slots)) for host, slots in active.items()] or None


def _ours(text: str, include: str, exclude: str, nodes: int, gpus: int):  # type: ignore[no-untyped-def]
    try:
        filters = Filters(include, exclude, *(None if number < 0 else number for number in (nodes, gpus)))
        return list(chosen(parse(text, "file"), filters).items())
    except ConfigError:
        return None
