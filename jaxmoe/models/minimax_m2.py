"""minimax_m2: MiniMax-M2. Source: transformers models/minimax_m2 (5.24.0) and the keys of the released config.json."""

from jaxmoe.errors import ConfigError
from jaxmoe.models.attention_config import read_attention
from jaxmoe.models.common_config import expect_plain, read_decoder
from jaxmoe.models.family import ConfigReader, Family
from jaxmoe.models.names import GROUPED_QUERY, experts, family_rules, named
from jaxmoe.nn.config import DecoderConfig, MoEConfig, RouterConfig

_UNUSED = (
    "mlp_intermediate_size",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "shared_moe_mode",
    "use_mtp",
)
"""Keys of parts that the released files name and the released weights have not."""


def _read_config(reader: ConfigReader) -> DecoderConfig:
    layers = reader.positive("num_hidden_layers")
    expect_plain(reader, *_UNUSED)
    reader.expect("attn_type_list", [1] * layers)
    reader.expect("qk_norm_type", "per_layer")
    reader.expect("scoring_func", "sigmoid")
    reader.expect("shared_intermediate_size", 0)
    reader.expect("attention_bias", False)
    reader.expect("sliding_window")
    for key in ("use_qk_norm", "use_routing_bias"):
        reader.expect(key, True)
    # Factors on the residual stream, from the family's ancestor.
    for part in ("full_attention", "linear_attention", "mlp"):
        for factor in ("alpha", "beta"):
            reader.expect(f"layernorm_{part}_{factor}", 1)
    router = RouterConfig(
        experts=reader.positive(reader.spelling("num_local_experts", "num_experts")),
        top_k=reader.positive("num_experts_per_tok"),
        score="sigmoid",
        correction_bias=True,
    )
    # The releases name the rotated dims instead of their share.
    rotary_dim = None if reader.take("rotary_dim", int, None) is None else reader.positive("rotary_dim")
    share = 1.0 if rotary_dim is None else rotary_dim / reader.positive("head_dim")
    attention = read_attention(reader, qk_norm="flat", partial_default=share)
    if rotary_dim not in (None, attention.rope.rotary_dim):
        raise ConfigError(
            f"{reader.where}: rotary_dim is {rotary_dim}, but partial_rotary_factor gives {attention.rope.rotary_dim}"
        )
    return read_decoder(
        reader,
        family="minimax_m2",
        attention=attention,
        moe=MoEConfig(router=router, expert_ffn=reader.positive("intermediate_size"), shared_ffn=0),
    )


FAMILY = Family(
    name="minimax_m2",
    read_config=_read_config,
    tensors=family_rules(
        moe={
            **GROUPED_QUERY,
            **named(
                {
                    "ffn.router.weight": "block_sparse_moe.gate.weight",
                    "ffn.router.bias": "block_sparse_moe.e_score_correction_bias",
                }
            ),
            **experts("block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
        }
    ),
)
