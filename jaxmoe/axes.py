"""The vocabulary of axes: the same words in parameters, array signatures and sharding plans.

`WEIGHT_AXES` name dimensions of parameters, `DATA_AXES` those of the step's arrays. `RULES` are what a sharding plan
decides; `RULE_OF_AXIS` says which rule splits an axis; axes that are not in it are never split.
"""

from typing import Final

WEIGHT_AXES: Final[dict[str, str]] = {
    "layers": "equal blocks of a stack; never split",
    "vocab": "rows of the embedding and of the output head",
    "embed": "the residual stream; never split",
    "q_heads": "query heads times their width: outputs of q_proj, q_b_proj, kv_b_proj and gates, sinks",
    "kv_heads": "key and value heads times head_dim, outputs of k_proj and v_proj",
    "attention_out": "outputs of o_proj, split instead of its inputs so that no sum crosses devices",
    "heads_in": "inputs of o_proj; never split",
    "head_dim": "one attention head; never split",
    "q_lora": "query latent; never split",
    "kv_lora": "key-value latent; never split",
    "index_heads": "heads of the indexer times their width; never split",
    "experts": "routed experts",
    "expert_ffn": "hidden width of one routed expert",
    "shared_ffn": "hidden width of the shared expert",
    "ffn": "hidden width of a dense feed-forward layer",
    "router_experts": "outputs of the routing matrix: logical experts, on every device",
    "groups": "quantisation groups along a weight's input axis",
    "streams": "residual streams of hyper-connections and what is computed from them; never split",
    "embed_pair": "two residual vectors side by side, inputs of a multi-token-prediction block; never split",
}

DATA_AXES: Final[dict[str, str]] = {
    "tokens": "rows of a step: one new token each",
    "rows": "sequences of a step",
    "pages": "pages of the key-value cache",
    "page": "token slots of one page; never split",
    "latent": "the one head of a cache that all query heads share; never split",
    "top_k": "experts chosen for one token; never split",
}

RULES: Final[dict[str, str]] = {
    "tokens": "rows of a step and residual stream",
    "pages": "key-value pages, alike `tokens`: each part has a pool of its own",
    "experts": "routed experts",
    "vocab": "embedding and head",
    "heads": "attention heads (tensor parallelism), over mesh axes that do not split tokens",
}

RULE_OF_AXIS: Final[dict[str, str]] = {
    "tokens": "tokens",
    "rows": "tokens",
    "pages": "pages",
    "experts": "experts",
    "vocab": "vocab",
    "q_heads": "heads",
    "kv_heads": "heads",
    "attention_out": "heads",
}

AXES: Final[dict[str, str]] = {**WEIGHT_AXES, **DATA_AXES}
