"""Copies beyond the replicas that data parallelism has anyway.

* :mod:`.memory.own_copy`: this rank's own state at the last two step boundaries, in host memory.
* :mod:`.memory.neighbor_copy`: what no other rank holds, on the next rank, every step.
* :mod:`.checkpoint.writer`: everything on disk, seldom; used only when no consistent cut is left in memory
  (:mod:`.checkpoint.reader`).
* :mod:`flashrecovery.plan.checkpoint_interval`: how seldom; imports no torch.

Import the modules themselves; this package imports nothing, so that :mod:`flashrecovery.plan.checkpoint_interval` stays
cheap.
"""
