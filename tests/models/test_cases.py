"""Failures of other engines (by number), as tests of whole models."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxmoe.nn.config import DecoderConfig
from jaxmoe.nn.param import ParamFactory
from jaxmoe.nn.router import Router
from jaxmoe.ptq.job import make_job, prepare
from jaxmoe.ptq.quantize import quantize
from jaxmoe.ptq.recipe import Rule, load_recipe
from jaxmoe.weights.load import open_model
from tests import tiny
from tests.running import run_logits, runner_of, scratch, tiny_folder, tiny_quantized


def router_of(config: DecoderConfig, weight: np.ndarray, bias: np.ndarray) -> Router:
    """A router of one layer with the given parameters."""
    router = Router(config, ParamFactory(layers=1))
    router.weight = nnx.Param(jnp.asarray(weight[None]))
    router.bias = nnx.Param(jnp.asarray(bias[None]))
    return router


def router_config(experts: int, top_k: int) -> DecoderConfig:
    config = tiny.manifest_of(tiny.CONFIGS["deepseek_v3"]).config
    router = replace(config.moe.router, experts=experts, top_k=top_k, groups=1, topk_groups=1)
    return replace(config, moe=replace(config.moe, router=router))


def expected_ids(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, top_k: int) -> np.ndarray:
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ weight.astype(np.float64).T))) + bias
    return np.sort(np.argsort(-scores, axis=-1, kind="stable")[:, :top_k], axis=-1)


def test_case_11_a_correction_bias_far_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases around 7 collapse to a few values in bfloat16; through the quantised path they stay what they are."""
    draw = tiny.draw

    def shifted(name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = draw(name, shape)
        return np.float32(7) + np.float32(0.3) * values if name.endswith("e_score_correction_bias") else values

    monkeypatch.setattr(tiny, "draw", shifted)
    config = {**tiny.CONFIGS["glm4_moe"], "n_routed_experts": 256, "num_experts_per_tok": 8}
    source = tiny.write_checkpoint(scratch() / "case-11", config, dtype=ml_dtypes.bfloat16)
    folder = scratch() / "case-11-int8"
    quantize(prepare(source, load_recipe("w8a8-g128")), folder)
    runner = runner_of(folder, dtype="bfloat16", kv_cache="int8")
    found = {leaf.entry.path: array for leaf, array in zip(runner._leaves, runner._arrays, strict=True)}
    stored = np.asarray(found["moe.ffn.router.bias"])
    wanted = np.stack([shifted(f"model.layers.{n}.mlp.gate.e_score_correction_bias", (256,)) for n in (1, 2)])
    assert stored.dtype == np.float32
    np.testing.assert_array_equal(stored, wanted)
    x = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)
    weight = np.asarray(found["moe.ffn.router.weight"])[0]
    settings = router_config(256, 8)
    ids = [
        np.sort(np.asarray(router_of(settings, weight, bias)(jnp.asarray(x), 0)[0]), axis=-1)
        for bias in (stored[0], stored[0].astype(ml_dtypes.bfloat16).astype(np.float32))
    ]
    np.testing.assert_array_equal(ids[0], expected_ids(x, weight, wanted[0], 8))
    assert np.mean((ids[0] != ids[1]).any(-1)) > 0.5, "a bias in bfloat16 would choose other experts"


def test_case_12_routing_is_float32_in_a_bfloat16_model() -> None:
    """Ten thousand tokens: the ids of exact arithmetic; products in bfloat16 would change thousands of choices."""
    generator = np.random.default_rng(1)
    x = generator.standard_normal((10_000, 64)).astype(ml_dtypes.bfloat16)
    weight = (generator.standard_normal((64, 64)) / 8).astype(np.float32)
    bias = (0.01 * generator.standard_normal(64)).astype(np.float32)
    ids, _ = router_of(router_config(64, 8), weight, bias)(jnp.asarray(x), 0)
    exact = expected_ids(x.astype(np.float32), weight, bias, 8)
    flips = int((np.sort(np.asarray(ids), axis=-1) != exact).any(-1).sum())
    logits = (x.astype(np.float32) @ weight.T).astype(ml_dtypes.bfloat16).astype(np.float32)
    rounded = np.sort(np.argsort(-(1 / (1 + np.exp(-logits)) + bias), axis=-1, kind="stable")[:, :8], axis=-1)
    print(f"tokens with another choice: {flips} in float32, {int((rounded != exact).any(-1).sum())} in bfloat16")
    assert flips <= 2, "float32 rounding decides at most a near-tie"
    assert (rounded != exact).any(-1).sum() > 100


def test_case_16_mixed_precision_inside_one_layer() -> None:
    """Values in float, output projection in INT8, one of three expert projections weight-only: served as recorded."""
    shipped = load_recipe("w8a8-g128")
    recipe = replace(
        shipped,
        name="mixed",
        rule=(
            Rule(roles=("attention.v",), scheme="float"),
            Rule(roles=("experts.up",), scheme="w8a16-g32"),
            *shipped.rule,
        ),
    )
    folder = scratch() / "case-16"
    quantize(make_job(open_model(tiny_folder("glm4_moe")), recipe), folder)
    schemes = {path: scheme and scheme.name for path, scheme in open_model(folder).schemes.items()}
    assert schemes.get("moe.attention.v") is None and schemes["moe.attention.o"] == "w8a8-g128"
    assert (schemes["moe.ffn.gate"], schemes["moe.ffn.up"]) == ("w8a8-g128", "w8a16-g32")
    logits = run_logits(folder, tiny.token_ids())
    exact = run_logits(tiny_folder("glm4_moe"), tiny.token_ids())
    assert np.median(np.abs(logits - exact).max(-1)) < 0.5 * exact.std()


@pytest.mark.parametrize("family", ["hy_v3", "deepseek_v3", "hy_v4"])
def test_case_18_shared_dense_and_mtp_layers_are_quantised_alike(family: str) -> None:
    """One kind of layer wherever it stands: the shared expert, the dense prefix and multi-token prediction."""
    files = open_model(tiny_quantized(family, "w8a8-g128"))
    quantised = {path for path, scheme in files.schemes.items() if scheme is not None}
    for stack in ("moe.ffn", "moe.ffn.shared", "dense.ffn", "mtp.block.ffn", "mtp.block.ffn.shared"):
        assert {f"{stack}.{part}" for part in ("gate", "up", "down")} <= quantised, stack
    assert files.mtp_layers == 1
    assert not quantised & {"embed.weight", "head.weight", "mtp.projection"}


def test_mtp_presence_is_reported(tmp_path: Path) -> None:
    """The config names a block; a checkpoint without it still loads, and what it has is said."""
    config = tiny.CONFIGS["deepseek_v3"]
    assert open_model(tiny_folder("deepseek_v3")).mtp_layers == 1
    without = tiny.write_checkpoint(tmp_path / "without", {**config, "num_nextn_predict_layers": 0})
    text = (tiny_folder("deepseek_v3") / "config.json").read_text(encoding="utf-8")
    (without / "config.json").write_text(text, encoding="utf-8")
    assert open_model(without).mtp_layers == 0
    np.testing.assert_array_equal(
        run_logits(without, tiny.token_ids()), run_logits(tiny_folder("deepseek_v3"), tiny.token_ids())
    )
