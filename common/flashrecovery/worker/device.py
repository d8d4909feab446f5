"""Step tags must follow the device, not the host that runs ahead of it.

On CUDA the host queues the optimizer's kernels while gradients are still being reduced. If that reduction is aborted,
the queued kernels would change the parameters with garbage, under a tag that says "version i". So the host waits for
the device once a step, right before the first mutation (the point of FlashRecovery's barrier); a stop waits for the
device before it says which version is live. Nothing of this costs anything on CPU.
"""

from __future__ import annotations

import torch


class DeviceClock:
    """Synchronises with the current CUDA device, if the process uses one."""

    def before_mutation(self) -> None:
        """Everything queued so far, the gradient synchronisation included, has happened."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    def settle(self) -> None:
        """Everything queued on the device has happened; called when a stopped step has unwound."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
