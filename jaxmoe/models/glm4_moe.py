"""glm4_moe: GLM-4.5, 4.6, 4.7, 4.5-Air and the demo model. Source: transformers models/glm4_moe (5.24.0)."""

from jaxmoe.models.family import IGNORED_KEYS, ConfigReader, Family, TensorRule
from jaxmoe.models.names import block_rules, decoder_rules, moe_rules, swiglu_rules
from jaxmoe.models.rope_config import read_rope
from jaxmoe.nn.config import AttentionConfig, DecoderConfig, MoEConfig, RouterConfig


def _read_config(reader: ConfigReader) -> DecoderConfig:
    head_count = reader.positive("num_attention_heads")
    embed = reader.positive("hidden_size")
    head_dim = reader.positive("head_dim", embed // head_count)
    layers = reader.positive("num_hidden_layers")
    expert_ffn = reader.positive("moe_intermediate_size")
    reader.expect("hidden_act", "silu")
    reader.expect("attention_dropout", 0, 0.0)
    # Multi-token-prediction layers follow the last block in the checkpoint; they do not change this forward pass.
    reader.ignore(*IGNORED_KEYS, "num_nextn_predict_layers", "num_mtp_layers")
    return DecoderConfig(
        family="glm4_moe",
        vocab=reader.positive("vocab_size"),
        embed=embed,
        layers=layers,
        dense_layers=min(reader.count("first_k_dense_replace"), layers),
        ffn=reader.positive("intermediate_size"),
        attention=AttentionConfig(
            heads=head_count,
            kv_heads=reader.positive("num_key_value_heads"),
            head_dim=head_dim,
            rope=read_rope(reader, head_dim, partial_default=0.5),
            bias=reader.take("attention_bias", bool, False),
            qk_norm="before_rope" if reader.take("use_qk_norm", bool, False) else "none",
        ),
        moe=MoEConfig(
            router=RouterConfig(
                experts=reader.positive("n_routed_experts"),
                top_k=reader.positive("num_experts_per_tok"),
                score="sigmoid",
                correction_bias=True,
                groups=reader.positive("n_group", 1),
                topk_groups=reader.positive("topk_group", 1),
                renormalize=reader.take("norm_topk_prob", bool, True),
                epsilon=1e-20,
                scaling=reader.positive_number("routed_scaling_factor", 1.0),
            ),
            expert_ffn=expert_ffn,
            shared_ffn=expert_ffn * reader.count("n_shared_experts"),
        ),
        norm_eps=reader.positive_number("rms_norm_eps"),
        tied_head=reader.take("tie_word_embeddings", bool, False),
        max_positions=reader.positive("max_position_embeddings"),
    )


FAMILY = Family(
    name="glm4_moe",
    read_config=_read_config,
    tensors=(
        *decoder_rules(),
        *block_rules("dense", q_norm="q_norm", k_norm="k_norm"),
        *swiglu_rules("dense.ffn", "mlp"),
        *block_rules("moe", q_norm="q_norm", k_norm="k_norm"),
        *moe_rules("moe.ffn"),
        *swiglu_rules("moe.ffn.shared", "mlp.shared_experts"),
        TensorRule(path="moe.ffn.router.weight", hub="model.layers.{layer}.mlp.gate.weight"),
        TensorRule(path="moe.ffn.router.bias", hub="model.layers.{layer}.mlp.gate.e_score_correction_bias"),
    ),
)
