"""ernie4_5_moe: ERNIE-4.5-21B-A3B. Source: transformers models/ernie4_5_moe (5.24.0)."""

from jaxmoe.errors import UnsupportedError
from jaxmoe.models.attention_config import read_attention
from jaxmoe.models.common_config import expect_plain, read_decoder
from jaxmoe.models.family import ConfigReader, Family, Hub, View
from jaxmoe.models.names import DENSE, GROUPED_QUERY, ROUTER, experts, family_rules, swiglu
from jaxmoe.nn.config import DecoderConfig, MoEConfig, RouterConfig

_CORRECTION_BIAS = (
    Hub(name="mlp.moe_statics.e_score_correction_bias", view=View(unit_axis=True)),
    Hub(name="mlp.gate.e_score_correction_bias"),
)
"""The release has a leading axis of one; our own checkpoints name it as most families do."""


def _read_config(reader: ConfigReader) -> DecoderConfig:
    layers = reader.positive("num_hidden_layers")
    # transformers does not run the multi-token-prediction part, and this project does not either.
    expect_plain(reader, "moe_capacity", "num_nextn_predict_layers")
    reader.expect("use_bias", False)
    reader.expect("use_rmsnorm", True)
    reader.expect("is_quantized", False)
    reader.expect("moe_layer_interval", 1)
    reader.expect("moe_gate", "topk")
    reader.expect("moe_gate_act")
    reader.expect("moe_use_aux_free", True)
    last = reader.take("moe_layer_end_index", int, -1)
    if last not in (-1, layers - 1):
        raise UnsupportedError(
            f"{reader.where}: moe_layer_end_index = {last} leaves dense layers at the end of {layers}; only leading "
            "dense layers are supported"
        )
    width = reader.positive("moe_intermediate_size")
    router = RouterConfig(
        experts=reader.positive(reader.spelling("moe_num_experts", "num_experts")),
        top_k=reader.positive(reader.spelling("moe_k", "num_experts_per_tok")),
        score="softmax",
        correction_bias=True,
        least_sum=reader.positive_number("moe_norm_min", 1e-12),
    )
    return read_decoder(
        reader,
        family="ernie4_5_moe",
        dense_layers=min(reader.count("moe_layer_start_index"), layers),
        attention=read_attention(reader, interleaved=True),
        moe=MoEConfig(router=router, expert_ffn=width, shared_ffn=width * reader.count("moe_num_shared_experts")),
        tied_default=True,
    )


FAMILY = Family(
    name="ernie4_5_moe",
    read_config=_read_config,
    tensors=family_rules(
        dense={**GROUPED_QUERY, **DENSE},
        moe={
            **GROUPED_QUERY,
            **ROUTER,
            "ffn.router.bias": _CORRECTION_BIAS,
            **experts(),
            **swiglu("ffn.shared", "mlp.shared_experts"),
        },
    ),
    ignored=r"model\.mtp_.*",
)
