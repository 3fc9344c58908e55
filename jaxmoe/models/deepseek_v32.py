"""deepseek_v32: DeepSeek-V3.2. Source: transformers models/deepseek_v32 (5.24.0)."""

from jaxmoe.models.common_config import (
    expect_plain,
    read_decoder,
    read_dense_layers,
    read_moe,
    read_mtp_layers,
    read_sigmoid_router,
)
from jaxmoe.models.family import REQUIRED, ConfigReader, Family
from jaxmoe.models.latent_config import read_indexer, read_latent
from jaxmoe.models.names import COPYING, DENSE, INDEXER, LATENT, SPARSE, family_rules
from jaxmoe.nn.config import DecoderConfig


def _read_config(reader: ConfigReader) -> DecoderConfig:
    expect_plain(reader)
    reader.expect("rope_interleave", True)
    # The main rotation is interleaved, the indexer's is not.
    reader.expect("indexer_rope_interleave", False)
    every = tuple(range(reader.positive("num_hidden_layers")))
    return read_decoder(
        reader,
        family="deepseek_v32",
        dense_layers=read_dense_layers(reader),
        attention=read_latent(reader, indexer=read_indexer(reader, every, interleaved=False)),
        moe=read_moe(reader, read_sigmoid_router(reader, groups_default=REQUIRED)),
        mtp_layers=read_mtp_layers(reader),
        mtp_copies=True,
    )


FAMILY = Family(
    name="deepseek_v32",
    read_config=_read_config,
    tensors=family_rules(dense={**LATENT, **DENSE}, moe={**LATENT, **SPARSE}, indexer=INDEXER, prediction=COPYING),
)
