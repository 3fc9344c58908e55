"""glm4_moe_lite: GLM-4.7-Flash. Source: transformers models/glm4_moe_lite (5.24.0)."""

from jaxmoe.models.deepseek_v3 import read_latent_decoder
from jaxmoe.models.family import ConfigReader, Family
from jaxmoe.models.names import COPYING, DENSE, LATENT, SPARSE, family_rules
from jaxmoe.nn.config import DecoderConfig


def _read_config(reader: ConfigReader) -> DecoderConfig:
    return read_latent_decoder(reader, "glm4_moe_lite")


FAMILY = Family(
    name="glm4_moe_lite",
    read_config=_read_config,
    tensors=family_rules(dense={**LATENT, **DENSE}, moe={**LATENT, **SPARSE}, prediction=COPYING),
)
