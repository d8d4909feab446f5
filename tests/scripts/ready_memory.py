"""DDP with state that is worth having memory ready for. ``ready_memory.py KIND``: what its gradients are at a boundary.

``views``: of the buckets. ``own``: tensors of their own. ``none``: there are none. Each process prints how much of what
a restore has allocated lies in pages that were made ahead.
"""

from __future__ import annotations

import hashlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flashrecovery
from flashrecovery.runtime import page_reserve

KIND, WIDTH, LAYERS = sys.argv[1], 1024, 3


def main() -> None:
    made, real = [0], page_reserve.PageReserve.back

    def back(reserve: page_reserve.PageReserve, address: int, nbytes: int) -> range:
        reserve.filled()  # however busy the machine is
        backed = real(reserve, address, nbytes)
        made[0] += len(backed)
        return backed

    page_reserve.PageReserve.back = back  # type: ignore[method-assign]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recovery = flashrecovery.init()
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = DistributedDataParallel(net, gradient_as_bucket_view=KIND == "views")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recovery.register(model=model, optimizer=optimizer)
    torch.manual_seed(100 + dist.get_rank())
    for step in recovery.steps(6):
        with step:
            loss = model(torch.randn(2, WIDTH)).square().mean()
            print(f"step={step.index} loss_hex={loss.item().hex()}", flush=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=KIND == "none")  # else the next step adds to what is there
    state = [optimizer.state[p][key] for p in net.parameters() for key in ("exp_avg", "exp_avg_sq", "step")]
    content = b"".join(t.detach().numpy().tobytes() for t in [*net.parameters(), *state, torch.get_rng_state()])
    print(f"digest rank={dist.get_rank()} {hashlib.sha256(content).hexdigest()}", flush=True)
    print(f"ready rank={dist.get_rank()} {made[0]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
