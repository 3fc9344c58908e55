"""Tensor names that families share, and the rules of a whole decoder made from them.

`Names` map a parameter's path inside its stack to the ways in which checkpoints name it inside their layer, the
released way first. `family_rules` puts stacks and layers before them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxmoe.models.family import Hub, TensorRule, View, rule

Names = Mapping[str, tuple[Hub, ...]]
"""Path inside a stack -> names inside a layer."""

LAYER = "model.layers.{layer}"
_PARTS = ("gate", "up", "down")


def named(names: Mapping[str, str | tuple[str, ...]]) -> Names:
    """Names of whole tensors."""
    return {
        path: tuple(Hub(name=hub) for hub in ((hubs,) if isinstance(hubs, str) else hubs))
        for path, hubs in names.items()
    }


def named_alike(pattern: str, parts: Mapping[str, str], *hubs: str) -> Names:
    """Names that follow one pattern: each part in `pattern`, its own word in each of `hubs`.

    Args:
        pattern: path with `{}`.
        parts: what stands for `{}` in a path -> what stands for it in a name.
        hubs: names with `{}`.
    """
    return named({pattern.format(path): tuple(hub.replace("{}", word) for hub in hubs) for path, word in parts.items()})


def plain(word: str) -> dict[str, str]:
    """gate, up and down with a common suffix, such as `gate_proj`."""
    return {part: f"{part}{word}" for part in _PARTS}


def swiglu(path: str, *hubs: str) -> Names:
    """A dense feed-forward or a shared expert, named `hub`.gate_proj.weight and so on."""
    return named_alike(f"{path}.{{}}", plain("_proj"), *(f"{hub}.{{}}.weight" for hub in hubs))


def experts(hub: str = "mlp.experts", parts: Mapping[str, str] | None = None) -> Names:
    """Routed experts, one tensor each; w1, w3, w2 are gate, up, down where `parts` says so."""
    return named_alike("ffn.{}", parts or plain("_proj"), f"{hub}.{{expert}}.{{}}.weight")


NORMS = named(
    {
        "attention_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
    }
)

GROUPED_QUERY: Names = {
    **NORMS,
    **named({f"attention.{part}": f"self_attn.{part}_proj.weight" for part in "qkvo"}),
    **named({f"attention.{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkvo"}),
    **named({f"attention.{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}),
}

LATENT: Names = {
    **NORMS,
    **named(
        {
            "attention.q": "self_attn.q_proj.weight",
            "attention.q_a": "self_attn.q_a_proj.weight",
            "attention.q_a_norm.weight": "self_attn.q_a_layernorm.weight",
            "attention.q_b": "self_attn.q_b_proj.weight",
            "attention.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
            "attention.kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
            "attention.kv_b": "self_attn.kv_b_proj.weight",
            "attention.o": "self_attn.o_proj.weight",
        }
    ),
}

INDEXER: Names = named(
    {
        "q": "self_attn.indexer.wq_b.weight",
        "k": "self_attn.indexer.wk.weight",
        "k_norm.weight": "self_attn.indexer.k_norm.weight",
        "k_norm.bias": "self_attn.indexer.k_norm.bias",
        "weights": "self_attn.indexer.weights_proj.weight",
    }
)

DENSE = swiglu("ffn", "mlp")
ROUTER = named({"ffn.router.weight": "mlp.gate.weight"})
CORRECTED_ROUTER: Names = {**ROUTER, **named({"ffn.router.bias": "mlp.gate.e_score_correction_bias"})}
SPARSE: Names = {**CORRECTED_ROUTER, **experts(), **swiglu("ffn.shared", "mlp.shared_experts")}
"""Experts, router and shared expert as DeepSeek-V3 and its followers name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Names of a multi-token-prediction block."""

    names: Names
    """Its own parameters; those of the transformer block in it are those of an expert layer."""
    layer: str = LAYER


COPYING = Prediction(
    names=named(
        {
            "embed_norm.weight": "enorm.weight",
            "hidden_norm.weight": "hnorm.weight",
            "projection": "eh_proj.weight",
            "norm.weight": "shared_head.norm.weight",
            "embed": "embed_tokens.weight",
            "head": "shared_head.head.weight",
        }
    )
)
"""DeepSeek-V3 and GLM: the block carries copies of embedding and head."""

SHARING = Prediction(
    names=named(
        {
            "embed_norm.weight": "enorm.weight",
            "hidden_norm.weight": "hnorm.weight",
            "projection": "eh_proj.weight",
            "norm.weight": "final_layernorm.weight",
        }
    )
)
"""Hy: the block uses the model's embedding and head."""


def family_rules(
    *,
    moe: Names,
    dense: Names | None = None,
    indexer: Names | None = None,
    prediction: Prediction | None = None,
    layers: tuple[str, ...] = (LAYER,),
    model: Mapping[str, tuple[str, ...]] | None = None,
) -> tuple[TensorRule, ...]:
    """The rules of a decoder.

    Args:
        moe: names of an expert layer, attention and norms included.
        dense: names of a dense layer; None: the family has none.
        indexer: names of an indexer; None: the family has none.
        prediction: names of multi-token-prediction blocks; None: the family has none.
        layers: ways to name a layer, the released one first.
        model: names of what is outside the layers; by default those of most families.
    """
    outside = {
        "embed.weight": ("model.embed_tokens.weight",),
        "norm.weight": ("model.norm.weight",),
        "head.weight": ("lm_head.weight",),
        **(model or {}),
    }
    rules = [rule(path, *names) for path, names in outside.items()]
    rules += _placed("moe", moe, layers)
    rules += _placed("dense", dense or {}, layers)
    rules += _placed("indexer", indexer or {}, layers)
    if prediction is not None:
        rules += _placed("mtp", prediction.names, (prediction.layer,))
        rules += _placed("mtp.block", moe, (prediction.layer,))
        rules += _placed("mtp.indexer", indexer or {}, (prediction.layer,))
    return tuple(rules)


def fused(name: str, part: int, *, interleaved: bool = False, transposed: bool = False) -> Hub:
    """Gate (part 0) or up (part 1) of a tensor that holds both."""
    return Hub(name=name, view=View(start=part, parts=2, interleaved=interleaved, transposed=transposed))


def _placed(stack: str, names: Names, layers: tuple[str, ...]) -> Iterator[TensorRule]:
    for path, hubs in names.items():
        placed = (Hub(name=f"{layer}.{hub.name}", view=hub.view) for hub in hubs for layer in layers)
        yield TensorRule(path=f"{stack}.{path}", hubs=tuple(placed))
