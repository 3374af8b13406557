"""Ring attention against attention over the whole sequence in one process."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from training import _torch
from training.parallel.ring import attention, zigzag_positions

CPU = torch.device("cpu")
SEQUENCE = 24
DOCUMENTS = {
    "no documents": None,
    "documents": [[1] * 5 + [2] * 12 + [3] * 7, [4] * 24],
    # A document of chunk 0 (cp 2), or of chunks 0 and 1 (cp 4): to other ranks, a block without any key.
    "a hidden block": [[1] * 6 + [2] * 18, [1] * 6 + [2] * 9 + [3] * 9],
}
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}

Tensors = list[Tensor]


def inputs(kv_heads: int, dtype: str, seed: int = 0) -> Tensors:
    """q, k, v and the gradient of the output, over the whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, SEQUENCE, 8) for heads in (4, kv_heads, kv_heads, 4)]
    wide = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(getattr(torch, dtype)) for x in wide]


def by_definition(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, documents: Tensor | None) -> Tensors:
    """The output of attention over the whole sequence, and the gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in leaves[1:])
    visible = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = (leaves[0] @ keys.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    out = scores.softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def error(group: dist.ProcessGroup | None, tensors: Tensors, name: str) -> float:
    """How far this rank's output, dq, dk and dv are from the definition's, relative to its largest value."""
    documents = None if DOCUMENTS[name] is None else torch.tensor(DOCUMENTS[name])
    cp, index = (1, 0) if group is None else (group.size(), group.rank())
    positions = zigzag_positions(SEQUENCE, cp, index, CPU)
    q, k, v, grad = (x[:, :, positions] for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, group=group, documents=documents)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    assert {x.dtype for x in found} == {q.dtype}
    whole_q, whole_k, whole_v, whole_grad = (x.double() for x in tensors)
    expected = by_definition(whole_q, whole_k, whole_v, whole_grad, documents)
    return max(
        ((mine - whole[:, :, positions]).abs().max() / whole.abs().max()).item()
        for mine, whole in zip(found, expected, strict=True)
    )


def ring_errors() -> dict[str, dict[str, float]]:
    """By dtype and by case, on this rank of a ring of all ranks."""
    return {
        dtype: {
            f"{name}, {kv_heads} kv heads": error(dist.group.WORLD, inputs(kv_heads, dtype), name)
            for kv_heads, name in product((4, 2, 1), DOCUMENTS)
        }
        for dtype in TOLERANCE
    }


@pytest.mark.parametrize(("cp", "fused"), [(2, True), (4, True), (4, False)])
def test_the_ring_equals_attention_over_the_whole_sequence(
    cp: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fused:
        monkeypatch.setattr("training.parallel.ring.flash_takes", lambda *_: False)
    for errors in run_ranks(cp, ring_errors):
        for dtype, by_case in errors.items():
            assert by_case == {case: pytest.approx(0, abs=TOLERANCE[dtype]) for case in by_case}, dtype


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_rank_alone_sees_the_whole_sequence(name: str) -> None:
    assert error(None, inputs(2, "float64"), name) < TOLERANCE["float64"]


def error_in_one_of_two_rings(name: str) -> float:
    rings = [dist.new_group(ranks) for ranks in ([0, 2], [3, 1])]
    ring = dist.get_rank() % 2
    return error(rings[ring], inputs(2, "float64", seed=ring), name)


def test_rings_within_a_larger_world_do_not_mix() -> None:
    assert max(run_ranks(4, error_in_one_of_two_rings, "documents")) < TOLERANCE["float64"]


def error_under_autocast(name: str) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v, grad = (x.chunk(2, 2)[dist.get_rank()].requires_grad_() for x in inputs(2, "float32"))
        documents = torch.tensor(DOCUMENTS[name])
        out = attention(q, k, v, group=dist.group.WORLD, documents=documents)
        found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    out = attention(q, k, v, group=dist.group.WORLD, documents=documents)
    expected = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def test_autocast_does_not_narrow_the_sums() -> None:
    assert run_ranks(2, error_under_autocast, "documents") == [0, 0]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_zigzag_positions_split_the_sequence_and_its_work_evenly(cp: int) -> None:
    ranks = [zigzag_positions(SEQUENCE, cp, index, CPU) for index in range(cp)]
    assert sorted(torch.cat(ranks).tolist()) == list(range(SEQUENCE))
    assert all(positions.equal(positions.sort().values) for positions in ranks)
    # Position i sees i + 1 keys.
    assert len({(len(positions), int(positions.sum())) for positions in ranks}) == 1


def refusal_of_an_odd_share() -> str:
    q = torch.zeros(1, 1, 3, 8)
    with pytest.raises(ValueError) as refusal:
        attention(q, q, q, group=dist.group.WORLD)
    dist.barrier()  # a rank that ends while the other is still connecting would break it
    return str(refusal.value)


def test_what_cannot_be_split_is_refused() -> None:
    q, k, v, _ = inputs(2, "float32")
    with pytest.raises(ValueError, match="2 x 5 chunks"):
        zigzag_positions(SEQUENCE, 5, 0, CPU)
    with pytest.raises(ValueError, match="3 kv heads"):
        attention(q, q[:, :3], q[:, :3], group=None)
    with pytest.raises(ValueError, match="documents are"):
        attention(q, k, v, group=None, documents=torch.zeros(2, 2 * SEQUENCE))
    assert "not 3 positions" in run_ranks(2, refusal_of_an_odd_share)[0]


@pytest.mark.parametrize("device", ["_for_cpu", ""], ids=["cpu", "cuda"])
@pytest.mark.parametrize("direction", ["", "_backward"], ids=["forward", "backward"])
def test_torch_has_the_private_operator(device: str, direction: str) -> None:
    assert getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{device}{direction}").default


def test_flash_attention_on_cuda_is_called_as_torch_declares_it() -> None:
    """Meta tensors go through the operators for CUDA without running them."""
    q, k, v, grad = (x.to("meta") for x in inputs(2, "bfloat16"))
    out, lse = _torch.flash_forward(q, k, v, True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    grads = _torch.flash_backward(grad, q, k, v, out, lse, True)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
