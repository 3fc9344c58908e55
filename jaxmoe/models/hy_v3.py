"""hy_v3: Hy3. Source: transformers models/hy_v3 (5.24.0) and the keys of the released config.json."""

from jaxmoe.models.attention_config import read_attention
from jaxmoe.models.common_config import expect_plain, read_decoder, read_dense_layers, read_mtp_layers
from jaxmoe.models.family import ConfigReader, Family
from jaxmoe.models.names import DENSE, GROUPED_QUERY, SHARING, experts, family_rules, named, swiglu
from jaxmoe.nn.config import DecoderConfig, MoEConfig, RouterConfig

_PRECISION = (
    "enable_attention_fp32_softmax",
    "enable_lm_head_fp32",
    "enable_moe_fp32_combine",
    "use_grouped_mm",
)
"""Switches between float32 and the model's dtype, and between kernels, of another implementation."""


def _read_config(reader: ConfigReader) -> DecoderConfig:
    expect_plain(reader, "eod_token_id", *_PRECISION)
    reader.expect("mlp_bias", False)
    for key in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        reader.expect(key, True)
    bias = reader.take("attention_bias", bool, False)
    # The releases name the width twice.
    width = reader.positive(reader.spelling("moe_intermediate_size", "expert_hidden_dim"))
    router = RouterConfig(
        experts=reader.positive(reader.spelling("num_experts", "num_local_experts")),
        top_k=reader.positive("num_experts_per_tok"),
        score="sigmoid",
        correction_bias=True,
        epsilon=1e-20,
        scaling=reader.positive_number("router_scaling_factor"),
    )
    return read_decoder(
        reader,
        family="hy_v3",
        dense_layers=read_dense_layers(reader, 1),
        attention=read_attention(reader, bias=bias, out_bias=bias, qk_norm="before_rope"),
        moe=MoEConfig(router=router, expert_ffn=width, shared_ffn=width * reader.count("num_shared_experts")),
        mtp_layers=read_mtp_layers(reader),
    )


FAMILY = Family(
    name="hy_v3",
    read_config=_read_config,
    tensors=family_rules(
        dense={**GROUPED_QUERY, **DENSE},
        moe={
            **GROUPED_QUERY,
            **named({"ffn.router.weight": "mlp.router.gate.weight", "ffn.router.bias": "mlp.expert_bias"}),
            **experts(),
            **swiglu("ffn.shared", "mlp.shared_mlp"),
        },
        prediction=SHARING,
    ),
)
