"""dots1: dots.llm1. Source: transformers models/dots1 (5.24.0)."""

from jaxmoe.models.attention_config import read_attention, read_windows
from jaxmoe.models.common_config import expect_plain, read_decoder, read_dense_layers, read_moe, read_sigmoid_router
from jaxmoe.models.family import ConfigReader, Family
from jaxmoe.models.names import DENSE, GROUPED_QUERY, SPARSE, family_rules
from jaxmoe.nn.config import DecoderConfig


def _read_config(reader: ConfigReader) -> DecoderConfig:
    expect_plain(reader)
    bias = reader.take("attention_bias", bool, False)
    layers = reader.positive("num_hidden_layers")
    # Without a list, layers from max_window_layers on slide where there is a window at all.
    first = reader.count("max_window_layers", 62)
    first = layers if reader.take("sliding_window", int, None) is None else first
    kinds = tuple("sliding_attention" if layer >= first else "full_attention" for layer in range(layers))
    return read_decoder(
        reader,
        family="dots1",
        dense_layers=read_dense_layers(reader),
        attention=read_attention(
            reader,
            kv_required=False,
            bias=bias,
            out_bias=bias,
            qk_norm="before_rope",
            windows=read_windows(reader, kinds),
        ),
        # Its code base calls the router by the name of the selection method.
        moe=read_moe(reader, read_sigmoid_router(reader, scaling_default=1.0, scoring=("sigmoid", "noaux_tc"))),
    )


FAMILY = Family(
    name="dots1",
    read_config=_read_config,
    tensors=family_rules(dense={**GROUPED_QUERY, **DENSE}, moe={**GROUPED_QUERY, **SPARSE}),
)
