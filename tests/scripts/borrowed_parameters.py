"""Models whose modules read parameters of others, with ZeRO-3: DeepSpeed learns in a forward pass what to gather for
whom, and gathers otherwise from then on.

``--model`` chooses one of :data:`MODELS`, ``--evaluate`` when the script evaluates, too: that teaches as well.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fr_deepspeed  # noqa: F401 - engine.recovery
from tests.scripts import proof

WIDTH, WORDS, BATCH = 32, 32, 4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "torch_adam": True},
    "Muon": {"lr": 0.01, "torch_adam": True},
}
EVALUATIONS = ("", "above", "inside", "below", "before")


class Adapted(nn.Module):
    """A layer with a low-rank adapter, whose weights it reads itself: of the size of its own weight, and another one.
    The last part is frozen."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + x @ self.down.weight.t() @ self.up.weight.t())


class Stack(nn.Module):
    """Adapted layers between an embedding and logits."""

    def __init__(self, rank: int = WIDTH, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Adapted(rank) for _ in range(layers)])
        self.logits = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.read_out(self.middle(self.words(x), step))

    def middle(self, x: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def read_out(self, x: Tensor) -> Tensor:
        result: Tensor = self.logits(x)
        return result


class Tied(Stack):
    """The embedding's weight makes the logits, too, without being another module's parameter."""

    def __init__(self) -> None:
        super().__init__()
        del self.logits

    def read_out(self, x: Tensor) -> Tensor:
        return x @ self.words.weight.t()


class Returning(Stack):
    """A module returns its parameter, which the model computes with."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))

        def forward(self) -> Tensor:
            return self.weight

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList([self.Scale(), self.Scale()])

    def read_out(self, x: Tensor) -> Tensor:
        return self.logits(x @ self.scales[0]()) + self.logits(x @ self.scales[1]())


class Changing(Stack):
    """Which layers compute, and in which order, depends on the step."""

    def middle(self, x: Tensor, step: int) -> Tensor:
        for layer in list(self.layers)[:: -1 if step % 2 else 1][step % 3 :]:
            x = layer(x)
        for layer in self.layers:  # all have a gradient
            x = layer(x)
        return x


class LearnsLater(Stack):
    """From the sixth step on a module reads what it has not read before."""

    def read_out(self, x: Tensor) -> Tensor:
        result = super().read_out(x)
        if self.turned:
            result = result + x @ self.layers[0].base.weight.t() @ self.words.weight.t()
        return result

    turned = False

    def forward(self, x: Tensor, step: int) -> Tensor:
        self.turned = step > 4
        return super().forward(x, step)


MODELS: dict[str, Any] = {
    "adapted": Stack,
    "adapted-unequal": lambda: Stack(rank=4),
    "tied": Tied,
    "returning": Returning,
    "changing": Changing,
    "learns-later": LearnsLater,
}


def main() -> None:
    parser = proof.flags(__doc__)
    parser.add_argument("--model", choices=MODELS, default="adapted")
    parser.add_argument("--evaluate", choices=EVALUATIONS, default="")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="AdamW")
    parser.add_argument("--client", action="store_true", help="an optimizer of the script's, set to train before")
    parser.add_argument("--within-update", action="store_true", help="kills in backward: in Muon's second update")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="of zero_optimization")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--persistent", type=int, default=0, help="parameters up to that many elements stay whole")
    args = parser.parse_args()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    net = MODELS[args.model]()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 10**6,
        "gradient_accumulation_steps": args.accumulation,
        "optimizer": {"type": args.optimizer, "params": OPTIMIZERS[args.optimizer]},
        "zero_optimization": {
            "stage": args.stage,
            "stage3_param_persistence_threshold": args.persistent,
            **{key: json.loads(value) for key, _, value in (text.partition("=") for text in args.set)},
        },
        "flash_recovery": {"enabled": True},
    }
    if not args.fp32:
        config["bf16"] = {"enabled": True}
    trained = [p for p in net.parameters() if p.requires_grad]
    client = _ScheduleFree(trained, lr=0.01) if args.client else None
    if client is not None:
        config["zero_allow_untested_optimizer"] = True
        del config["optimizer"]
        client.train()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=trained, optimizer=client, config=config)
    torch.manual_seed(100 + dist.get_rank())
    random.seed(0)
    np.random.seed(0)
    kills = proof.Kills(args.kill, engine.recovery)
    if args.within_update:
        _in_update(kills)
    else:
        kills.in_backward_of(net.layers[1])
    seen = torch.zeros(1)
    engine.recovery.register(seen=_Kept(seen), per_rank=["seen"])

    def evaluate(when: str, step: int) -> None:
        if args.evaluate != when:
            return
        engine.eval()
        with torch.no_grad():
            seen.add_(engine(torch.arange(8), step).float().mean())
        engine.train()

    evaluate("before", 0)
    for step in engine.recovery.steps(args.steps):
        kills.step = step.index
        evaluate("above", step.index)
        with step:
            kills.at("data")
            for _ in range(args.accumulation):
                x = torch.randint(0, WORDS, (BATCH,))
                loss = nn.functional.cross_entropy(engine(x, step.index).float(), (x * 7 + 3) % WORDS)
                engine.backward(loss)
                engine.step()
            kills.at("optimizer")
            proof.say_step(step.index, x, loss, engine.basic_optimizer.param_groups[0]["lr"])
            evaluate("inside", step.index)
        kills.at("below")
        evaluate("below", step.index)
        kills.at("end")

    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        weights = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    proof.say_end(net, engine.basic_optimizer, {"whole": weights, "seen": seen})
    dist.destroy_process_group()


class _ScheduleFree(torch.optim.AdamW):
    """Looks into its state for each parameter, as schedule-free optimizers do."""

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True
            for parameter in group["params"]:
                assert not self.state[parameter]


def _in_update(kills: proof.Kills) -> None:
    from deepspeed.runtime.zero.muon import original_muon

    update: Any = original_muon.muon_update

    def muon_update(*arguments: Any, **options: Any) -> Any:
        found = update(*arguments, **options)
        kills.at("backward")
        return found

    original_muon.muon_update = muon_update


class _Kept:
    def __init__(self, value: Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])


if __name__ == "__main__":
    main()
