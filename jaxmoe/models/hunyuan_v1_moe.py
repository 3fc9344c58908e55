"""hunyuan_v1_moe: Hunyuan-A13B. Source: transformers models/hunyuan_v1_moe (5.24.0) and the released config.json."""

from jaxmoe.errors import UnsupportedError
from jaxmoe.models.family import IGNORED_KEYS, ConfigReader, Family, TensorRule
from jaxmoe.models.names import block_rules, decoder_rules, moe_rules, swiglu_rules
from jaxmoe.models.rope_config import read_rope
from jaxmoe.nn.config import AttentionConfig, DecoderConfig, MoEConfig, RouterConfig

_UNUSED = (
    "add_classification_head",
    "cla_share_factor",
    "class_num",
    "dense_list",
    "eod_token_id",
    "im_end_id",
    "im_newline_id",
    "im_start_id",
    "mask_init_id",
    "moe_random_routing_dropped_token",
    "num_media_embeds",
    "org_vocab_size",
    "pad_id",
    "pool_type",
    "pretraining_tp",
    "sep_token_id",
    "skip_cls_token",
    "text_end_id",
    "text_start_id",
    "video_end_id",
    "video_start_id",
    "vit_add_patchemb_bias",
    "vit_input_resolution",
    "vit_mapping_type",
    "vit_norm_type",
    "vit_patch",
    "vit_path",
    "vit_remove_prenorm",
    "vit_token",
    "vit_type",
    "vit_used_rms_norm",
)
"""Keys of the released file that belong to other models of its code base (vision, classification, training)."""


def _read_config(reader: ConfigReader) -> DecoderConfig:
    heads = reader.positive("num_attention_heads")
    embed = reader.positive("hidden_size")
    head_dim = reader.positive("head_dim", reader.positive("attention_head_dim", embed // heads))
    layers = reader.positive("num_hidden_layers")
    expert_ffn = reader.uniform("moe_intermediate_size", reader.positive("intermediate_size"), layers=layers)
    shared = reader.uniform("num_shared_expert", 1, layers=layers, least=0)
    for key in ("use_cla", "attention_bias", "mlp_bias", "moe_drop_tokens", "position_embedding_xdrope"):
        reader.expect(key, False)
    for key in ("group_limited_greedy", "use_mla"):
        reader.expect(key, False)
    for key in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        reader.expect(key)
    for key in ("xdrope_section", "n_group", "topk_group", "routed_scaling_factor"):
        reader.expect(key, False, 1, 1.0)
    for key in ("use_qk_norm", "use_mixed_mlp_moe", "use_rotary_pos_emb", "norm_topk_prob"):
        reader.expect(key, True)
    reader.expect("hidden_act", "silu")
    reader.expect("norm_type", "rms")
    reader.expect("moe_layer_num_skipped", 0)
    # Dropout does nothing at inference; the released file says 0.1.
    reader.ignore(*IGNORED_KEYS, *_UNUSED, "attention_dropout")
    if expert_ffn != reader.positive("intermediate_size"):
        raise UnsupportedError(
            f"{reader.where}: moe_intermediate_size {expert_ffn} differs from intermediate_size "
            f"{reader.positive('intermediate_size')}; the reference uses one width for both"
        )
    return DecoderConfig(
        family="hunyuan_v1_moe",
        vocab=reader.positive("vocab_size"),
        embed=embed,
        layers=layers,
        dense_layers=0,
        ffn=0,
        attention=AttentionConfig(
            heads=heads,
            kv_heads=reader.positive("num_key_value_heads", heads),
            head_dim=head_dim,
            rope=read_rope(reader, head_dim, alpha=True),
            qk_norm="after_rope",
        ),
        moe=MoEConfig(
            router=RouterConfig(
                experts=reader.positive("num_experts"),
                top_k=reader.uniform("moe_topk", layers=layers),
                score="softmax",
            ),
            expert_ffn=expert_ffn,
            shared_ffn=expert_ffn * shared,
        ),
        norm_eps=reader.positive_number("rms_norm_eps"),
        tied_head=reader.take("tie_word_embeddings", bool, False),
        max_positions=reader.positive("max_position_embeddings"),
    )


FAMILY = Family(
    name="hunyuan_v1_moe",
    read_config=_read_config,
    tensors=(
        *decoder_rules(),
        *block_rules("moe", q_norm="query_layernorm", k_norm="key_layernorm"),
        *moe_rules("moe.ffn"),
        *swiglu_rules("moe.ffn.shared", "mlp.shared_mlp"),
        TensorRule(path="moe.ffn.router.weight", hub="model.layers.{layer}.mlp.gate.wg.weight"),
    ),
)
