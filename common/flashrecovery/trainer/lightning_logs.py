"""Lightning's loggers: each row of metrics once, however often its step is done, and in one file.

A row goes the way of a printed line (:mod:`flashrecovery.worker.own_loops.output`): it is written when its step cannot
be done again any more.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from typing import Any

from flashrecovery.worker.own_loops.output import Output


def hold_rows(output: Output, logger: Any) -> None:
    """From now on what ``logger`` logs is held as long as lines are."""
    write: Callable[..., Any] = logger.log_metrics
    save: Callable[[], None] = logger.save

    class Rows:
        """What is shown of them is written."""

        def write(self, text: str) -> int:
            for line in text.splitlines():
                metrics, step = json.loads(line)
                write(metrics=metrics, step=step)
            save()
            return len(text)

        def flush(self) -> None:
            """It was."""

    number = output.add(Rows())

    def log_metrics(metrics: dict[str, Any], step: int | None = None) -> None:
        try:
            line = json.dumps([{name: _number(value) for name, value in metrics.items()}, step])
        except TypeError:  # no numbers: of the script's own, for its own logger
            write(metrics=metrics, step=step)
            return
        output.write(number, f"{line}\n")

    logger.log_metrics = log_metrics


def go_on_with(logger: Any) -> None:
    """In a replacement: ``logger`` continues the file that the dead process wrote, instead of a new one."""
    from lightning.fabric.loggers.csv_logs import _ExperimentWriter
    from lightning.pytorch.loggers import CSVLogger

    if not isinstance(logger, CSVLogger):
        return
    writer: Any = _ExperimentWriter
    check = writer._check_log_dir_exists
    writer._check_log_dir_exists = lambda _: None
    try:
        experiment = logger.experiment
    finally:
        writer._check_log_dir_exists = check
    path = getattr(experiment, "metrics_file_path", "")  # of ranks that write nothing: none
    if path and os.path.isfile(path):
        with open(path, newline="") as file:
            experiment.metrics_keys = list(csv.DictReader(file).fieldnames or ())


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
