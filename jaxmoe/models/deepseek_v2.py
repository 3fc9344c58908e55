"""deepseek_v2: DeepSeek-V2, V2.5, V2-Lite. Source: transformers models/deepseek_v2 (5.24.0)."""

from jaxmoe.models.common_config import expect_plain, read_decoder, read_dense_layers, read_moe
from jaxmoe.models.family import ConfigReader, Family
from jaxmoe.models.latent_config import read_latent
from jaxmoe.models.names import DENSE, LATENT, SPARSE, family_rules
from jaxmoe.nn.config import DecoderConfig, RouterConfig


def _read_router(reader: ConfigReader) -> RouterConfig:
    reader.expect("scoring_func", "softmax")
    reader.expect("moe_layer_freq", 1)
    reader.expect("topk_method", "greedy", "group_limited_greedy")
    # The reference never renormalises; DeepSeek's own code would, and would leave the scaling out. No release asks.
    reader.expect("norm_topk_prob", False)
    grouped = reader.take("topk_method", str) == "group_limited_greedy"
    if not grouped:
        # Greedy choice does not read the groups that files name all the same.
        reader.ignore("n_group", "topk_group")
    return RouterConfig(
        experts=reader.positive(reader.spelling("n_routed_experts", "num_experts")),
        top_k=reader.positive("num_experts_per_tok"),
        score="softmax",
        groups=reader.positive("n_group") if grouped else 1,
        topk_groups=reader.positive("topk_group") if grouped else 1,
        group_score="max",
        renormalize=False,
        scaling=reader.positive_number("routed_scaling_factor"),
    )


def _read_config(reader: ConfigReader) -> DecoderConfig:
    expect_plain(reader)
    return read_decoder(
        reader,
        family="deepseek_v2",
        dense_layers=read_dense_layers(reader),
        attention=read_latent(reader),
        moe=read_moe(reader, _read_router(reader)),
    )


FAMILY = Family(
    name="deepseek_v2",
    read_config=_read_config,
    tensors=family_rules(dense={**LATENT, **DENSE}, moe={**LATENT, **SPARSE}),
)
