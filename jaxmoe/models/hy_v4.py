"""hy_v4: Hy4-preview. Source: transformers models/hy_v4 (5.24.0), vLLM 0.33.0 models/hy_v4, the released config.json.

Rotary dims pair as neighbours, as in vLLM and SGLang; transformers 5.24.0 rotates halves, which does not fit the
released weights.
"""

import dataclasses

from jaxmoe.models.common_config import (
    expect_plain,
    read_decoder,
    read_dense_layers,
    read_moe,
    read_mtp_layers,
    read_sigmoid_router,
)
from jaxmoe.models.family import ConfigReader, Family, Hub
from jaxmoe.models.latent_config import read_full_layers, read_indexer, read_latent
from jaxmoe.models.names import INDEXER, LATENT, SHARING, Names, experts, family_rules, fused, named, named_alike
from jaxmoe.nn.config import DecoderConfig, HyperConfig

_HYPER = {"fn": "fn", "base": "base", "scale": "scale"}


def _read_config(reader: ConfigReader) -> DecoderConfig:
    # Logits are float32 whatever the switch says; a sink's first value matters to training only.
    expect_plain(reader, "enable_lm_head_fp32", "learnable_sink_init")
    for key in ("enable_ihc", "gated_mla", "learnable_sink", "rope_interleave", "indexer_rope_interleave"):
        reader.expect(key, True)
    reader.expect("gating_type", "elementwise")
    reader.expect("sliding_window")
    layers = reader.positive("num_hidden_layers")
    full_layers = read_full_layers(reader, tuple(layer for layer in range(layers) if layer == 0 or layer % 4 == 1))
    clamped = not reader.take("swiglu_limit", float, 10.0) <= 0
    return read_decoder(
        reader,
        family="hy_v4",
        dense_layers=read_dense_layers(reader, 1),
        attention=read_latent(
            reader,
            gate=True,
            sinks=True,
            indexer=read_indexer(reader, full_layers, interleaved=True, rotates_last=True),
        ),
        # The shared expert is not clamped.
        moe=read_moe(
            reader, read_sigmoid_router(reader), limit=reader.positive_number("swiglu_limit", 10.0) if clamped else None
        ),
        hyper=HyperConfig(
            streams=reader.positive("hc_mult", 4),
            magnitude=reader.positive_number("hc_magnitude", 2.0),
            epsilon=reader.positive_number("hc_eps", 1e-6),
        ),
        mtp_layers=read_mtp_layers(reader),
    )


# Each second way is what transformers 5.24.0 saves, which is not what it loads; a third is the name in its memory.
def _gated(path: str, *hubs: str) -> Names:
    """A feed-forward whose gate transformers saves under the name of attention's."""
    return {
        **named(
            {f"{path}.gate": tuple(f"{hub}.{word}.weight" for hub in hubs for word in ("gate_proj", "linear_gate"))}
        ),
        **named_alike(f"{path}.{{}}", {"up": "up_proj", "down": "down_proj"}, *(f"{hub}.{{}}.weight" for hub in hubs)),
    }


_LAYER: Names = {
    **LATENT,
    **named(
        {
            "attention.gate": ("self_attn.linear_gate.weight", "self_attn.gate_proj.weight"),
            "attention.sinks": ("self_attn.learnable_sink_param", "self_attn.sinks"),
        }
    ),
    **named_alike(
        "attention_hyper.{}", _HYPER, "hc_attn_layer.hc_pre.hc_{}", "hc_pre.hc_attn_layer.hc_{}", "attn_hc.{}"
    ),
    **named_alike("ffn_hyper.{}", _HYPER, "hc_mlp_layer.hc_pre.hc_{}", "hc_pre.hc_mlp_layer.hc_{}", "ffn_hc.{}"),
}

_EACH = experts()
_EXPERTS: Names = {
    "ffn.gate": (fused("mlp.experts.gate_up_proj", 0), *_EACH["ffn.gate"]),
    "ffn.up": (fused("mlp.experts.gate_up_proj", 1), *_EACH["ffn.up"]),
    "ffn.down": (Hub(name="mlp.experts.down_proj"), *_EACH["ffn.down"]),
}

_ROUTER = named(
    {
        "ffn.router.weight": ("mlp.gate.weight", "mlp.router.gate.weight"),
        "ffn.router.bias": ("mlp.gate.e_score_correction_bias", "mlp.expert_bias"),
    }
)

FAMILY = Family(
    name="hy_v4",
    read_config=_read_config,
    tensors=family_rules(
        dense={**_LAYER, **_gated("ffn", "mlp")},
        moe={**_LAYER, **_ROUTER, **_EXPERTS, **_gated("ffn.shared", "mlp.shared_experts", "mlp.shared_mlp")},
        indexer=INDEXER,
        prediction=dataclasses.replace(SHARING, layer="model.mtp_layers.{layer}"),
        model={
            f"head_hyper.{part}": (
                f"model.hc_head.hc_head_{part}",
                f"model.hc_pre.hc_head.hc_head_{part}",
                f"model.hc_head.hc_{part}",
            )
            for part in _HYPER
        },
    ),
    mtp_first=0,
)
