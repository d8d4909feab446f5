"""The GPT examples' text through megatron-core's own data set classes, shared out among the data-parallel ranks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.utils.data import DataLoader, DistributedSampler

import corpus


@dataclass(frozen=True)
class ByteTokenizer:
    """What Megatron's data sets ask of a tokenizer."""

    vocab_size: int = corpus.VOCABULARY
    eod: int = corpus.END_OF_DOCUMENT

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """Part of the key under which index files are cached."""
        return {"class": type(self).__name__}


def build_loader(args: argparse.Namespace) -> DataLoader[dict[str, torch.Tensor]]:
    """Micro-batches of this rank's data-parallel part. Ranks of one model replica get equal ones."""
    prefix = corpus.prepare(args.data, args.data_dir, int(args.corpus_mib * 2**20))
    replicas = parallel_state.get_data_parallel_world_size()
    samples = args.steps * args.micro_batches * args.batch_size * replicas
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.context,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(args.data_dir / "megatron-cache"),
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()
    sampler: DistributedSampler[Any] = DistributedSampler(
        train, num_replicas=replicas, rank=parallel_state.get_data_parallel_rank(), seed=args.seed, drop_last=True
    )
    return DataLoader(train, args.batch_size, sampler=sampler, num_workers=args.num_workers, drop_last=True)
