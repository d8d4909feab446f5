"""What megatron-core has only with Transformer Engine or on a GPU, in plain PyTorch. Each with where it is missing."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch


def install() -> None:
    """Import the modules of megatron-core concerned, and change them."""
    _random_streams()
    _experts()
    _norm()
    _attention()
    _latent_attention()
    _gradient_division()
    _sends()


def _random_streams() -> None:
    """``tensor_parallel/random.py`` speaks to the CUDA generator by its number."""
    from megatron.core.tensor_parallel import random as module

    # "CPU RNG state changed within GPU RNG context" is always true where they are one.
    logging.getLogger(module.__name__).setLevel(logging.ERROR)
    patched: Any = module
    patched._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    patched._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


def _experts() -> None:
    """``moe_utils.py`` binds a name only if Transformer Engine is there, and its helper leaves split sizes as tensors
    if they are not on a GPU; gloo needs numbers."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    utils: Any = moe_utils
    dispatcher: Any = token_dispatcher
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None
    utils.maybe_move_tensor_to_cpu = dispatcher.maybe_move_tensor_to_cpu = to_host


def _norm() -> None:
    """``torch_norm.py`` refuses sequence parallelism. The parameters are marked, so that their gradients are summed."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def new(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = original(cls, config, hidden_size, eps)
        finally:
            config.sequence_parallel = parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = parallel
        return norm

    WrappedTorchNorm.__new__ = staticmethod(new)


def _attention() -> None:
    """``dot_product_attention.py`` refuses context parallelism. Keys and values are gathered; each rank has the two
    chunks of the sequence that Megatron's load balancing gives it. It does not take the head sizes of multi-latent
    attention either, whose values have another one than its keys."""
    from megatron.core.models import backends
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class GatheringAttention(DotProductAttention):  # type: ignore[misc]
        """Megatron's attention over the whole sequence, for this rank's queries."""

        def __init__(
            self, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
        ) -> None:
            ranks, config.context_parallel_size = config.context_parallel_size, 1
            try:
                super().__init__(config, *args, **kwargs)
            finally:
                config.context_parallel_size = ranks
            groups = kwargs["pg_collection"] if "pg_collection" in kwargs else kwargs["model_comm_pgs"]  # to 0.14
            self.cp_group = groups.cp
            if v_channels is not None:  # the scale, for which k_channels is, is its own argument
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

        def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
            size, rank = self.cp_group.size(), self.cp_group.rank()
            if size > 1:
                half = query.size(0) // 2
                key = gather_from_sequence_parallel_region(key, group=self.cp_group)
                value = gather_from_sequence_parallel_region(value, group=self.cp_group)
                everywhere = torch.cat([_positions(r, size, half) for r in range(size)])
                attention_mask = (everywhere[None, :] > _positions(rank, size, half)[:, None])[None, None]
            return super().forward(query, key, value, attention_mask, **kwargs)

    backends.LocalSpecProvider.core_attention = lambda self: GatheringAttention


def _latent_attention() -> None:
    """``multi_latent_attention.py`` (0.16) believes that Transformer Engine is there, since names can be imported of
    what stands in for it, and asks whether a layer is an instance of them; they are no types."""
    from megatron.core.transformer import multi_latent_attention as module

    patched: Any = module
    if not isinstance(getattr(patched, "TELinear", None), type):
        patched.HAVE_TE = False


def _gradient_division() -> None:
    """Megatron-FSDP (``param_and_grad_buffer.py``) lets NCCL divide while it sums; gloo only sums. The gradients are
    divided before, which is what ``gradient_reduce_div_fusion=False`` asks for."""
    try:
        from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as module
    except ModuleNotFoundError:  # 0.13 has none
        return
    patched: Any = module
    original = patched.gradient_reduce_preprocessing

    def divided_before(grad_data: torch.Tensor, scaling_factor: float | None, ddp_config: Any) -> Any:
        unfused = copy.copy(ddp_config)
        unfused.gradient_reduce_div_fusion = False
        return original(grad_data, scaling_factor, unfused)

    patched.gradient_reduce_preprocessing = divided_before


def _sends() -> None:
    """``schedules.py`` frees what a pipeline stage has computed as soon as it has begun to send it (virtual stages).
    The allocator of a GPU leaves the memory alone until it is sent; gloo reads what has come into its place. So a copy
    is sent, which the handle holds."""
    from megatron.core.pipeline_parallel import p2p_communication as module

    patched: Any = module
    original = patched._p2p_ops

    def of_copies(
        *, tensor_send_prev: torch.Tensor | None, tensor_send_next: torch.Tensor | None, **others: Any
    ) -> Any:
        prev = None if tensor_send_prev is None else tensor_send_prev.detach().clone()
        following = None if tensor_send_next is None else tensor_send_next.detach().clone()
        return original(tensor_send_prev=prev, tensor_send_next=following, **others)

    patched._p2p_ops = of_copies


def _positions(rank: int, ranks: int, half: int) -> torch.Tensor:
    """The positions of the tokens of ``rank``: chunk ``rank`` and, from the end, the one opposite."""
    opposite = 2 * ranks - 1 - rank
    return torch.cat([torch.arange(c * half, (c + 1) * half) for c in (rank, opposite)])
