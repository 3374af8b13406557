"""The private names of torch that the trainer uses, all of them.

``F.scaled_dot_product_attention`` does not give the log-sum-exp of its rows, without which results
over different keys cannot be merged. The aten operators below it do; torch's own context parallelism
calls the same ones. Those for CUDA are tested by their signature only, and not run on several GPUs.

A dry run computes on fake tensors, which have shapes and no values, in a fake process group, where
collectives return at once; torch's own memory estimation does the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "FakeStore",
    "FakeTensorMode",
    "Store",
    "TorchDispatchMode",
    "flash_backward",
    "flash_forward",
    "flash_takes",
    "job_store",
    "tree_leaves",
]

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda_forward = torch.ops.aten._scaled_dot_product_flash_attention
_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


def flash_takes(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether the two functions below take these tensors. On CUDA not run on several GPUs."""
    if q.device.type == "cpu":
        return True
    # torch asks for a multiple of 8 here, and pads others only in its public function.
    return q.shape[-1] % 8 == 0 and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, causal, True))


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """FlashAttention (Dao, 2023, arXiv:2307.08691), without dropout. On CUDA not run on several GPUs.

    Args:
        q: (batch, heads, queries, head size), its last dimension contiguous.
        k, v: (batch, kv heads, keys, head size), likewise; kv heads divide heads.
        causal: query i sees keys 0 to i only.

    Returns:
        The result like ``q``, and the log-sum-exp of each row of scores (batch, heads, queries) in
        fp32, or fp64 where ``q`` is.
    """
    forward = _cpu_forward if q.device.type == "cpu" else _cuda_forward
    out, lse, *_ = forward(q, k, v, 0.0, causal)
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. On CUDA not run on several GPUs.

    ``out`` and ``lse`` may be those over more keys than ``k`` holds: the result is then the part of
    the gradients that comes from these keys.
    """
    if q.device.type == "cpu":
        return _cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout
    lengths = (None, None, q.shape[2], k.shape[2])
    return _cuda_backward(grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, unused, unused)


def job_store() -> Store:
    """A connection of its own to the store that the job's ranks met at, for a thread beside the training."""
    if not dist.is_initialized():
        return dist.HashStore()
    store: Store = _get_default_store().clone()  # type: ignore[attr-defined]
    return store
