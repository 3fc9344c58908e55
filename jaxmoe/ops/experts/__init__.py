"""experts: the routed feed-forward layer of the experts that live here, from chosen ids to the weighted sum.

Contract
    x            [tokens, embed] float.
    expert_ids   [tokens, top_k] int32, ids of *local* expert slots; an id outside 0..experts-1 means 'not here' (or a
                 padded row) and contributes nothing. The ids of one token are distinct.
    weights      [tokens, top_k] float32.
    gate, up     Array or QArray [layers, experts, expert_ffn, embed];  down [layers, experts, embed, expert_ffn].
    biases       of gate, up and down, [layers, experts, width] float each, or none at all.
    result       [tokens, embed] float32: for each token, in the order of its top_k slots, the sum of
                 weight * (down(activation(gate(x) + gate_bias, up(x) + up_bias)) + down_bias); products as in `linear`
                 (W8A8 and W4A8 quantise x per token, and the hidden row, cast to x's dtype, per token again), biases
                 and the activation in float32. Rows do not depend on each other.
"""

from jaxtyping import Array, Float, Float32, Int, Int32

from jaxmoe.ops import dispatch
from jaxmoe.ops.experts import xla
from jaxmoe.ops.experts.activation import SWIGLU, Activation
from jaxmoe.quant.qarray import Weight

__all__ = ["IMPLS", "SWIGLU", "Activation", "Biases", "experts"]

Biases = tuple[
    Float[Array, "layers experts expert_ffn"],
    Float[Array, "layers experts expert_ffn"],
    Float[Array, "layers experts embed"],
]
"""Of the gate, up and down projections."""

IMPLS = (xla.IMPL,)


def experts(
    x: Float[Array, "tokens embed"],
    expert_ids: Int32[Array, "tokens top_k"],
    weights: Float32[Array, "tokens top_k"],
    gate: Weight,
    up: Weight,
    down: Weight,
    *,
    layer: Int[Array, ""] | int,
    total_experts: int,
    activation: Activation = SWIGLU,
    biases: Biases | None = None,
    impl: str | None = None,
) -> Float32[Array, "tokens embed"]:
    """Applies the local experts that each token chose and sums their weighted outputs.

    Args:
        x: activations.
        expert_ids: local slots, out of range where the expert is elsewhere.
        weights: combine weights.
        gate: stack of gate projections.
        up: stack of up projections.
        down: stack of down projections.
        layer: index into the stacks.
        total_experts: experts of the model over all devices; sizes the tiles (the mean load), nothing else.
        activation: what stands between the projections.
        biases: stacks of the projections' biases.
        impl: name of one implementation; None takes the first that does not refuse.

    Raises:
        ValueError: shapes do not match.
        UnsupportedError: no implementation accepts the arguments.
    """
    if (
        gate.ndim != 4
        or gate.shape != up.shape
        or gate.shape[-1] != x.shape[-1]
        or down.shape != (*gate.shape[:2], *gate.shape[:1:-1])
    ):
        raise ValueError(
            f"experts: x {list(x.shape)}, gate {list(gate.shape)}, up {list(up.shape)} and down {list(down.shape)} "
            "do not fit together"
        )
    if biases is not None and tuple(bias.shape for bias in biases) != (gate.shape[:-1], up.shape[:-1], down.shape[:-1]):
        raise ValueError(
            f"experts: biases {', '.join(str(list(bias.shape)) for bias in biases)} do not fit gate "
            f"{list(gate.shape)}, up {list(up.shape)} and down {list(down.shape)}"
        )
    if expert_ids.shape != weights.shape or expert_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"experts: expert_ids {list(expert_ids.shape)} and weights {list(weights.shape)} do not fit {x.shape[0]} "
            "tokens"
        )
    arguments = (x, expert_ids, weights, gate, up, down)
    options = {"layer": layer, "total_experts": total_experts, "activation": activation, "biases": biases}
    choice = dispatch.choose("experts", IMPLS, impl, *arguments, **options)
    return choice.impl.run(*arguments, **options)
