"""Which of a script's clocks make a name."""

from __future__ import annotations

import ast

import pytest

from flashrecovery.worker.script_text.clock_names import ClockNames

NAMES = [
    ("time", 'run = f"runs/{int(time.time())}"'),
    ("time", "run = 'runs/' + str(time.time())"),
    ("time", "stamp = int(time.time())\nrun = f'runs/{stamp}'"),
    ("time", "random.seed(int(time.time()))"),
    ("time", "seed = int(time.time() * 1000) % 2**32\nset_all_seeds(seed)"),
    ("time", "here = time.strftime('%Y', time.localtime(time.time()))"),
    ("strftime", "folder = os.path.join('runs', time.strftime('%Y%m%d-%H%M%S'))"),
    ("strftime", "name = args.name or time.strftime('%Y')"),
    ("strftime", "stamp = time.strftime('%Y')\nprint(stamp)"),
    ("localtime", "name = time.strftime('%Y', time.localtime())"),
    ("now", "name = datetime.now().strftime('%Y')"),
    ("now", "now = datetime.datetime.now()\nrun = now.strftime('%Y')\nother = now.isoformat()"),
    ("now", "name = f'{datetime.now():%Y-%m-%d}'"),
    ("now", "name = '%s' % datetime.now()"),
    ("now", "now = datetime.now()\nname = f'{now.year}-{now.month}'"),
    ("now", "def run_name():\n    return 'run-{}'.format(datetime.now().date())"),
    ("today", "name = str(date.today())"),
]
CLOCKS = [
    ("time", "start = time.time()\nwork()\nprint(time.time() - start)"),
    ("time", "deadline = time.time() + 60"),
    ("time", "while time.time() < end: pass"),
    ("time", "fresh = time.time() - os.path.getmtime(path) < 60"),
    ("time", "start = time.time()\nname = f'{start}'\nelapsed = time.time() - start"),
    ("time", "self.started = time.time()"),
    ("time", "print(f'{time.time()} begins')"),
    ("now", "log.info('%s', datetime.now())"),
    ("now", "print(f'[{datetime.now():%H:%M}] loading')"),
    ("now", "if datetime.now().hour > 5: go()"),
    ("now", "start = datetime.now()\ntook = (datetime.now() - start).seconds"),
    ("now", "def clock():\n    return datetime.now()"),
    ("strftime", "print(time.strftime('%H:%M'), 'begins')"),
    ("strftime", "file.write(time.strftime('%H:%M') if shown else '')"),
    ("time", "use(now)"),
]


def line_of(function: str, text: str) -> int:
    return next((number for number, line in enumerate(text.split("\n"), 1) if f"{function}(" in line), 1)


@pytest.mark.parametrize(("function", "text"), NAMES)
def test_names(function: str, text: str) -> None:
    assert ClockNames(ast.parse(text)).names(line_of(function, text), function)


@pytest.mark.parametrize(("function", "text"), CLOCKS)
def test_clocks(function: str, text: str) -> None:
    assert not ClockNames(ast.parse(text)).names(line_of(function, text), function)
