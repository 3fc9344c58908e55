"""An analysis of tiny models: what is measured is what is served, devices do not change a byte, recipes fit."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.errors import ConfigError, RecipeError
from jaxmoe.ops.experts import Activation
from jaxmoe.ops.linear import linear
from jaxmoe.ops.linear.reference import quantize_tokens, w8a8
from jaxmoe.ptq.actions import Context, Embed
from jaxmoe.ptq.calib import VIRTUAL_SHARDS
from jaxmoe.ptq.job import Job, is_routed
from jaxmoe.ptq.layer_forward import forward_layer
from jaxmoe.ptq.layer_run import (
    Attended,
    LayerRunner,
    Sample,
    embed_samples,
    join_sample,
    layer_config,
    load_layer,
)
from jaxmoe.ptq.recipe import load_recipe, match_recipe
from jaxmoe.ptq.sensitivity import actions
from jaxmoe.ptq.sensitivity.actions import Observe
from jaxmoe.ptq.sensitivity.analyze import PROTECTED, analyze, check_schemes, float_job, measured_parts, ranking
from jaxmoe.ptq.sensitivity.measure import (
    cache_error,
    expert_errors,
    layer_errors,
    layer_results,
    linear_errors,
    quantised_weights,
    watch_layer,
)
from jaxmoe.ptq.sensitivity.suggest import check_budget, schemes_of_bits, suggest
from jaxmoe.ptq.work import WorkFolder
from jaxmoe.quant.qarray import quantize_weight
from jaxmoe.quant.scheme import Scheme, parse_scheme
from jaxmoe.weights.cells import cell_shape
from jaxmoe.weights.load import open_model
from jaxmoe.weights.shards import ShardFiles
from tests.ptq.jobs import LENGTHS, some_samples, windows
from tests.running import tiny_folder, tiny_quantized
from tests.tolerances import TOLERANCES

GLM = "glm4_moe"
NAMES = ("w8a8-g128", "w4a8-g128")
SCHEMES = tuple(map(parse_scheme, NAMES))


@cache
def analysis(family: str, devices: int = 1) -> dict[str, Any]:
    job = float_job(open_model(tiny_folder(family)))
    with tempfile.TemporaryDirectory() as work:
        result, _ = analyze(job, some_samples(), SCHEMES, work=Path(work), devices=jax.devices()[:devices])
    return result


def row(result: dict[str, Any], layer: int, role: str) -> dict[str, Any]:
    return next(each for each in result["linears"] if (each["layer"], each["role"]) == (layer, role))


@pytest.mark.slow
def test_devices_do_not_change_a_byte() -> None:
    assert json.dumps(analysis(GLM, 3)) == json.dumps(analysis(GLM, 1))


@pytest.mark.slow
@pytest.mark.parametrize("family", [GLM, "deepseek_v32", "gpt_oss"])
def test_every_quantisable_layer_is_measured_once(family: str) -> None:
    """Rows are the layers' matrices that a recipe may quantise; roles without one are named."""
    result, manifest = analysis(family), open_model(tiny_folder(family)).manifest
    rows = [(each["layer"], each["name"]) for each in result["linears"]]
    assert len(set(rows)) == len(rows)
    seen = {each["role"] for each in result["linears"]}
    assert not seen & set(result["not_measured"])
    vectors = {"attention.bias", "attention.norm", "attention.sinks", "experts.bias", "norm", "hyper", "router.bias"}
    known = {"embed", "head", "router", "attention.kv_b", "indexer.norm", "indexer.weights", "mtp.projection"}
    assert {entry.role for entry in manifest.entries} <= seen | set(result["not_measured"]) | vectors | known
    assert [each["layer"] for each in result["layers"]] == list(range(manifest.config.layers))
    for each in result["linears"]:
        assert 0 < each["error"]["w8a8-g128"] < 0.01 < 1 > each["error"]["w4a8-g128"] > each["error"]["w8a8-g128"]
    for each in result["layers"]:
        assert 0 < each["mse"]["w8a8-g128"] < each["mse"]["w4a8-g128"]
        assert all(30 < value < 70 for value in each["cache_sqnr_db"].values() if value is not None)


@pytest.mark.slow
def test_every_token_is_looked_at() -> None:
    """Padding is not: samples are of five lengths in one width."""
    result, config = analysis(GLM), open_model(tiny_folder(GLM)).manifest.config
    assert row(result, 0, "ffn.gate")["values"] == sum(LENGTHS) * config.embed
    assert row(result, 0, "ffn.down")["values"] == sum(LENGTHS) * config.ffn
    # Experts with more tokens than are kept are looked at in part.
    most = sum(LENGTHS) * config.moe.router.top_k * config.embed
    assert 0 < row(result, 1, "experts.gate")["values"] <= most
    assert row(result, 1, "experts.gate")["values"] % config.embed == 0


@pytest.mark.slow
def test_router_agreement_is_a_share_where_something_is_routed() -> None:
    layers = analysis(GLM)["layers"]
    assert layers[0]["router_agreement"] is None
    for each in layers[1:]:
        for share in each["router_agreement"].values():
            assert 0.5 < share <= 1
        assert each["router_agreement"]["w8a8-g128"] >= each["router_agreement"]["w4a8-g128"]


@pytest.mark.slow
def test_rankings_are_sorted() -> None:
    result = analysis(GLM)
    assert ranking(result) == result["ranking"]
    named = {f"layers.{each['layer']}.{each['role']}": each for each in result["linears"]}
    values = [named[name]["kurtosis"] for name in result["ranking"]["kurtosis"]]
    assert values == sorted(values, reverse=True) and len(values) == len(result["linears"])
    errors = [named[name]["error"]["w4a8-g128"] for name in result["ranking"]["error w4a8-g128"]]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.slow
def test_the_forward_pass_is_the_quantisers() -> None:
    """Bit for bit, the padded sample's real tokens."""
    files, samples = open_model(tiny_folder(GLM)), some_samples()
    width, manifest = samples.tokens.shape[1], files.manifest
    (sample,) = embed_samples(files.source, manifest, samples.tokens[1:2], samples.lengths[1:2].tolist())
    for layer in (0, 1):
        weights = load_layer(files.source, manifest, layer)
        runner = LayerRunner(manifest.config, layer, weights, width=width, device=jax.devices()[0])
        attended, stats = runner.attend(sample)
        x = np.zeros((width, manifest.config.embed), np.float32)
        x[: len(sample.x)] = sample.x
        forward = jax.jit(forward_layer, static_argnums=(0, 1))
        config = layer_config(manifest.config, layer)
        seen = forward(config, width, weights, x, np.int32(len(sample.x)), None)
        np.testing.assert_array_equal(np.asarray(seen.results["stream"])[: len(sample.x)], attended.stream)
        for tap, values in seen.taps.items():
            top = np.abs(np.asarray(values)[: len(sample.x)]).max(0)
            np.testing.assert_array_equal(top, np.asarray(stats[tap].absmax))


def test_samples_are_kept_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a shard with several: when the second one runs, the first one is in the file already."""
    job, device = float_job(open_model(tiny_folder(GLM))), jax.devices()[0]
    shards = ShardFiles(tmp_path, (), (), job.output.index_name)
    calibration = windows(samples=2 * VIRTUAL_SHARDS + 1)
    context = Context(job=job, shards=shards, work=WorkFolder(tmp_path), calibration=calibration, grams=frozenset())
    there: list[bool] = []

    def watched(*arguments: Any) -> Any:
        there.append((tmp_path / "x-00001").exists())
        return watch_layer(*arguments)

    monkeypatch.setattr(actions, "watch_layer", watched)
    Embed(shard=0).run(context, device)
    Observe(layer=0, shard=0, taps=("attention.in",)).run(context, device)
    assert there == [False, True, True]


def noise_and_signal(result: np.ndarray, exact: np.ndarray) -> list[float]:
    return [float(((result - exact).astype(np.float64) ** 2).sum()), float((exact.astype(np.float64) ** 2).sum())]


def test_linear_error_is_the_served_integers() -> None:
    """Against the operator's oracle; a token's size does not matter, tokens of zeros do not count."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((9, 160)).astype(np.float32)
    weight = generator.standard_normal((24, 160)).astype(np.float32)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    array = quantize_weight(jnp.asarray(weight), SCHEMES[0])
    oracle = w8a8(unit, np.asarray(array.qvalue), np.asarray(array.scale), 128)
    expected = noise_and_signal(oracle, unit.astype(np.float64) @ weight.astype(np.float64).T)
    sized = np.concatenate([x * np.float32(2.0) ** np.arange(-4, 5)[:, None].astype(np.float32), np.zeros_like(x[:3])])
    errors = np.asarray(linear_errors(sized, weight, SCHEMES))
    rtol = TOLERANCES["sensitivity"].value
    np.testing.assert_allclose(errors[0], expected, rtol=rtol)
    assert errors[1, 0] > 50 * errors[0, 0], "15 steps against 255"


def test_activations_of_sixteen_bits_cost_less() -> None:
    """The true error of activations with one scale a token is in it: an outlier makes it worse, weight-only not."""
    generator = np.random.default_rng(1)
    x = generator.standard_normal((32, 256)).astype(np.float32)
    weight = generator.standard_normal((16, 256)).astype(np.float32)
    schemes = (parse_scheme("w8a8-g128"), parse_scheme("w8a16-g128"))

    def ratios(values: np.ndarray) -> np.ndarray:
        errors = np.asarray(linear_errors(values, weight, schemes))
        return errors[:, 0] / errors[:, 1]

    plain, weight_only = ratios(x)
    x[:, 7] *= 60
    weight[:, 7] = 0
    worse, still = ratios(x)
    assert plain > weight_only and worse > 20 * plain and still < 2 * weight_only


def test_expert_error_is_weighted_by_the_router() -> None:
    generator = np.random.default_rng(2)
    weights = {
        name: generator.standard_normal(shape).astype(np.float32) / 8
        for name, shape in {"gate": (64, 32), "up": (64, 32), "down": (32, 64)}.items()
    }
    rows = generator.standard_normal((8, 32)).astype(np.float32)
    share = np.array([1, 1, 1, 1, 0, 0, 0, 0], np.float32)
    whole = expert_errors(weights, rows, share, Activation(), SCHEMES)
    half = expert_errors(weights, rows, share / 2, Activation(), SCHEMES)
    rtol = TOLERANCES["sensitivity"].value
    np.testing.assert_allclose(np.asarray(whole["block"]), 4 * np.asarray(half["block"]), rtol=rtol)
    np.testing.assert_array_equal(np.asarray(whole["linear"]), np.asarray(half["linear"]))
    spread, _ = whole["spreads"]["hidden"]
    assert int(np.asarray(spread.counts).sum()) == 4 * 64


def test_cache_error_has_a_scale_for_each_token_and_head() -> None:
    values = np.random.default_rng(3).standard_normal((5, 2, 16)).astype(np.float32)
    values[:, 1] *= 1000
    grid, scale = quantize_tokens(values.reshape(10, 16))
    expected = noise_and_signal(grid * scale[:, None], values.reshape(10, 16))
    np.testing.assert_allclose(
        np.asarray(cache_error(jnp.asarray(values))), expected, rtol=TOLERANCES["sensitivity"].value
    )


def test_a_layers_error_is_that_of_all_its_streams() -> None:
    """The shared expert's part enters each stream through a gate of its own."""
    generator = np.random.default_rng(4)

    def half() -> dict[str, np.ndarray]:
        shapes = {"stream": (6, 4, 8), "gates": (6, 4), "shared": (6, 8)}
        return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    result, exact = half(), half()
    left = [each["stream"] + each["gates"][:, :, None] * each["shared"][:, None, :] for each in (result, exact)]
    sides = np.asarray(layer_errors(jax.device_put(result), jax.device_put(exact), jnp.int32(6))["sides"])
    np.testing.assert_allclose(sides, noise_and_signal(*left), rtol=TOLERANCES["sensitivity"].value)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hy_v4", "gpt_oss"])
def test_mse_is_of_every_number_that_leaves_a_layer(family: str) -> None:
    """hy_v4: four residual streams that gates lead into. By hand, of the first two layers."""
    result, job = analysis(family), float_job(open_model(tiny_folder(family)))
    config, width = job.files.manifest.config, some_samples().tokens.shape[1]
    entering = list(
        embed_samples(job.source, job.files.manifest, some_samples().tokens, some_samples().lengths.tolist())
    )
    for layer in (0, 1):
        weights = load_layer(job.source, job.files.manifest, layer)
        runner = LayerRunner(config, layer, weights, width=width, device=jax.devices()[0])
        halves = [runner.attend(sample)[0] for sample in entering]
        chosen = frozenset(part.name for part in measured_parts(job, layer) if part.match.entry.role not in PROTECTED)
        for scheme in SCHEMES:
            rounded = quantised_weights(runner.weights, chosen, scheme)
            results = layer_results(runner.config, width, rounded, *runner.placed(entering[0]))
            other = Attended(
                selected=None, **{name: np.asarray(array)[: len(entering[0].x)] for name, array in results.items()}
            )
            mean = np.square(leaving(other) - leaving(halves[0]), dtype=np.float64).mean()
            if layer >= config.dense_layers:
                noise = [expert_noise(job, layer, half, scheme) for half in halves]
                mean += sum(noise) / sum(half.stream.size for half in halves)
            row = result["layers"][layer]
            assert row["mse"][scheme.name] == pytest.approx(mean, rel=TOLERANCES["sensitivity"].value)
            signal = np.square(leaving(halves[0]), dtype=np.float64).mean()
            assert row["relative"][scheme.name] == pytest.approx(mean / signal, rel=TOLERANCES["sensitivity"].value)
        if layer == 0:
            if layer >= config.dense_layers:
                rows = [expert_outputs(job, layer, half, None) for half in halves]
                after = [
                    join_sample(half, each, width=width, device=jax.devices()[0])
                    for half, each in zip(halves, rows, strict=True)
                ]
            else:
                after = [half.stream for half in halves]
            entering = [Sample(x=x, selected=half.selected) for x, half in zip(after, halves, strict=True)]


def leaving(half: Attended) -> np.ndarray:
    """What leaves a layer without its routed experts."""
    if half.shared is None:
        return half.stream
    return half.stream + (half.shared if half.gates is None else half.gates[:, :, None] * half.shared[:, None, :])


def expert_outputs(job: Job, layer: int, half: Attended, scheme: Scheme | None) -> np.ndarray:
    """[tokens, top_k, embed]: what each chosen expert makes of each token."""
    moe = job.files.manifest.config.moe
    activation = Activation(kind=moe.activation, limit=moe.limit)
    parts = {p.name[4:]: p for p in job.parts if p.layer == layer and is_routed(p.match.entry)}
    assert half.ids is not None and half.normed is not None
    out = np.empty((*half.ids.shape, half.normed.shape[1]), np.float32)
    for expert in np.unique(half.ids).tolist():
        weights: dict[str, Any] = {}
        for name, part in parts.items():
            entry = part.match.entry
            whole = tuple(slice(0, size) for size in cell_shape(entry))
            weights[name] = jnp.asarray(job.source.read(entry, part.cells[expert][0], whole), jnp.float32)
            if scheme is not None and not name.endswith("bias"):
                weights[name] = quantize_weight(weights[name], scheme)
        normed = jnp.asarray(half.normed)
        hidden = activation(
            linear(normed, weights["gate"], bias=weights.get("gate_bias")),
            linear(normed, weights["up"], bias=weights.get("up_bias")),
        )
        made = np.asarray(linear(hidden, weights["down"], bias=weights.get("down_bias")))
        token, slot = np.nonzero(half.ids == expert)
        out[token, slot] = made[token]
    return out


def expert_noise(job: Job, layer: int, half: Attended, scheme: Scheme) -> float:
    """Sum of squares of what each chosen expert's error adds to the residual streams of one sample."""
    error = expert_outputs(job, layer, half, scheme) - expert_outputs(job, layer, half, None)
    assert half.weights is not None
    added = error * half.weights[:, :, None]
    if half.gates is not None:
        added = half.gates[:, None, :, None] * added[:, :, None, :]
    return float(np.square(added, dtype=np.float64).sum())


def sizes() -> tuple[int, int]:
    """Bytes of the float model and of one with the smallest candidates."""
    job = float_job(open_model(tiny_folder(GLM)))
    with pytest.raises(RecipeError) as caught:
        check_budget(job, SCHEMES, 0)
    return job.result_bytes, int(str(caught.value).split("the result takes ")[1].split(" bytes")[0].replace(",", ""))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_suggestion_loads_fits_and_keeps_the_budget(tmp_path: Path, share: float) -> None:
    most, least = sizes()
    budget = int(least + share * (most - least))
    files = open_model(tiny_folder(GLM))
    suggestion = suggest(float_job(files), analysis(GLM), SCHEMES, budget, name="suggested")
    (tmp_path / "recipe.toml").write_text(suggestion.text, encoding="utf-8")
    recipe = load_recipe(str(tmp_path / "recipe.toml"))
    matches = match_recipe(recipe, files.manifest)
    quantised = {match.entry.role for match in matches if match.scheme is not None}
    assert not quantised & PROTECTED
    from jaxmoe.ptq.job import make_job

    assert make_job(files, recipe).result_bytes == suggestion.total_bytes <= budget
    if share == 1.0:
        assert not quantised and suggestion.solution.error == 0
    if share == 0.0:
        assert {match.scheme.name for match in matches if match.scheme is not None} == {"w4a8-g128"}


@pytest.mark.slow
def test_a_larger_budget_predicts_a_smaller_error() -> None:
    most, least = sizes()
    job = float_job(open_model(tiny_folder(GLM)))
    budgets = np.linspace(least, most, 9).astype(int).tolist()
    errors = [suggest(job, analysis(GLM), SCHEMES, budget, name="x").solution.error for budget in budgets]
    assert errors == sorted(errors, reverse=True) and errors[0] > errors[-1]


@pytest.mark.slow
def test_gate_and_up_share_a_scheme() -> None:
    suggestion = suggest(float_job(open_model(tiny_folder(GLM))), analysis(GLM), SCHEMES, 10**9, name="x")
    assert ("experts.gate", "experts.up") in suggestion.units
    assert all(not set(unit) & PROTECTED for unit in suggestion.units)


def test_refusals() -> None:
    job = float_job(open_model(tiny_folder(GLM)))
    with pytest.raises(RecipeError, match="a budget of 1,000 bytes is too small: with the smallest of w8a8-g128, w4a8"):
        check_budget(job, SCHEMES, 1000)
    with pytest.raises(RecipeError, match="w8a8-channel was not measured; the analysis has w8a8-g128, w4a8-g128"):
        suggest(job, {"schemes": list(NAMES)}, (parse_scheme("w8a8-channel"),), 10**9, name="x")
    with pytest.raises(RecipeError, match="none of w8a8-g128, w4a8-g128 has 16-bit activations"):
        schemes_of_bits(NAMES, 16)
    with pytest.raises(ConfigError, match="is quantised already"):
        float_job(open_model(tiny_quantized(GLM, "w8a8-g128")))
    check_schemes(job, SCHEMES)
