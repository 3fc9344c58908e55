"""Tensor names that most families share."""

from jaxmoe.models.family import TensorRule

_LAYER = "model.layers.{layer}"


def decoder_rules() -> tuple[TensorRule, ...]:
    """Embedding, final norm, head."""
    return (
        TensorRule(path="embed.weight", hub="model.embed_tokens.weight"),
        TensorRule(path="norm.weight", hub="model.norm.weight"),
        TensorRule(path="head.weight", hub="lm_head.weight"),
    )


def block_rules(stack: str, *, q_norm: str, k_norm: str) -> tuple[TensorRule, ...]:
    """Norms and attention of one stack."""
    names = {
        "attention_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "attention.q_norm.weight": f"self_attn.{q_norm}.weight",
        "attention.k_norm.weight": f"self_attn.{k_norm}.weight",
        **{f"attention.{p}": f"self_attn.{p}_proj.weight" for p in "qkvo"},
        **{f"attention.{p}_bias": f"self_attn.{p}_proj.bias" for p in "qkv"},
    }
    return tuple(TensorRule(path=f"{stack}.{path}", hub=f"{_LAYER}.{hub}") for path, hub in names.items())


def swiglu_rules(path: str, hub: str) -> tuple[TensorRule, ...]:
    """A dense feed-forward or a shared expert."""
    return tuple(
        TensorRule(path=f"{path}.{part}", hub=f"{_LAYER}.{hub}.{part}_proj.weight") for part in ("gate", "up", "down")
    )


def moe_rules(path: str) -> tuple[TensorRule, ...]:
    """Routed experts, one tensor each."""
    return tuple(
        TensorRule(path=f"{path}.{part}", hub=f"{_LAYER}.mlp.experts.{{expert}}.{part}_proj.weight")
        for part in ("gate", "up", "down")
    )
