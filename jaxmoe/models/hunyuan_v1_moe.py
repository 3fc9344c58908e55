"""hunyuan_v1_moe: Hunyuan-A13B. Source: transformers models/hunyuan_v1_moe (5.24.0) and the released config.json."""

from jaxmoe.errors import UnsupportedError
from jaxmoe.models.attention_config import read_attention
from jaxmoe.models.common_config import expect_plain, read_decoder
from jaxmoe.models.family import ConfigReader, Family
from jaxmoe.models.names import GROUPED_QUERY, experts, family_rules, named, swiglu
from jaxmoe.nn.config import DecoderConfig, MoEConfig, RouterConfig

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
    layers = reader.positive("num_hidden_layers")
    expert_ffn = reader.uniform("moe_intermediate_size", reader.positive("intermediate_size"), layers=layers)
    shared = reader.uniform("num_shared_expert", 1, layers=layers, least=0)
    expect_plain(reader, *_UNUSED, dropout=True)
    _expect_a13b(reader)
    if expert_ffn != reader.positive("intermediate_size"):
        raise UnsupportedError(
            f"{reader.where}: moe_intermediate_size {expert_ffn} differs from intermediate_size "
            f"{reader.positive('intermediate_size')}; the reference uses one width for both"
        )
    head_dim = reader.spelling("head_dim", "attention_head_dim")
    router = RouterConfig(
        experts=reader.positive("num_experts"),
        top_k=reader.uniform(reader.spelling("moe_topk", "num_experts_per_tok"), layers=layers),
        score="softmax",
    )
    return read_decoder(
        reader,
        family="hunyuan_v1_moe",
        attention=read_attention(reader, kv_required=False, qk_norm="after_rope", alpha=True, head_dim_key=head_dim),
        moe=MoEConfig(router=router, expert_ffn=expert_ffn, shared_ffn=expert_ffn * shared),
    )


def _expect_a13b(reader: ConfigReader) -> None:
    """Hunyuan's code base is one for many models; only what A13B turns on is here."""
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
    reader.expect("norm_type", "rms")
    reader.expect("moe_layer_num_skipped", 0)
    # The dense models of the family share the older word for its type.
    if reader.take("model_type", str) == "hunyuan" and reader.positive("num_experts", 1) == 1:
        raise UnsupportedError(f"{reader.where}: model_type 'hunyuan' with num_experts = 1 is a dense model")


FAMILY = Family(
    name="hunyuan_v1_moe",
    read_config=_read_config,
    tensors=family_rules(
        moe={
            **GROUPED_QUERY,
            **named(
                {
                    "attention.q_norm.weight": "self_attn.query_layernorm.weight",
                    "attention.k_norm.weight": "self_attn.key_layernorm.weight",
                    "ffn.router.weight": "mlp.gate.wg.weight",
                }
            ),
            **experts(),
            **swiglu("ffn.shared", "mlp.shared_mlp"),
        }
    ),
)
