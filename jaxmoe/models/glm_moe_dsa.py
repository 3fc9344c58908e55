"""glm_moe_dsa: GLM-5, 5.1, 5.2, 5.3. Source: transformers models/glm_moe_dsa (5.24.0)."""

from jaxmoe.errors import ConfigError
from jaxmoe.models.common_config import (
    expect_plain,
    read_decoder,
    read_dense_layers,
    read_moe,
    read_mtp_layers,
    read_sigmoid_router,
)
from jaxmoe.models.family import ConfigReader, Family
from jaxmoe.models.latent_config import read_full_layers, read_indexer, read_latent
from jaxmoe.models.names import COPYING, DENSE, INDEXER, LATENT, SPARSE, family_rules
from jaxmoe.nn.config import DecoderConfig


def _scheduled_layers(reader: ConfigReader) -> tuple[int, ...]:
    """Layers with an indexer where the file gives a pattern of F and S, or a period and where it starts."""
    layers = reader.positive("num_hidden_layers")
    period = max(reader.count("index_topk_freq", 1), 1)
    offset = reader.take("index_skip_topk_offset", int, 2)
    pattern = reader.take("index_topk_pattern", str, None)
    if pattern is None:
        return tuple(layer for layer in range(layers) if max(layer - offset + 1, 0) % period == 0)
    if len(pattern) != layers or set(pattern) - set("FS"):
        raise ConfigError(f"{reader.where}: index_topk_pattern is not an F or S for each of {layers} layers: {pattern}")
    return tuple(layer for layer, letter in enumerate(pattern) if letter == "F")


def _read_config(reader: ConfigReader) -> DecoderConfig:
    expect_plain(reader)
    reader.expect("rope_interleave", True)
    reader.expect("indexer_rope_interleave", True)
    scheduled = reader.has("index_topk_freq") or reader.has("index_topk_pattern")
    full_layers = read_full_layers(reader, _scheduled_layers(reader), scheduled=scheduled)
    return read_decoder(
        reader,
        family="glm_moe_dsa",
        dense_layers=read_dense_layers(reader),
        attention=read_latent(reader, indexer=read_indexer(reader, full_layers, interleaved=True)),
        moe=read_moe(reader, read_sigmoid_router(reader)),
        # GLM-5's blocks share embedding and head, unlike GLM-4.5's; names of copies are known all the same.
        mtp_layers=read_mtp_layers(reader),
    )


FAMILY = Family(
    name="glm_moe_dsa",
    read_config=_read_config,
    tensors=family_rules(dense={**LATENT, **DENSE}, moe={**LATENT, **SPARSE}, indexer=INDEXER, prediction=COPYING),
)
