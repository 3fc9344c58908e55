"""gpt_oss: gpt-oss-120b, 20b. Source: transformers models/gpt_oss (5.24.0)."""

from jaxmoe.models.attention_config import read_attention, read_windows
from jaxmoe.models.common_config import expect_plain, read_decoder
from jaxmoe.models.family import ConfigReader, Family, Hub, View
from jaxmoe.models.names import GROUPED_QUERY, Names, family_rules, fused, named
from jaxmoe.nn.config import DecoderConfig, MoEConfig, RouterConfig

_OWN = "mlp.experts.{expert}"
_WHOLE_BLOCKS = View(interleaved=True)
"""One part that alternates with none: all of the tensor. It differs from WHOLE, so that our own checkpoints never take
the name of packed blocks for integers of another format."""


def _gate_or_up(name: str, part: int) -> Names:
    return {
        f"ffn.{name}": (
            fused("mlp.experts.gate_up_proj", part, interleaved=True, transposed=True),
            fused("mlp.experts.gate_up_proj_blocks", part, interleaved=True),
            Hub(name=f"{_OWN}.{name}_proj.weight"),
        ),
        f"ffn.{name}_bias": (
            fused("mlp.experts.gate_up_proj_bias", part, interleaved=True),
            Hub(name=f"{_OWN}.{name}_proj.bias"),
        ),
    }


_DOWN: Names = {
    "ffn.down": (
        Hub(name="mlp.experts.down_proj", view=View(transposed=True)),
        Hub(name="mlp.experts.down_proj_blocks", view=_WHOLE_BLOCKS),
        Hub(name=f"{_OWN}.down_proj.weight"),
    ),
    "ffn.down_bias": (Hub(name="mlp.experts.down_proj_bias"), Hub(name=f"{_OWN}.down_proj.bias")),
}


def _read_config(reader: ConfigReader) -> DecoderConfig:
    expect_plain(reader)
    layers = reader.positive("num_hidden_layers")
    bias = reader.take("attention_bias", bool, True)
    # The constant of the activation.
    reader.expect("swiglu_alpha", 1.702)
    kinds = tuple("full_attention" if layer % 2 else "sliding_attention" for layer in range(layers))
    attention = read_attention(reader, bias=bias, out_bias=bias, sinks=True, windows=read_windows(reader, kinds))
    if attention.rope.yarn is not None:
        reader.expect("initial_context_length", attention.rope.yarn.original_positions)
    router = RouterConfig(
        experts=reader.positive(reader.spelling("num_local_experts", "num_experts")),
        top_k=reader.positive(reader.spelling("num_experts_per_tok", "experts_per_token")),
        score="logits",
        logit_bias=True,
        # The softmax over the chosen logits sums to one.
        renormalize=False,
    )
    return read_decoder(
        reader,
        family="gpt_oss",
        attention=attention,
        moe=MoEConfig(
            router=router,
            expert_ffn=reader.positive("intermediate_size"),
            shared_ffn=0,
            limit=reader.positive_number("swiglu_limit"),
            activation="gpt_oss",
            expert_bias=True,
        ),
    )


FAMILY = Family(
    name="gpt_oss",
    read_config=_read_config,
    tensors=family_rules(
        moe={
            **GROUPED_QUERY,
            **named(
                {
                    "attention.sinks": "self_attn.sinks",
                    "ffn.router.weight": "mlp.router.weight",
                    "ffn.router.logit_bias": "mlp.router.bias",
                }
            ),
            **_gate_or_up("gate", 0),
            **_gate_or_up("up", 1),
            **_DOWN,
        }
    ),
)
