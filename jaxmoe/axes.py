"""The vocabulary of axes: the same words in parameters, array signatures and sharding plans.

`WEIGHT_AXES` name dimensions of parameters, `DATA_AXES` those of the step's arrays. A sharding plan must have one
rule for each axis in `RULED_AXES`; the others are never split.
"""

from typing import Final

WEIGHT_AXES: Final[dict[str, str]] = {
    "layers": "equal blocks of a stack; never split",
    "vocab": "rows of the embedding and of the output head",
    "embed": "the residual stream; never split",
    "q_heads": "query heads times head_dim, outputs of q_proj, inputs of o_proj",
    "kv_heads": "key and value heads times head_dim, outputs of k_proj and v_proj",
    "head_dim": "one attention head; never split",
    "experts": "routed experts",
    "expert_ffn": "hidden width of one routed expert",
    "shared_ffn": "hidden width of the shared expert",
    "ffn": "hidden width of a dense feed-forward layer",
    "router_experts": "outputs of the routing matrix: logical experts, on every device",
    "groups": "quantisation groups along a weight's input axis",
}

DATA_AXES: Final[dict[str, str]] = {
    "tokens": "rows of a step: one new token each",
    "rows": "sequences of a step",
    "pages": "pages of the key-value cache",
    "page": "token slots of one page; never split",
    "top_k": "experts chosen for one token; never split",
}

RULED_AXES: Final[frozenset[str]] = frozenset({"tokens", "pages", "experts", "vocab"})
"""Axes that a sharding plan must give a rule for (an empty list means: replicated)."""

AXES: Final[dict[str, str]] = {**WEIGHT_AXES, **DATA_AXES}
