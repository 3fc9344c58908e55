"""Engines: what they cannot load is refused before any work, with the numbers and what would fit."""

from typing import Any

import pytest

from jaxmoe.errors import RecipeError
from jaxmoe.ptq.export import FORMATS
from jaxmoe.ptq.export.targets import ENGINES, Target, check_target
from tests import tiny
from tests.ptq.export.folders import EXPERTS, tiny_matches

CHANNEL = {"": "w8a8-channel"}
GROUPS = {"": "w8a8-g32"}


def check(
    target: Target,
    output: str,
    schemes: dict[str, str],
    degrees: tuple[int, ...] = (),
    family: str = "glm4_moe",
    **changes: Any,
) -> None:
    matches, manifest = tiny_matches(family, schemes, **changes)
    FORMATS[output].check(matches)
    check_target(target, degrees, matches, manifest, FORMATS[output])


ACCEPTED: dict[str, tuple[Any, ...]] = {
    "ours": ("jaxmoe", "jaxmoe", {"": "w8a8-g64", **dict.fromkeys(EXPERTS, "w4a8-g32")}, (1, 2)),
    "ours, foreign": ("jaxmoe", "compressed-tensors", {**CHANNEL, **dict.fromkeys(EXPERTS, "w4a16-g32")}, (2,)),
    "ours, ascend groups": ("jaxmoe", "ascendv1", GROUPS),
    "ours, int4 of others": ("jaxmoe", "ascendv1", {**GROUPS, "experts.down": "w4a8-channel"}),
    "ours, weight-only ascend": ("jaxmoe", "ascendv1", {"ffn.up": "w8a16-g32"}),
    "ours, int4 in bytes": ("jaxmoe", "compressed-tensors", {**CHANNEL, **dict.fromkeys(EXPERTS, "w4a8-g32")}),
    "ours, two int8 forms": ("jaxmoe", "compressed-tensors", {**CHANNEL, "experts.up": "w8a8-g32"}),
    "ascend, compressed int4": (
        "vllm-ascend",
        "compressed-tensors",
        {**CHANNEL, **dict.fromkeys(EXPERTS, "w4a8-channel")},
    ),
    "vllm, packed int8": ("vllm", "compressed-tensors", {"": "w8a16-channel"}, (1, 2)),
    "vllm": ("vllm", "compressed-tensors", CHANNEL, (1, 2, 4)),
    "vllm, packed experts": ("vllm", "compressed-tensors", dict.fromkeys(EXPERTS, "w4a16-g32"), (1,)),
    "ascend": ("vllm-ascend", "ascendv1", CHANNEL, (1, 2, 4)),
    "ascend, int4 experts": (
        "vllm-ascend",
        "ascendv1",
        {**CHANNEL, **dict.fromkeys(EXPERTS, "w4a8-channel")},
        (1, 2, 4),
    ),
    "ascend, compressed": ("vllm-ascend", "compressed-tensors", CHANNEL, (2,)),
    "sglang": ("sglang", "compressed-tensors", CHANNEL, (1, 2, 4)),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_engines_load(case: str) -> None:
    check(*ACCEPTED[case])


REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "vllm reads one format": (
        ("vllm", "jaxmoe", CHANNEL),
        {},
        "vLLM does not read output format jaxmoe; choose compressed-tensors",
    ),
    "vllm and ascend": (("vllm", "ascendv1", CHANNEL), {}, "vLLM does not read output format ascendv1"),
    "ascend reads two": (
        ("vllm-ascend", "jaxmoe", CHANNEL),
        {},
        "vLLM-Ascend does not read output format jaxmoe; choose ascendv1 or compressed-tensors",
    ),
    "vllm, grouped experts": (
        ("vllm", "compressed-tensors", GROUPS),
        {},
        "vLLM cannot run w8a8-g32 here: its INT8 kernels have one scale a channel and one a token; choose w8a8-channel",
    ),
    "vllm, int4 in bytes": (
        ("vllm", "compressed-tensors", dict.fromkeys(EXPERTS, "w4a8-g32")),
        {},
        r"experts\.0\.\w+_proj\.weight: vLLM cannot run w4a8-g32 here: .* on Arm CPUs only; choose w8a8-channel or "
        "w4a16",
    ),
    "sglang, groups": (("sglang", "compressed-tensors", GROUPS), {}, "SGLang cannot run w8a8-g32 here"),
    "sglang, int4": (("sglang", "compressed-tensors", {"experts.up": "w4a8-g32"}), {}, "on NPUs only"),
    "ascend, groups": (
        ("vllm-ascend", "ascendv1", GROUPS),
        {},
        r"vLLM-Ascend cannot run w8a8-g32 here: it expects scales \[out, 1\]",
    ),
    "ascend, dense int4": (
        ("vllm-ascend", "ascendv1", {"ffn.gate": "w4a8-channel", "ffn.up": "w4a8-channel"}),
        {},
        "it has W4A8_DYNAMIC for routed experts only",
    ),
    "ascend, weight-only experts": (
        ("vllm-ascend", "ascendv1", dict.fromkeys(EXPERTS, "w8a16-channel")),
        {},
        "it has no experts with float activations",
    ),
    "ascend, compressed int4": (
        ("vllm-ascend", "compressed-tensors", dict.fromkeys(EXPERTS, "w4a8-g32")),
        {},
        "it refuses 4-bit weights in groups; choose w4a8-channel",
    ),
    "queries and values": (
        ("vllm", "compressed-tensors", {**CHANNEL, "attention.q": "float", "attention.k": "float"}),
        {},
        r"vLLM joins these and needs one scheme for them: model\.layers\.0\.self_attn\.q_proj\.weight float, "
        r"model\.layers\.0\.self_attn\.k_proj\.weight float, model\.layers\.0\.self_attn\.v_proj\.weight w8a8-channel",
    ),
    "latents": (
        ("vllm-ascend", "ascendv1", {**CHANNEL, "attention.kv_a": "float"}),
        {"family": "deepseek_v3"},
        r"q_a_proj\.weight w8a8-channel, model\.layers\.0\.self_attn\.kv_a_proj_with_mqa\.weight float",
    ),
    "gate and up": (
        ("sglang", "compressed-tensors", {**CHANNEL, "shared.up": "float"}),
        {},
        r"SGLang joins these .*shared_experts\.gate_proj\.weight w8a8-channel, .*shared_experts\.up_proj\.weight float",
    ),
    "one expert matrix": (
        ("vllm", "compressed-tensors", {**CHANNEL, "experts.down": "w4a16-g32"}),
        {},
        r"experts\.0\.gate_proj\.weight w8a8-channel, .*up_proj\.weight w8a8-channel, .*down_proj\.weight w4a16-g32",
    ),
    "biases of experts": (
        ("vllm", "compressed-tensors", CHANNEL),
        {"family": "gpt_oss"},
        "experts with biases have no quantised form that vLLM loads; choose target jaxmoe",
    ),
    "names of our own": (
        ("vllm", "compressed-tensors", CHANNEL),
        {"family": "ernie4_5_moe"},
        r"vLLM looks for .*moe_statics.*, the result would have .*gate\.e_score_correction_bias",
    ),
    "heads": (
        ("vllm", "compressed-tensors", CHANNEL, (1, 3)),
        {},
        "vLLM: 4 attention heads cannot be split over 3 devices; degrees that fit: 1, 2, 4",
    ),
    "heads of ours": (("jaxmoe", "jaxmoe", CHANNEL, (8,)), {}, "jaxmoe: 4 attention heads cannot be split over 8"),
    # 12 query heads over 4 devices come out even, 3 key-value heads do not.
    "too few key-value heads": (
        ("vllm", "compressed-tensors", CHANNEL, (4,)),
        {"num_attention_heads": 12, "num_key_value_heads": 3},
        "vLLM: 3 key-value heads cannot be repeated evenly over 4 devices; degrees that fit: 1, 3, 6, 12",
    ),
    "key-value heads": (
        ("sglang", "compressed-tensors", CHANNEL, (4,)),
        {"num_attention_heads": 24, "num_key_value_heads": 6},
        "SGLang: 6 key-value heads cannot be split over 4 devices; degrees that fit: 1, 2, 3, 6, 12, 24",
    ),
    "no degree": (("vllm", "compressed-tensors", CHANNEL, (0,)), {}, "tensor parallelism of 0 is below 1"),
    "uneven experts": (
        ("vllm", "compressed-tensors", CHANNEL, (4,)),
        {"moe_intermediate_size": 34},
        "would split its 34 inputs over 4 devices, which does not come out even|34 outputs over 4",
    ),
    # D11, in small: 768 inputs over 8 devices are 96, no multiple of 128.
    "group against split": (
        ("vllm", "compressed-tensors", dict.fromkeys(EXPERTS, "w4a16-g128"), (1, 2, 4)),
        {"hidden_size": 128, "moe_intermediate_size": 384},
        r"experts\.0\.down_proj\.weight: w4a16-g128 with tensor parallelism of 2 leaves 192 of 384 inputs on a device, "
        "which is no multiple of 128; groups of 32 or 64, or one scale a channel would fit; with 128 degrees of 1, 3 "
        "would",
    ),
    "no group fits": (
        ("vllm", "compressed-tensors", dict.fromkeys(EXPERTS, "w4a16-g32"), (4,)),
        {"moe_intermediate_size": 64},
        "leaves 16 of 64 inputs on a device, which is no multiple of 32; one scale a channel would fit; with 32 "
        "degrees of 1, 2 would",
    ),
    "odd rows on a device": (
        ("vllm-ascend", "ascendv1", dict.fromkeys(EXPERTS, "w4a8-channel"), (2,)),
        {"moe_intermediate_size": 48, "num_attention_heads": 48, "num_key_value_heads": 48, "degrees": (16,)},
        "48 outputs over 16 devices are 3 each, but ascendv1 stores 4-bit rows in pairs",
    ),
    "sixteenths on a device": (
        ("vllm-ascend", "ascendv1", dict.fromkeys(EXPERTS, "w4a8-channel"), (3,)),
        {"moe_intermediate_size": 48, "num_attention_heads": 48, "num_key_value_heads": 48, "intermediate_size": 96},
        "splits the 16 parts of a 4-bit weight's bias over the devices, and 3 does not divide 16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_engines_do_not_load(case: str) -> None:
    arguments, changes, message = REFUSED[case]
    changes = dict(changes)
    if "degrees" in changes:
        arguments = (*arguments[:3], changes.pop("degrees"))
    with pytest.raises(RecipeError, match=message):
        check(*arguments, **changes)


def test_d11_as_reported() -> None:
    """768 inputs, groups of 128: 8 devices hold 96 each."""
    schemes = dict.fromkeys(EXPERTS, "w4a16-g128")
    sizes = {"hidden_size": 128, "moe_intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 8}
    check("vllm", "compressed-tensors", schemes, (1, 2), **sizes)
    message = (
        "leaves 96 of 768 inputs on a device, which is no multiple of 128; groups of 32, or one scale a channel would"
    )
    with pytest.raises(RecipeError, match=message):
        check("vllm", "compressed-tensors", schemes, (8,), **sizes)


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_channels_in_every_family(family: str) -> None:
    """Accepted everywhere, but where names or biases have no equal."""
    for target, engine in ENGINES.items():
        for output in engine.formats:
            if family in ("gpt_oss", "ernie4_5_moe") and target != "jaxmoe":
                with pytest.raises(RecipeError, match="choose target jaxmoe"):
                    check(target, output, CHANNEL, (1, 2), family)
            else:
                check(target, output, CHANNEL, (1, 2), family)
