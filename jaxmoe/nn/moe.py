"""The mixture-of-experts layer: route here, exchange, run the local experts, return, add the shared expert."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxmoe.nn.config import DecoderConfig
from jaxmoe.nn.mlp import SwiGLU
from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.router import Router
from jaxmoe.ops.experts import Activation, experts
from jaxmoe.parallel.exchange import ParallelContext, rank_index


class MoE(nnx.Module):
    """Routed experts in the gather form of expert parallelism, and the shared expert on local rows.

    Each device routes its own rows; ids, weights and rows are gathered over the expert axes; every device applies its
    experts to the rows that chose them; a reduce-scatter sums the parts and returns each row to its device. Nothing
    has a capacity, so nothing is dropped. The shared expert never enters the reduction.
    """

    def __init__(self, config: DecoderConfig, param: ParamFactory):
        """Declares router, experts and the shared expert."""
        moe, embed = config.moe, config.embed
        self.num_experts = moe.router.experts
        self.activation = Activation(kind=moe.activation, limit=moe.limit)
        self.router = Router(config, param)
        count, width = moe.router.experts, moe.expert_ffn
        self.gate = param((count, width, embed), ("experts", "expert_ffn", "embed"), "experts.gate")
        self.up = param((count, width, embed), ("experts", "expert_ffn", "embed"), "experts.up")
        self.down = param((count, embed, width), ("experts", "embed", "expert_ffn"), "experts.down")
        self.has_bias = moe.expert_bias
        if self.has_bias:
            self.gate_bias = param((count, width), ("experts", "expert_ffn"), "experts.bias")
            self.up_bias = param((count, width), ("experts", "expert_ffn"), "experts.bias")
            self.down_bias = param((count, embed), ("experts", "embed"), "experts.bias")
        self.has_shared = moe.shared_ffn > 0
        if self.has_shared:
            self.shared = SwiGLU(embed, moe.shared_ffn, "shared_ffn", "shared", param)

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        real: jax.Array,
        *,
        layer: jax.Array | int,
        parallel: ParallelContext,
    ) -> tuple[Float[Array, "tokens embed"], Int32[Array, "tokens top_k"]]:
        """The layer's output and the logical expert ids of each token.

        Args:
            x: normalised residual stream.
            real: [tokens] bool; padded rows are routed nowhere.
            layer: index into the stack.
            parallel: mesh axes.
        """
        with jax.named_scope("router"):
            ids, weights = self.router(x, layer)
        placement = parallel.placement(self.num_experts)
        slots = jnp.asarray(placement.slot_of_expert())[ids]
        slots = jnp.where(real[:, None], slots, placement.num_slots)
        axes = parallel.expert_axes
        with jax.named_scope("experts"):
            local = parallel.gather_rows(slots, axes) - rank_index(axes) * placement.slots_per_rank
            local = jnp.where((local >= 0) & (local < placement.slots_per_rank), local, -1)
            routed = experts(
                parallel.gather_rows(x, axes),
                local,
                parallel.gather_rows(weights, axes),
                self.gate[...],
                self.up[...],
                self.down[...],
                layer=layer,
                total_experts=self.num_experts,
                activation=self.activation,
                biases=(self.gate_bias[...], self.up_bias[...], self.down_bias[...]) if self.has_bias else None,
            )
            out = parallel.reduce_rows(routed, axes)
        if self.has_shared:
            with jax.named_scope("shared_expert"):
                out = out + self.shared(x, layer).astype(jnp.float32)
        return out.astype(x.dtype), ids
