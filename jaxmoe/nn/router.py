"""Expert choice in float32: softmax (R1, R3, R4), sigmoid with correction bias and groups (R2), top logits (R6)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32
from numpy import float32

from jaxmoe.nn.config import DecoderConfig, RouterConfig
from jaxmoe.nn.param import ParamFactory
from jaxmoe.ops.linear import linear


def choose_experts(
    logits: Float32[Array, "tokens experts"], bias: Float32[Array, " experts"] | None, config: RouterConfig
) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
    """Logical expert ids and combine weights; of equal scores the smaller id wins.

    Source: DeepSeek-V3 (arXiv 2412.19437) equations 13 to 16 for the biased choice and the groups.
    """
    if config.score == "logits":
        best, ids = lax.top_k(logits, config.top_k)
        return ids.astype(jnp.int32), jax.nn.softmax(best, axis=-1)
    scores = jax.nn.softmax(logits, axis=-1) if config.score == "softmax" else jax.nn.sigmoid(logits)
    chosen_by = scores if bias is None else scores + bias[None, :]
    if config.groups > 1:
        grouped = chosen_by.reshape(chosen_by.shape[0], config.groups, -1)
        ranked_by = 2 if config.group_score == "top2" else 1
        group_score = jnp.sum(lax.top_k(grouped, ranked_by)[0], axis=-1)
        _, best_groups = lax.top_k(group_score, config.topk_groups)
        kept = jnp.any(best_groups[:, :, None] == jnp.arange(config.groups)[None, None, :], axis=1)
        chosen_by = jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(chosen_by.shape)
    _, ids = lax.top_k(chosen_by, config.top_k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if config.renormalize:
        total = jnp.sum(weights, axis=-1, keepdims=True) + float32(config.epsilon)
        weights = weights / jnp.maximum(total, float32(config.least_sum))
    return ids.astype(jnp.int32), weights * float32(config.scaling)


class Router(nnx.Module):
    """The routing matrix, its own bias and the correction bias, all kept in float32."""

    def __init__(self, config: DecoderConfig, param: ParamFactory):
        """Declares the matrix [experts, embed]; logical experts, never split."""
        self.config = config.moe.router
        self.weight = param((self.config.experts, config.embed), ("router_experts", "embed"), "router", float32=True)
        if self.config.correction_bias:
            self.bias = param((self.config.experts,), ("router_experts",), "router.bias", float32=True)
        if self.config.logit_bias:
            self.logit_bias = param((self.config.experts,), ("router_experts",), "router.bias", float32=True)

    def __call__(
        self, x: Float[Array, "tokens embed"], layer: jax.Array | int
    ) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
        """Ids and weights for each token."""
        logit_bias = self.logit_bias[...] if self.config.logit_bias else None
        logits = linear(x.astype(jnp.float32), self.weight[...], layer=layer, bias=logit_bias)
        bias = self.bias[...][layer] if self.config.correction_bias else None
        return choose_experts(logits, bias, self.config)
