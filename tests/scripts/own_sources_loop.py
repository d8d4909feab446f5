"""A source of the script's own in a loop, without a line of ours: ``own_sources_loop.py SOURCE``, by ``--auto``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.scripts.own_sources import Training

training = Training()
model, optimizer = training.model, training.optimizer
for number, batch in enumerate(training.source):
    loss = training.loss(batch)
    loss.backward()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank={training.rank} step={number // 4} {training.said(loss, batch)}", flush=True)
    if number == 4 * training.steps - 1:
        break
training.say_end()
