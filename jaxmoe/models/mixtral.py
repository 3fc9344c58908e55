"""mixtral: Mixtral-8x7B, 8x22B. Source: transformers models/mixtral (5.24.0)."""

from jaxmoe.models.attention_config import read_attention
from jaxmoe.models.common_config import expect_plain, read_decoder
from jaxmoe.models.family import ConfigReader, Family
from jaxmoe.models.names import GROUPED_QUERY, experts, family_rules, named
from jaxmoe.nn.config import DecoderConfig, MoEConfig, RouterConfig


def _read_config(reader: ConfigReader) -> DecoderConfig:
    expect_plain(reader)
    window = None if reader.take("sliding_window", int, None) is None else reader.positive("sliding_window")
    router = RouterConfig(
        experts=reader.positive(reader.spelling("num_local_experts", "num_experts")),
        top_k=reader.positive("num_experts_per_tok"),
        score="softmax",
    )
    return read_decoder(
        reader,
        family="mixtral",
        attention=read_attention(
            reader,
            kv_required=False,
            windows=() if window is None else (window,) * reader.positive("num_hidden_layers"),
        ),
        moe=MoEConfig(router=router, expert_ffn=reader.positive("intermediate_size"), shared_ffn=0),
    )


FAMILY = Family(
    name="mixtral",
    read_config=_read_config,
    tensors=family_rules(
        moe={
            **GROUPED_QUERY,
            **named({"ffn.router.weight": "block_sparse_moe.gate.weight"}),
            **experts("block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
        }
    ),
)
