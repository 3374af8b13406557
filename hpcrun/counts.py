"""Parameters and floating-point operations of a model: arithmetic without torch."""

from __future__ import annotations

from hpcrun.recipe import Model


def parameter_count(model: Model) -> int:
    """Weights of the whole model, vocabulary unpadded, tied embeddings once."""
    embeddings = model.vocab * model.hidden * (1 if model.tie_embeddings else 2)
    if model.positions == "learned":
        embeddings += model.sequence * model.hidden
    blocks = sum(block_parameters(model, layer) for layer in range(model.layers))
    return blocks + embeddings + _norm_parameters(model)


def block_parameters(model: Model, layer: int) -> int:
    """Weights of block ``layer``: attention, MLP or experts, norms and biases."""
    attention = _attention_products(model)
    if model.biases:
        attention += (model.heads + 2 * model.kv) * model.head_size + model.hidden
    if model.qk_norm:
        attention += 2 * model.head_size
    return attention + _mlp_parameters(model, layer) + 2 * _norm_parameters(model)


def block_flops(model: Model, layer: int) -> float:
    """Floating-point operations per token of one block forward: 2 per weight that the token meets.

    Causal attention adds 4 x heads x head size per key, and a token sees half of the sequence's keys
    (Narayanan et al., 2104.04473, appendix, with the causal half taken off).
    """
    products = _attention_products(model) + _mlp_products(model, layer)
    return 2.0 * products + 4.0 * model.heads * model.head_size * model.sequence / 2


def head_flops(model: Model) -> float:
    """Floating-point operations per token of the output layer forward."""
    return 2.0 * model.vocab * model.hidden


def training_flops(model: Model) -> float:
    """Floating-point operations per token of forward and backward: three times the forward's.

    What activation recomputing adds is not useful work and does not count, so that this is the
    numerator of model FLOP utilisation (Chowdhery et al., 2204.02311, appendix B).
    """
    forward = sum(block_flops(model, layer) for layer in range(model.layers)) + head_flops(model)
    return 3.0 * forward


def _attention_products(model: Model) -> int:
    return 2 * model.hidden * (model.heads + model.kv) * model.head_size


def _mlp_products(model: Model, layer: int) -> int:
    """Weights of the MLP part that one token is multiplied with."""
    matrices = 3 if model.activation == "swiglu" else 2
    if not model.has_experts(layer):
        return matrices * model.hidden * model.ffn
    assert model.moe is not None
    visited = model.moe.top_k + model.moe.shared_experts
    return visited * matrices * model.hidden * model.expert_ffn + model.hidden * model.moe.experts


def _mlp_parameters(model: Model, layer: int) -> int:
    matrices = 3 if model.activation == "swiglu" else 2
    if not model.has_experts(layer):
        biases = ((matrices - 1) * model.ffn + model.hidden) if model.biases else 0
        return matrices * model.hidden * model.ffn + biases
    assert model.moe is not None
    experts = model.moe.experts + model.moe.shared_experts
    return experts * matrices * model.hidden * model.expert_ffn + model.hidden * model.moe.experts


def _norm_parameters(model: Model) -> int:
    return model.hidden * (2 if model.norm == "layernorm" else 1)
