"""Multi-token-prediction blocks: declared, loaded and kept; speculative decoding runs them.

A block takes the embedding of the next token and the main model's last hidden state, each normalised, side by side
through one projection, then an ordinary block (without hyper-connections), a norm and the shared head.
Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2.
"""

from flax import nnx

from jaxmoe.nn.block import Block
from jaxmoe.nn.config import DecoderConfig, LatentAttentionConfig
from jaxmoe.nn.indexer import Indexer
from jaxmoe.nn.norm import RMSNorm
from jaxmoe.nn.param import ParamFactory


class MTP(nnx.Module):
    """The stack of multi-token-prediction blocks."""

    def __init__(self, config: DecoderConfig):
        """Declares norms, projection and blocks, and the copies of embedding and head that some checkpoints carry."""
        param = ParamFactory(layers=config.mtp_layers)
        self.embed_norm = RMSNorm(config.embed, "embed", config.norm_eps, param)
        self.hidden_norm = RMSNorm(config.embed, "embed", config.norm_eps, param)
        self.projection = param((config.embed, 2 * config.embed), ("embed", "embed_pair"), "mtp.projection")
        self.block = Block(config, layers=config.mtp_layers, moe=True, hyper=False)
        self.norm = RMSNorm(config.embed, "embed", config.norm_eps, param)
        if isinstance(config.attention, LatentAttentionConfig) and config.attention.indexer is not None:
            self.indexer = Indexer(config, param)
        if config.mtp_copies:
            self.embed = param((config.vocab, config.embed), ("vocab", "embed"), "embed")
            self.head = param((config.vocab, config.embed), ("vocab", "embed"), "head")
