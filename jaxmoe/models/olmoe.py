"""olmoe: OLMoE-1B-7B. Source: transformers models/olmoe (5.24.0)."""

from jaxmoe.models.attention_config import read_attention
from jaxmoe.models.common_config import expect_plain, read_decoder, softmax_router
from jaxmoe.models.family import ConfigReader, Family
from jaxmoe.models.names import GROUPED_QUERY, ROUTER, experts, family_rules
from jaxmoe.nn.config import DecoderConfig, MoEConfig


def _read_config(reader: ConfigReader) -> DecoderConfig:
    expect_plain(reader)
    reader.expect("clip_qkv")
    bias = reader.take("attention_bias", bool, False)
    router = softmax_router(reader)
    return read_decoder(
        reader,
        family="olmoe",
        attention=read_attention(reader, kv_required=False, bias=bias, out_bias=bias, qk_norm="flat"),
        moe=MoEConfig(router=router, expert_ffn=reader.positive("intermediate_size"), shared_ffn=0),
    )


FAMILY = Family(
    name="olmoe",
    read_config=_read_config,
    tensors=family_rules(moe={**GROUPED_QUERY, **ROUTER, **experts()}),
)
