"""glm4_moe: GLM-4.5, 4.6, 4.7, 4.5-Air and the demo model. Source: transformers models/glm4_moe (5.24.0)."""

from jaxmoe.models.attention_config import read_attention
from jaxmoe.models.common_config import (
    expect_plain,
    read_decoder,
    read_dense_layers,
    read_moe,
    read_mtp_layers,
    read_sigmoid_router,
)
from jaxmoe.models.family import ConfigReader, Family
from jaxmoe.models.names import COPYING, DENSE, GROUPED_QUERY, SPARSE, family_rules
from jaxmoe.nn.config import DecoderConfig


def _read_config(reader: ConfigReader) -> DecoderConfig:
    expect_plain(reader)
    return read_decoder(
        reader,
        family="glm4_moe",
        dense_layers=read_dense_layers(reader),
        attention=read_attention(
            reader,
            bias=reader.take("attention_bias", bool, False),
            qk_norm="before_rope" if reader.take("use_qk_norm", bool, False) else "none",
            partial_default=0.5,
        ),
        moe=read_moe(reader, read_sigmoid_router(reader, scaling_default=1.0)),
        mtp_layers=read_mtp_layers(reader),
        mtp_copies=True,
    )


FAMILY = Family(
    name="glm4_moe",
    read_config=_read_config,
    tensors=family_rules(dense={**GROUPED_QUERY, **DENSE}, moe={**GROUPED_QUERY, **SPARSE}, prediction=COPYING),
)
