"""Copies beyond the replicas that data parallelism has anyway.

* :mod:`.undo`: this rank's own state at the last two step boundaries, in host memory.
* :mod:`.neighbor`: what no other rank holds, on the next rank, every step.
* :mod:`.checkpoint`: everything on disk, seldom; used only when no consistent cut is left in memory
  (:mod:`.loading`).
* :mod:`flashrecovery.plan.interval`: how seldom; imports no torch.

Import the modules themselves; this package imports nothing, so that :mod:`flashrecovery.plan.interval` stays cheap.
"""
