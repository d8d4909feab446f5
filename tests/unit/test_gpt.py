"""The example's model, data and digest: causal, repeatable, and sensitive to every bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt"
sys.path.insert(0, str(EXAMPLE))

import corpus  # noqa: E402
import data  # noqa: E402
import model  # noqa: E402
import training  # noqa: E402

SMALL = model.GPTConfig(context=16, layers=2, heads=2, width=16)


def make(seed: int = 0, **changes: object) -> model.GPT:
    torch.manual_seed(seed)
    return model.GPT(model.GPTConfig(**{**vars(SMALL), **changes}))  # type: ignore[arg-type]


def trained(steps: int) -> tuple[model.GPT, torch.optim.Optimizer, list[float]]:
    gpt = make()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    batch = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        loss = gpt(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return gpt, optimizer, losses


def test_it_learns_a_batch_by_heart() -> None:
    _, _, losses = trained(60)
    assert losses[0] == pytest.approx(5.57, abs=0.1)  # ln 264: nothing known yet
    assert losses[-1] < losses[0] / 2


def test_no_token_sees_a_later_one() -> None:
    gpt = make(dropout=0.0).eval()
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 10:] = 99
    target = torch.full((1, 16), -100)  # ignored by the loss
    target[0, :10] = 7
    assert gpt(tokens, target).item() == gpt(changed, target).item()
    target[0, 10] = 7
    assert gpt(tokens, target).item() != gpt(changed, target).item()


def test_dropout_draws_from_the_global_stream() -> None:
    gpt = make(dropout=0.5)
    tokens = torch.arange(16)[None]
    state = torch.get_rng_state()
    first, second = gpt(tokens, tokens).item(), gpt(tokens, tokens).item()
    torch.set_rng_state(state)
    assert gpt(tokens, tokens).item() == first != second


def test_a_tied_head_saves_its_parameters() -> None:
    count = sum(p.numel() for p in make().parameters()) - sum(p.numel() for p in make(tie_head=True).parameters())
    assert count == 264 * SMALL.width


@pytest.mark.parametrize(("change", "reason"), [({"heads": 3}, "multiple"), ({"dropout": 1.0}, "dropout")])
def test_impossible_sizes_are_refused(change: dict[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make(**change)


def test_equal_runs_have_equal_digests_and_each_bit_counts() -> None:
    gpt, optimizer, _ = trained(3)
    state = torch.get_rng_state()
    digest = training.state_digest(gpt, optimizer)
    again, again_optimizer, _ = trained(3)
    assert training.state_digest(again, again_optimizer) == digest

    moment = optimizer.state[next(gpt.parameters())]["exp_avg"].view(torch.int32)
    moment[0, 0] ^= 1
    assert training.state_digest(gpt, optimizer) != digest
    moment[0, 0] ^= 1
    torch.rand(1)
    assert training.state_digest(gpt, optimizer) != digest
    torch.set_rng_state(state)
    assert training.state_digest(gpt, optimizer) == digest


def test_ranks_share_the_data_and_epochs_are_shuffled(tmp_path: Path) -> None:
    dataset = data.BlockDataset(corpus.prepare(None, tmp_path, 20_000), context=64)
    loaders = [data.make_loader(dataset, rank=r, world=2, batch_size=3, seed=5) for r in range(2)]

    def epoch(loader: torch.utils.data.DataLoader[tuple[torch.Tensor, torch.Tensor]], number: int) -> list[bytes]:
        loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
        return [x.numpy().tobytes() for x, _ in loader]

    assert epoch(loaders[0], 0) == epoch(loaders[0], 0)
    assert epoch(loaders[0], 0) != epoch(loaders[0], 1)
    assert not set(epoch(loaders[0], 0)) & set(epoch(loaders[1], 0))
    x, y = dataset[1]
    assert torch.equal(x[1:], y[:-1])
    assert y[-1] == dataset[2][0][0]


def test_a_stateful_loader_gives_the_same_batches(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    dataset = data.BlockDataset(corpus.prepare(None, tmp_path, 20_000), context=64)
    plain, stateful = (
        [x for x, _ in data.make_loader(dataset, rank=0, world=2, batch_size=3, seed=5, stateful=flag)]
        for flag in (False, True)
    )
    assert len(plain) == len(stateful) > 0
    assert all(map(torch.equal, plain, stateful))


def test_too_little_text_is_a_clear_error(tmp_path: Path) -> None:
    prefix = corpus.prepare(None, tmp_path, 100)
    with pytest.raises(ValueError, match="less than one block"):
        data.BlockDataset(prefix, context=1000)
    with pytest.raises(ValueError, match="less than one batch"):
        data.make_loader(data.BlockDataset(prefix, context=10), rank=0, world=2, batch_size=100, seed=0)
