"""Models that Hugging Face's transformers knows too: names of their tensors, and their config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from hpcrun.errors import UserError
from hpcrun.recipe import Model


@dataclass(frozen=True)
class Match:
    """A tensor there, and what it is here: canonical tensors one above the other, perhaps transposed."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


def family_of(model: Model) -> str:
    """``llama``, ``qwen3`` (Llama with norms of queries and keys) or ``gpt2``.

    Raises:
        UserError: transformers has no such model; names the keys.
    """
    if model.moe:
        raise UserError("model.moe: experts cannot be exported; Llama and GPT-2 style models can")
    if (model.norm, model.activation, model.positions) == ("rmsnorm", "swiglu", "rope"):
        if model.qk_norm and model.biases:
            raise UserError("model.qk_norm with model.biases: no model of transformers has both")
        return "qwen3" if model.qk_norm else "llama"
    if (model.norm, model.activation, model.positions) == ("layernorm", "gelu", "learned"):
        odd = [
            key
            for key, wrong in (
                ("biases", not model.biases),
                ("kv_heads", model.kv != model.heads),
                ("head_dim", model.head_size * model.heads != model.hidden),
                ("qk_norm", model.qk_norm),
            )
            if wrong
        ]
        if not odd:
            return "gpt2"
        raise UserError(f"model.{odd[0]}: not as in GPT-2, so transformers has no such model")
    told = f"norm {model.norm}, activation {model.activation} and positions {model.positions}"
    raise UserError(f"model: {told} together are neither Llama's nor GPT-2's")


def matches(family: str, model: Model) -> Iterator[Match]:
    """Every tensor, in the order of the forward."""
    return _gpt2(model) if family == "gpt2" else _llama(model)


def config_of(family: str, model: Model, dtype: str) -> dict[str, Any]:
    """What stands in config.json."""
    common = {
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": True,
        "initializer_range": model.init_std,
    }
    if family == "gpt2":
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": model.hidden,
            "n_layer": model.layers,
            "n_head": model.heads,
            "n_positions": model.sequence,
            "n_inner": model.ffn,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": model.norm_eps,
            "resid_pdrop": model.dropout,
            "embd_pdrop": model.dropout,
            "attn_pdrop": 0.0,
        }
    qwen = family == "qwen3"
    return common | {
        "architectures": ["Qwen3ForCausalLM" if qwen else "LlamaForCausalLM"],
        "model_type": family,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.sequence,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_base,
        "rope_scaling": _rope_scaling(model),
        "attention_bias": model.biases,
        **({} if qwen else {"mlp_bias": model.biases}),
    }


def model_of(config: dict[str, Any]) -> tuple[str, Model]:
    """Family and model of a config.json.

    Raises:
        UserError: a model or an option that the trainer does not have.
    """
    family = config.get("model_type")
    if family == "gpt2":
        wanted = _from_gpt2(config)
    elif family in ("llama", "qwen3"):
        wanted = _from_llama(config, family)
    else:
        raise UserError(f"config.json: model_type {family!r} is none of llama, qwen3 and gpt2")
    try:
        return family, Model.model_validate(
            {key: value for key, value in wanted.items() if value is not None}
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"config.json: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _llama(model: Model) -> Iterator[Match]:
    kinds = ("weight", "bias") if model.biases else ("weight",)
    yield Match("model.embed_tokens.weight", ("embedding.weight",))
    for layer in range(model.layers):
        there, here = f"model.layers.{layer}", f"layers.{layer}"
        yield Match(f"{there}.input_layernorm.weight", (f"{here}.attention_norm.weight",))
        for part in "qkvo":
            for kind in kinds:
                yield Match(f"{there}.self_attn.{part}_proj.{kind}", (f"{here}.attention.{part}.{kind}",))
        for part in "qk" if model.qk_norm else "":
            yield Match(f"{there}.self_attn.{part}_norm.weight", (f"{here}.attention.{part}_norm.weight",))
        yield Match(f"{there}.post_attention_layernorm.weight", (f"{here}.mlp_norm.weight",))
        for part in ("gate", "up", "down"):
            for kind in kinds:
                yield Match(f"{there}.mlp.{part}_proj.{kind}", (f"{here}.mlp.{part}.{kind}",))
    yield Match("model.norm.weight", ("norm.weight",))
    if not model.tie_embeddings:
        yield Match("lm_head.weight", ("head.weight",))


def _gpt2(model: Model) -> Iterator[Match]:
    yield Match("transformer.wte.weight", ("embedding.weight",))
    yield Match("transformer.wpe.weight", ("positions.weight",))
    for layer in range(model.layers):
        there, here = f"transformer.h.{layer}", f"layers.{layer}"
        for kind in ("weight", "bias"):
            matrix = kind == "weight"
            qkv = tuple(f"{here}.attention.{part}.{kind}" for part in "qkv")
            yield Match(f"{there}.ln_1.{kind}", (f"{here}.attention_norm.{kind}",))
            yield Match(f"{there}.attn.c_attn.{kind}", qkv, matrix)
            yield Match(f"{there}.attn.c_proj.{kind}", (f"{here}.attention.o.{kind}",), matrix)
            yield Match(f"{there}.ln_2.{kind}", (f"{here}.mlp_norm.{kind}",))
            yield Match(f"{there}.mlp.c_fc.{kind}", (f"{here}.mlp.up.{kind}",), matrix)
            yield Match(f"{there}.mlp.c_proj.{kind}", (f"{here}.mlp.down.{kind}",), matrix)
    for kind in ("weight", "bias"):
        yield Match(f"transformer.ln_f.{kind}", (f"norm.{kind}",))
    if not model.tie_embeddings:
        yield Match("lm_head.weight", ("head.weight",))


def _rope_scaling(model: Model) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency,
        "high_freq_factor": scaling.high_frequency,
        "original_max_position_embeddings": scaling.original_sequence,
    }


def _from_llama(config: dict[str, Any], family: str) -> dict[str, Any]:
    _want(config, "hidden_act", "silu")
    _want(config, "use_sliding_window", False)
    _want(config, "attention_bias", config.get("mlp_bias", False) if family == "llama" else False)
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else None)
    return {
        "layers": config.get("num_hidden_layers"),
        "hidden": config.get("hidden_size"),
        "heads": config.get("num_attention_heads"),
        "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "ffn_hidden": config.get("intermediate_size"),
        "vocab": config.get("vocab_size"),
        "sequence": config.get("max_position_embeddings"),
        "norm_eps": config.get("rms_norm_eps"),
        "rope_base": _number(config.get("rope_theta", rope.get("rope_theta"))),
        "rope_scaling": _scaling(scaling),
        "biases": config.get("attention_bias"),
        "qk_norm": family == "qwen3",
        "tie_embeddings": config.get("tie_word_embeddings", False),
    }


def _from_gpt2(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise UserError(f"config.json: activation_function {config['activation_function']!r} is not GPT-2's")
    _want(config, "scale_attn_by_inverse_layer_idx", False)
    _want(config, "scale_attn_weights", True)
    return {
        "layers": config.get("n_layer"),
        "hidden": config.get("n_embd"),
        "heads": config.get("n_head"),
        "ffn_hidden": config.get("n_inner"),
        "vocab": config.get("vocab_size"),
        "sequence": config.get("n_positions"),
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon"),
        "activation": "gelu",
        "positions": "learned",
        "biases": True,
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _scaling(told: dict[str, Any] | None) -> dict[str, Any] | None:
    kind = (told or {}).get("rope_type") or (told or {}).get("type")
    if told is None or kind == "default":
        return None
    if kind == "linear":
        return {"kind": "linear", "factor": _number(told.get("factor"))}
    if kind == "llama3":
        return {
            "kind": "llama3",
            "factor": _number(told.get("factor")),
            "low_frequency": _number(told.get("low_freq_factor")),
            "high_frequency": _number(told.get("high_freq_factor")),
            "original_sequence": told.get("original_max_position_embeddings"),
        }
    raise UserError(f"config.json: rope_scaling of type {kind!r} is neither linear nor llama3")


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _want(config: dict[str, Any], key: str, value: object) -> None:
    if config.get(key, value) != value:
        raise UserError(f"config.json: {key} {config[key]!r}: the trainer has {value!r} only")
