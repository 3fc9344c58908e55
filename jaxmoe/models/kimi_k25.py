"""kimi_k25: the text part of Kimi-K2.5 and K2.6. Source: transformers models/kimi_k25 (5.24.0)."""

from jaxmoe.errors import ConfigError
from jaxmoe.models.deepseek_v3 import read_latent_decoder
from jaxmoe.models.family import IGNORED_KEYS, ConfigReader, Family
from jaxmoe.models.names import DENSE, LATENT, SPARSE, family_rules
from jaxmoe.nn.config import DecoderConfig

_VISION = (
    "ignore_index",
    "image_token_id",
    "media_placeholder_token_id",
    "projection_hidden_size",
    "projection_layer_norm_eps",
    "use_unified_vision_chunk",
    "video_placeholder",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
)
"""Keys of the parts that turn pictures into embeddings."""


def _read_config(reader: ConfigReader) -> DecoderConfig:
    text = reader.child("text_config")
    text.expect("model_type", "deepseek_v3", "kimi_k2")
    text.expect("num_nextn_predict_layers", 0)
    config = read_latent_decoder(text, "kimi_k25")
    text.finish()
    reader.ignore(*IGNORED_KEYS, *_VISION)
    # The wrapper's class default contradicts the released weights, so absence says nothing.
    if reader.take("tie_word_embeddings", bool, config.tied_head) != config.tied_head:
        raise ConfigError(f"{reader.where}: tie_word_embeddings differs from the one in text_config")
    return config


FAMILY = Family(
    name="kimi_k25",
    read_config=_read_config,
    tensors=family_rules(
        dense={**LATENT, **DENSE},
        moe={**LATENT, **SPARSE},
        # The release; what transformers 5.24.0 saves; the modules in its memory.
        layers=(
            "language_model.model.layers.{layer}",
            "language_model.model.blocks.{layer}",
            "model.language_model.layers.{layer}",
        ),
        model={
            "embed.weight": ("language_model.model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
            "norm.weight": ("language_model.model.norm.weight", "model.language_model.norm.weight"),
            "head.weight": ("language_model.lm_head.weight", "lm_head.weight"),
        },
    ),
    ignored=r"(model\.)?(vision_tower|mm_projector)\..*",
)
