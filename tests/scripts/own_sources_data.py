"""A source of the script's own in ``recovery.data()``: ``own_sources_data.py SOURCE``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import flashrecovery

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.scripts.own_sources import Training

training = Training()
recovery = flashrecovery.init()
recovery.register(model=training.model, optimizer=training.optimizer)
data: Any = recovery.data(training.source)
for step in recovery.steps(training.steps):
    with step:
        for _ in range(4):
            batch = next(data)
            loss = training.loss(batch)
            loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    if step.committed:
        print(f"step={step.index} {training.said(loss, batch)}", flush=True)
training.say_end()
