"""qwen3_moe: Qwen3-30B-A3B, 235B-A22B, Coder. Source: transformers models/qwen3_moe (5.24.0)."""

from jaxmoe.models.attention_config import read_attention
from jaxmoe.models.common_config import expect_plain, read_decoder, softmax_router
from jaxmoe.models.family import ConfigReader, Family
from jaxmoe.models.names import GROUPED_QUERY, ROUTER, experts, family_rules
from jaxmoe.nn.config import DecoderConfig, MoEConfig


def _read_config(reader: ConfigReader) -> DecoderConfig:
    # A window acts only with use_sliding_window, which no release sets.
    expect_plain(reader, "max_window_layers", "sliding_window")
    reader.expect("use_sliding_window", False)
    reader.expect("decoder_sparse_step", 1)
    reader.expect("mlp_only_layers", [])
    # The Coder's file says what the others leave unsaid.
    reader.expect("qkv_bias", False)
    reader.expect("use_qk_norm", True)
    reader.expect("shared_expert_intermediate_size", 0)
    bias = reader.take("attention_bias", bool, False)
    router = softmax_router(reader)
    return read_decoder(
        reader,
        family="qwen3_moe",
        attention=read_attention(reader, bias=bias, out_bias=bias, qk_norm="before_rope"),
        moe=MoEConfig(router=router, expert_ffn=reader.positive("moe_intermediate_size"), shared_ffn=0),
    )


FAMILY = Family(
    name="qwen3_moe",
    read_config=_read_config,
    tensors=family_rules(moe={**GROUPED_QUERY, **ROUTER, **experts()}),
)
