"""Context parallelism: causal attention over a sequence that is split over ranks.

Ring attention (Liu et al., 2023, arXiv:2310.01889): each rank keeps its queries, and the keys and
values travel around the ring, the next block while the current one is computed. Partial results are
merged by their log-sum-exp, as FlashAttention does (Dao et al., 2022, arXiv:2205.14135).

The sequence is split in zigzag, as for Llama 3 (arXiv:2407.21783) and in Megatron: of 2 cp chunks,
rank i holds chunks i and 2 cp - 1 - i. Then each rank has as much to compute as any other in every
step of the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from training._torch import flash_backward, flash_forward, flash_takes


def zigzag_positions(sequence: int, cp: int, index: int, device: torch.device) -> Tensor:
    """The global positions that rank ``index`` of ``cp`` holds, ascending. (sequence / cp,) int64.

    Raises:
        ValueError: the sequence does not divide into 2 cp chunks.
    """
    positions = torch.arange(sequence, device=device)
    if cp == 1:
        return positions
    if sequence % (2 * cp):
        raise ValueError(f"a sequence of {sequence} does not divide into 2 x {cp} chunks")
    chunks = positions.chunk(2 * cp)
    return torch.cat([chunks[index], chunks[2 * cp - 1 - index]])


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup | None, documents: Tensor | None = None
) -> Tensor:
    """Causal attention with the sequence split in zigzag over ``group``.

    With ``documents``, a rank needs memory for a score of each pair of its queries and a block's
    keys: no fused kernel takes a mask.

    Args:
        q: (batch, heads, local sequence, head size).
        k, v: (batch, kv heads, local sequence, head size); kv heads divide heads.
        group: the ranks that share the sequence; None if this one holds all of it.
        documents: (batch, global sequence) the number of each position's document, the same on all
            ranks. Positions see their own document only.

    Returns:
        Like ``q``.

    Raises:
        ValueError: the heads, the sequence or the documents do not fit each other or the group.
    """
    heads, kv_heads, sequence = q.shape[1], k.shape[1], q.shape[2]
    cp = 1 if group is None else group.size()
    if heads % kv_heads:
        raise ValueError(f"{kv_heads} kv heads do not divide {heads} heads")
    if documents is not None and documents.shape != (q.shape[0], sequence * cp):
        raise ValueError(f"documents are {tuple(documents.shape)}, not {(q.shape[0], sequence * cp)}")
    if cp > 1:
        if sequence % 2:
            raise ValueError(f"a rank holds two chunks of one length, not {sequence} positions")
        return _RingAttention.apply(q, k, v, documents, group)
    if documents is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_same(documents, documents).tril())


class _RingAttention(torch.autograd.Function):
    """Two trips around the ring: one of the blocks, and one of the blocks and their gradients.

    Sums are in fp32, or fp64 for fp64 inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, group: dist.ProcessGroup
    ) -> Tensor:
        q = q.contiguous()
        out = torch.zeros_like(q, dtype=_wide(q))
        lse = out.new_full(q.shape[:-1], -torch.inf)
        for part, block in _around(torch.stack((k, v)), documents, group):
            keys, values = block[:, :, :, part.columns]
            found, found_lse = _forward(q[:, :, part.rows], keys, values, part)
            _merge_(out[:, :, part.rows], lse[:, :, part.rows], found, found_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, documents)
        ctx.group = group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, documents = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq = torch.zeros_like(q, dtype=_wide(q))
        hop = None
        for part, block in _around(torch.stack((k, v)), documents, ctx.group):
            keys, values = block[:, :, :, part.columns]
            part_grad, part_q, part_out, part_lse = (x[:, :, part.rows] for x in (grad, q, out, lse))
            found, *found_kv = _backward(part_grad, part_q, keys, values, part_out, part_lse, part)
            dq[:, :, part.rows] += found
            dkv = hop.wait() if hop else torch.zeros_like(block, dtype=_wide(q))
            dkv[:, :, :, part.columns] += torch.stack(found_kv)
            hop = _Hop(dkv, ctx.group)
        assert hop is not None
        dk, dv = hop.wait()  # home: every rank has added its part
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


class _Part(NamedTuple):
    """Which of a rank's queries see which keys of one block.

    Attributes:
        rows: the queries that see any.
        columns: the keys that any sees.
        causal: query i of the rows sees keys 0 to i of the columns, not all.
        visible: (batch, 1, rows, columns) false where two documents meet; None without documents.
    """

    rows: slice
    columns: slice
    causal: bool
    visible: Tensor | None


class _Hop:
    """A tensor on its way to the next rank of the ring, while the previous rank's arrives."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        index, size = group.rank(), group.size()
        self._sent = tensor  # not to be freed before it has arrived
        self._arriving = torch.empty_like(tensor)
        to, source = (dist.get_global_rank(group, (index + step) % size) for step in (1, -1))
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, to, group),
                dist.P2POp(dist.irecv, self._arriving, source, group),
            ]
        )

    def wait(self) -> Tensor:
        """What the previous rank sent."""
        for work in self._works:
            work.wait()
        return self._arriving


def _around(
    block: Tensor, documents: Tensor | None, group: dist.ProcessGroup
) -> Iterator[tuple[_Part, Tensor]]:
    """Every rank's block, with the part of it to compute. The next one travels in the meantime.

    The own block comes first: in it each query sees itself, so that its log-sum-exp is finite from
    then on, also where a later block has nothing for it.
    """
    index, size = group.rank(), group.size()
    for step in range(size):
        hop = _Hop(block, group) if step < size - 1 else None
        yield _part(index, (index - step) % size, size, block.shape[3] // 2, documents), block
        if hop:
            block = hop.wait()


def _part(index: int, source: int, cp: int, half: int, documents: Tensor | None) -> _Part:
    """What rank ``index`` computes of the block of rank ``source``, both of two chunks of ``half``.

    All queries come after the first chunk of a lower rank and before its second; only the second
    chunk of queries comes after a higher rank's keys, and after all of them.
    """
    whole = slice(None)
    rows = slice(half, None) if source > index else whole
    columns = slice(None, half) if source < index else whole
    visible = None
    if documents is not None:
        sequence, device = documents.shape[1], documents.device
        of_rows = documents[:, zigzag_positions(sequence, cp, index, device)[rows]]
        of_columns = documents[:, zigzag_positions(sequence, cp, source, device)[columns]]
        visible = _same(of_rows, of_columns)
    return _Part(rows, columns, source == index, visible)


def _same(of_rows: Tensor, of_columns: Tensor) -> Tensor:
    """Whether two positions are of one document. (batch, 1, rows, columns)."""
    return of_rows[:, None, :, None] == of_columns[:, None, None, :]


def _merge_(out: Tensor, lse: Tensor, found: Tensor, found_lse: Tensor) -> None:
    """Merge attention over other keys into ``out`` and ``lse``.

    A row without any keys has out 0 and log-sum-exp -inf, and only one of the two may be without.
    """
    weight = torch.sigmoid(found_lse - lse)
    out.lerp_(found.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, found_lse, out=lse)


def _forward(q: Tensor, k: Tensor, v: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
    """Attention over one block's keys, and its log-sum-exp: 0 and -inf in a row that sees none."""
    if part.visible is None and flash_takes(q, k, v, part.causal):
        return flash_forward(q, k, v, part.causal)
    with torch.autocast(q.device.type, enabled=False):
        scores = _scores(q, k, part)
        lse = scores.logsumexp(-1)
        out = _fold(_probabilities(scores, lse), v) @ v.to(scores.dtype)
    return out.view(q.shape), lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: _Part
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of the gradients of q, k and v that comes from one block's keys.

    ``out`` and ``lse`` are those over all keys.
    """
    if part.visible is None and flash_takes(q, k, v, part.causal):
        return flash_backward(grad, q, k, v, out, lse, part.causal)
    with torch.autocast(q.device.type, enabled=False):
        probabilities = _probabilities(_scores(q, k, part), lse)
        grad, wide_k, wide_v = (x.to(probabilities.dtype) for x in (grad, k, v))
        mean = (grad * out).sum(-1, keepdim=True)
        d_probabilities = (_fold(grad, v) @ wide_v.mT).view_as(probabilities)
        d_scores = _fold(probabilities * (d_probabilities - mean) * q.shape[-1] ** -0.5, k)
        dq = (d_scores @ wide_k).view(q.shape)
        dk = d_scores.mT @ _fold(q, k).to(d_scores.dtype)
        dv = _fold(probabilities, v).mT @ _fold(grad, v)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, part: _Part) -> Tensor:
    """Scaled products of queries and keys, -inf where hidden. (batch, heads, rows, columns)."""
    products = _fold(q, k).to(_wide(q)) @ k.to(_wide(q)).mT
    scores = products.view(*q.shape[:-1], -1) * q.shape[-1] ** -0.5
    if part.causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    if part.visible is not None:
        scores.masked_fill_(~part.visible, -torch.inf)
    return scores


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """The softmax; 0 throughout a row that sees nothing, where -inf - -inf would be NaN."""
    return (scores - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()


def _fold(x: Tensor, like: Tensor) -> Tensor:
    """(batch, heads, rows, n) -> (batch, kv heads, heads of one kv head x rows, n)."""
    return x.unflatten(1, (like.shape[1], -1)).flatten(2, 3)


def _wide(x: Tensor) -> torch.dtype:
    """The dtype to sum in."""
    return torch.promote_types(x.dtype, torch.float32)
