"""Calibrated quantisation: it runs the served model, smooths exactly, and rounds by what the experts really saw."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.errors import RecipeError, WeightsError
from jaxmoe.models.manifest import stack_of_layer
from jaxmoe.ops.linear.reference import quantize_tokens
from jaxmoe.ptq.expert_action import RoutedRows, RunExperts
from jaxmoe.ptq.export import FORMATS
from jaxmoe.ptq.job import make_job, prepare
from jaxmoe.ptq.layer_files import attended_key
from jaxmoe.ptq.moments import SMALLEST_IMPORTANCE, unit_moment
from jaxmoe.ptq.quantize import quantize
from jaxmoe.ptq.recipe import load_recipe
from jaxmoe.ptq.rounding import MethodName
from jaxmoe.ptq.rounding.cold import COLD_POLICIES, ColdPolicy
from jaxmoe.ptq.smooth import LARGEST_EXPONENT, Treatment, exponents, scale_weight
from jaxmoe.ptq.smooth_search import SHARES
from jaxmoe.weights.cells import cell_shape, hub_cells, own_cells
from jaxmoe.weights.load import open_model
from jaxmoe.weights.safetensors import open_checkpoint
from tests import tiny
from tests.ptq.jobs import (
    ALPHA,
    LENGTHS,
    all_rounded,
    change,
    digest,
    experts_rounded,
    finished,
    run,
    samples,
    some_samples,
    windows,
    with_calibration,
)
from tests.ptq.walk import Walk, walk, walked
from tests.running import run_logits, tiny_folder
from tests.tolerances import TOLERANCES

SLOW = ("hy_v4", "deepseek_v32", "gpt_oss", "hunyuan_v1_moe", "minimax_m2")
"""Hyper-connections, an indexer on latent attention, biases and a clamp, fused tensors, another router: what this code
does differently. All other families are made of the same parts."""
families = pytest.mark.parametrize(
    "family", ["glm4_moe", *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]
)
GLM, LAYER, EXPERTS = "glm4_moe", 1, 8


@families
def test_what_runs_is_the_served_model(family: str) -> None:
    """The residual stream after the last layer, brought to logits by hand, equals the engine's; padding included."""
    seen = walked(family)
    files, whole = seen.job.files, [row for row, length in enumerate(LENGTHS) if length == 37]
    config = files.manifest.config
    hidden = np.stack([seen.after[row] for row in whole]).astype(np.float64)
    read = {
        entry.path: files.source.read(entry, next(hub_cells(entry)), tuple(slice(0, size) for size in entry.shape))
        for entry in files.manifest.entries
        if entry.path.split(".")[0] in ("embed", "norm", "head", "head_hyper")
    }
    if config.hyper is not None:
        flat = hidden.reshape(*hidden.shape[:2], -1)
        gates = flat @ read["head_hyper.fn"].T / np.sqrt((flat**2).mean(-1, keepdims=True) + config.norm_eps)
        pre = 1 / (1 + np.exp(-(gates * read["head_hyper.scale"] + read["head_hyper.base"]))) + config.hyper.epsilon
        hidden = (pre[..., None] * hidden).sum(-2)
    normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + config.norm_eps) * read["norm.weight"]
    logits = normed @ read["embed.weight" if config.tied_head else "head.weight"].T
    served = run_logits(tiny_folder(family), tiny.token_ids(rows=len(LENGTHS))[whole])
    unit = max(1.0, float(served.std()))
    np.testing.assert_allclose(logits, served, rtol=0, atol=TOLERANCES["golden_logits"].value * unit)


@families
def test_smoothing_is_exact(family: str) -> None:
    """A float checkpoint with every treatment applied computes the same logits: powers of two move exponents only."""
    seen = walked(family)
    before, after = open_checkpoint(seen.job.files.folder), open_checkpoint(seen.folder)
    assert (
        sum(
            before.read(name).tobytes() != after.read(name).tobytes()
            for name in before.tensors.keys() & after.tensors.keys()
        )
        > 10
    )
    ids = tiny.token_ids()
    exact = run_logits(tiny_folder(family), ids)
    unit = max(1.0, float(exact.std()))
    smoothed = run_logits(seen.folder, ids)
    np.testing.assert_allclose(smoothed, exact, rtol=0, atol=TOLERANCES["same_logits"].value * unit)


@families
def test_every_routed_token_is_counted(family: str) -> None:
    """Tokens of each layer's experts add up to tokens times top-k; padding is routed nowhere."""
    seen, config = walked(family), walked(family).job.files.manifest.config
    layers = [record["layer"] for record in seen.records if "layer" in record]
    assert layers == list(range(config.dense_layers, config.layers))
    for layer in layers:
        assert sum(seen.counts(layer)) == sum(LENGTHS) * config.moe.router.top_k
        assert int(seen.stats(layer)["ffn.in"].count) == sum(LENGTHS)


def test_statistics_of_the_first_norm() -> None:
    """Against numpy: the input of the first attention is the normalised embedding of the real tokens."""
    files = walked(GLM, "gptq").job.files
    ids = np.concatenate([tiny.token_ids(rows=len(LENGTHS))[row, :n] for row, n in enumerate(LENGTHS)])
    table, gain = (
        files.source.read(entry, next(hub_cells(entry)), (slice(None),) * (2 if entry.path == "embed.weight" else 1))
        for entry in (files.manifest["embed.weight"], files.manifest["dense.attention_norm.weight"])
    )
    x = table[ids].astype(np.float64)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + files.manifest.config.norm_eps) * gain
    stats = walked(GLM, "gptq").stats(0)["attention.in"]
    assert int(stats.count) == len(x)
    rtol = TOLERANCES["moment"].value
    np.testing.assert_allclose(stats.absmax, np.abs(x).max(0), rtol=rtol)
    np.testing.assert_allclose(stats.squares, (x**2).sum(0), rtol=rtol)
    assert stats.gram is not None
    np.testing.assert_allclose(stats.gram, x.T @ x, rtol=0, atol=rtol * (x**2).sum(0).max())


def normed(seen: Walk, layer: int = LAYER) -> tuple[np.ndarray, np.ndarray]:
    """What the feed-forward is fed, [tokens, embed], and the chosen experts [tokens, top_k], in the shards' order."""
    arrays = [seen.context.work.load(attended_key(layer, shard)) for shard in seen.context.used_shards]
    return np.concatenate([a["normed"] for a in arrays]), np.concatenate([a["ids"] for a in arrays])


def weight(seen: Walk, path: str, expert: int | None = None) -> np.ndarray:
    """A matrix of layer 1, which is the first of its stack."""
    entry = seen.job.files.manifest[path]
    position = (0,) if expert is None else (0, expert)
    cell = next(cell for cell in hub_cells(entry) if cell.position == position)
    return seen.job.files.source.read(entry, cell, tuple(slice(0, n) for n in entry.own_shape)).astype(np.float32)


def hidden_of(seen: Walk, x: np.ndarray, expert: int) -> np.ndarray:
    gate, up = (x.astype(np.float64) @ weight(seen, f"moe.ffn.{name}", expert).T for name in ("gate", "up"))
    return gate / (1 + np.exp(-gate)) * up


def exponents_of(activations: np.ndarray, columns: np.ndarray, share: float = ALPHA) -> np.ndarray:
    """The oracle, in float64; channels that are never fed are left alone."""
    fed = activations > 0
    raw = np.zeros(len(fed))
    raw[fed] = share * np.log2(activations[fed]) - (1 - share) * np.log2(columns[fed])
    return np.where(fed, np.rint(raw - np.median(raw)), 0)


def test_every_expert_gets_the_tokens_that_chose_it() -> None:
    seen = walked(GLM)
    x, ids = normed(seen)
    for expert in range(EXPERTS):
        rows = RoutedRows(seen.context, seen.plan(LAYER), LAYER, expert)[:]
        np.testing.assert_array_equal(rows, x[(ids == expert).any(-1)])
        assert len(rows) == seen.counts(LAYER)[expert]


def expected_exponents(seen: Walk) -> tuple[np.ndarray, list[np.ndarray]]:
    """Of layer 1: of the input of all experts, and of each expert's hidden channels."""
    x, ids = normed(seen)
    readers = [weight(seen, f"moe.ffn.shared.{name}") for name in ("gate", "up")]
    readers += [weight(seen, f"moe.ffn.{name}", expert) for name in ("gate", "up") for expert in range(EXPERTS)]
    inputs = exponents_of(np.abs(x).max(0), np.abs(np.concatenate(readers)).max(0))
    hidden = []
    for expert in range(EXPERTS):
        fed = hidden_of(seen, x[(ids == expert).any(-1)], expert)
        tops = np.abs(weight(seen, "moe.ffn.down", expert)).max(0)
        hidden.append(exponents_of(np.abs(fed).max(0, initial=0), tops))
    return inputs, hidden


def test_treatments_of_experts() -> None:
    """Against float64: one exponent a channel for the common input, others for each expert's hidden channels."""
    seen = walked(GLM)
    inputs, hidden = expected_exponents(seen)
    assert inputs.any() and len({tuple(each) for each in hidden}) > 1
    for expert in range(EXPERTS):
        stem = f"model.layers.{LAYER}.mlp.experts.{expert}"
        rows, columns = np.exp2(hidden[expert])[:, None], np.exp2(inputs)
        for name, factor in [("gate", columns), ("up", columns / rows), ("down", rows.T)]:
            found = seen.weights[f"{stem}.{name}_proj.weight"]
            expected = weight(seen, f"moe.ffn.{name}", expert).astype(np.float64) * factor
            np.testing.assert_array_equal(found, expected, err_msg=f"{expert} {name}")
    smoothed = open_checkpoint(seen.folder)
    stem = f"model.layers.{LAYER}"
    router = smoothed.read(f"{stem}.mlp.gate.weight")
    np.testing.assert_array_equal(router, weight(seen, "moe.ffn.router.weight") * np.exp2(inputs))
    norm = seen.job.files.checkpoint.read(f"{stem}.post_attention_layernorm.weight")
    np.testing.assert_array_equal(smoothed.read(f"{stem}.post_attention_layernorm.weight"), norm * np.exp2(-inputs))


def unit(moment: np.ndarray) -> np.ndarray:
    """The oracle; of nothing: all alike."""
    moment = moment if moment.any() else np.ones(len(moment)) if moment.ndim == 1 else np.eye(len(moment))
    mean = np.diagonal(moment).mean() if moment.ndim == 2 else moment.mean()
    return moment / mean if moment.ndim == 2 else np.maximum(moment / mean, 1e-3)


def moment(x: np.ndarray, kind: str) -> np.ndarray:
    x = x.astype(np.float64)
    return x.T @ x / max(1, len(x)) if kind == "gptq" else (x**2).mean(0) if len(x) else np.zeros(x.shape[1])


KINDS: list[MethodName] = ["ssz", "gptq"]


@pytest.mark.parametrize("kind", KINDS)
def test_moments_that_experts_are_rounded_by(kind: MethodName) -> None:
    """Against float64: the tokens that chose an expert, shrunk towards the layer's, after smoothing."""
    seen = walked(GLM, kind)
    inputs, hidden = expected_exponents(seen)
    x, ids = normed(seen)
    for expert in range(EXPERTS):
        own = x[(ids == expert).any(-1)]
        fed = hidden_of(seen, own, expert)
        of_hidden = moment(fed, kind)
        level = np.diagonal(of_hidden).mean() if kind == "gptq" else of_hidden.mean()
        alike = level * (np.eye(fed.shape[1]) if kind == "gptq" else np.ones(fed.shape[1]))
        for name, mine, prior, shift in [
            ("gate", moment(own, kind), moment(x, kind), inputs),
            ("up", moment(own, kind), moment(x, kind), inputs),
            ("down", of_hidden, alike, hidden[expert]),
        ]:
            share = len(own) / (len(own) + len(shift))
            factor = np.exp2(-shift)
            expected = share * mine + (1 - share) * prior
            expected = unit(expected * (factor[:, None] * factor if kind == "gptq" else factor**2))
            found = seen.moments[f"model.layers.{LAYER}.mlp.experts.{expert}.{name}_proj.weight"]
            assert found is not None and found.dtype == np.float32
            largest = np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCES["moment"].value * largest)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_that_other_matrices_are_rounded_by(kind: MethodName) -> None:
    seen = walked(GLM, kind)
    inputs, _ = expected_exponents(seen)
    x, _ = normed(seen)
    factor = np.exp2(-inputs)
    expected = unit(moment(x, kind) * (factor[:, None] * factor if kind == "gptq" else factor**2))
    for name in ("gate", "up"):
        found = seen.moments[f"model.layers.{LAYER}.mlp.shared_experts.{name}_proj.weight"]
        assert found is not None
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCES["moment"].value * np.abs(expected).max())
    known = {label for label, each in seen.moments.items() if each is not None}
    assert known == set(seen.weights), "no matrix of a layer is rounded without"


def test_one_token(tmp_path: Path) -> None:
    """Two of eight experts see it, by the policies the others get the layer's moment, none, or are refused."""
    one = samples(tiny.token_ids(rows=1), [1])
    by_policy: dict[ColdPolicy, Walk] = {}
    for policy in COLD_POLICIES:
        recipe = all_rounded("ssz", cold_expert=policy, expert_tokens=1)
        if policy == "error":
            with pytest.raises(
                RecipeError, match=r"layer 1, expert \d saw 0 calibration tokens, fewer than the 1 that"
            ):
                walk(GLM, recipe, one, tmp_path / policy)
            continue
        by_policy[policy] = walk(GLM, recipe, one, tmp_path / policy)
    x, ids = normed(by_policy["shrink"])
    assert ids.shape == (1, 2)
    inputs, hidden = expected_exponents(by_policy["shrink"])
    layer = unit((x[0].astype(np.float64) * np.exp2(-inputs)) ** 2)
    rtol = TOLERANCES["moment"].value
    for expert in range(EXPERTS):
        stem = f"model.layers.{LAYER}.mlp.experts.{expert}"
        by: dict[str, np.ndarray | None] = {
            policy: each.moments[f"{stem}.up_proj.weight"] for policy, each in by_policy.items()
        }
        known = ["shrink", "all_tokens", *(["rtn"] if expert in ids[0] else [])]
        for policy in known:
            found = by[policy]
            assert found is not None
            np.testing.assert_allclose(found, layer, rtol=rtol)
        if expert in ids[0]:
            continue
        assert (hidden[expert] == 0).all(), "hidden channels that were never fed are not smoothed"
        np.testing.assert_array_equal(by["rtn"], 1)
        np.testing.assert_array_equal(by_policy["shrink"].moments[f"{stem}.down_proj.weight"], 1)


@pytest.mark.slow
def test_one_token_through_the_whole_run(tmp_path: Path) -> None:
    """Also of GPTQ: the Hessian of one token has one direction, that of none is nothing."""
    one = samples(tiny.token_ids(rows=1), [1])
    for policy in ("shrink", "rtn"):
        recipe = experts_rounded("gptq", cold_expert=policy, expert_tokens=1)
        ended = run(prepare(tiny_folder(GLM), recipe), tmp_path / policy, one)
        assert ended.coverage is not None and ended.coverage.tokens == 2 * 2 and ended.coverage.min_tokens == 0
        assert np.isfinite(run_logits(tmp_path / policy, tiny.token_ids())).all()


@pytest.mark.slow
def test_a_method_that_gives_up_is_told_and_refused_when_strict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No samples give products that no damping makes definite: those of one projection are turned over."""
    made = RunExperts._moment

    def turned(action: RunExperts, *arguments: Any) -> np.ndarray | None:
        moment, (_, _, part, name, *_, where) = made(action, *arguments), arguments
        assert moment is not None, part
        return -moment if (name, where) == ("up", "layer 1, expert 0") else moment

    monkeypatch.setattr(RunExperts, "_moment", turned)
    job, data = prepare(tiny_folder(GLM), experts_rounded("gptq")), some_samples()
    ended = run(job, tmp_path / "out", data)
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert ended.to_nearest == (name,)
    report = json.loads((tmp_path / "out" / "jaxmoe_report.json").read_text(encoding="utf-8"))
    assert [tensor["name"] for tensor in report["tensors"] if tensor["to_nearest"]] == [name]
    message = rf"{name}: the products of its inputs are not positive definite; use more samples"
    with pytest.raises(RecipeError, match=message):
        quantize(job, tmp_path / "strict", calibration=data, devices=jax.devices()[:1], strict=True)
    assert not (tmp_path / "strict").exists()


@pytest.mark.slow
def test_the_width_of_padding_does_not_matter() -> None:
    """A few tokens in programs for 40 and for 104: the same routing, treatments, and moments up to rounding."""
    near = walked(GLM)
    far = walk(GLM, all_rounded("ssz"), some_samples(width=104), near.folder.with_name("wide"))
    for layer in (1, 2):
        assert near.counts(layer) == far.counts(layer)
    treatments = {key for key in near.plan(LAYER) if key.startswith(("treatment:", "pairs", "first"))}
    assert len(treatments) > 5
    for key in treatments:
        np.testing.assert_array_equal(near.plan(LAYER)[key], far.plan(LAYER)[key], err_msg=key)
    assert near.weights.keys() == far.weights.keys()
    for label, array in near.weights.items():
        np.testing.assert_array_equal(array, far.weights[label], err_msg=label)
        one, other = near.moments[label], far.moments[label]
        assert one is not None and other is not None
        np.testing.assert_allclose(one, other, rtol=TOLERANCES["moment"].value)
    for one, other in zip(near.after, far.after, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCES["same_logits"].value)


@pytest.mark.slow
def test_what_stands_in_the_padding_does_not_matter(tmp_path: Path) -> None:
    plain = some_samples()
    dirty = replace(plain, tokens=np.where(plain.tokens < 0, np.int32(7), plain.tokens))
    for name, data in (("plain", plain), ("dirty", dirty)):
        run(prepare(tiny_folder(GLM), load_recipe("w8a8-g128-smooth")), tmp_path / name, data)
    assert digest(tmp_path / "plain") == digest(tmp_path / "dirty")


CASES = [
    (GLM, "w8a8-g128-smooth", 2),
    *(
        pytest.param(family, recipe, devices, marks=pytest.mark.slow)
        for devices in (2, 3, 5, 8)
        for family, recipe in [(GLM, "w4a8-experts-gptq"), ("deepseek_v32", "w4a8-experts-ssz")]
    ),
    pytest.param("hy_v4", "w8a8-g128-smooth", 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "recipe", "devices"), CASES)
def test_any_number_of_devices_writes_the_same_bytes(family: str, recipe: str, devices: int, tmp_path: Path) -> None:
    ended = run(prepare(tiny_folder(family), load_recipe(recipe)), tmp_path / "out", windows(), devices)
    assert len(ended.summary.shares) == devices and ended.summary.tasks == sum(s.tasks for s in ended.summary.shares)
    assert digest(tmp_path / "out") == digest(finished(family, recipe))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_result_serves_and_says_what_it_saw() -> None:
    out, data = finished(GLM, "w8a8-g128-smooth"), windows()
    assert np.isfinite(run_logits(out, tiny.token_ids())).all()
    report = json.loads((out / "jaxmoe_report.json").read_text(encoding="utf-8"))["calibration"]
    assert report["data_sha256"] == data.data_sha256 and report["samples"]["samples"] == 18
    assert np.sum(report["tokens_per_expert"], axis=1).tolist() == [2 * int(data.lengths.sum())] * 2
    assert report["coverage"]["tokens"] == 4 * int(data.lengths.sum())


@pytest.mark.parametrize("name", ["compressed-tensors", "ascendv1"])
def test_other_formats_hold_the_same_integers(name: str, tmp_path: Path) -> None:
    """Through the whole run, read back by our own reader."""
    ours = open_model(finished(GLM, "w8a8-channel"))
    run(make_job(open_model(tiny_folder(GLM)), load_recipe("w8a8-channel"), FORMATS[name]), tmp_path / "out", windows())
    theirs, count = open_model(tmp_path / "out"), 0
    rounded = [{path: scheme for path, scheme in f.schemes.items() if scheme is not None} for f in (ours, theirs)]
    assert rounded[0] == rounded[1]
    for entry in ours.manifest.entries:
        whole = tuple(slice(0, size) for size in cell_shape(entry))
        for one, other in zip(own_cells(entry), hub_cells(theirs.manifest[entry.path]), strict=True):
            pieces = ("values", "scale") if ours.schemes.get(entry.path) is not None else (None,)
            for piece in pieces:
                index = whole if piece != "scale" else (whole[0], slice(0, 1))
                arguments = () if piece is None else (piece,)
                expected = ours.source.read(entry, one, index, *arguments)
                found = theirs.source.read(theirs.manifest[entry.path], other, index, *arguments)
                assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes()), one.label
                count += piece == "values"
    assert count == 4 * 3 + 3 + 2 * 8 * 3 + 2 * 3
    reports = [
        json.loads((folder / "jaxmoe_report.json").read_text(encoding="utf-8"))
        for folder in (tmp_path / "out", finished(GLM, "w8a8-channel"))
    ]
    assert reports[0]["tensors"] == reports[1]["tensors"] and reports[0]["calibration"] == reports[1]["calibration"]
    np.testing.assert_array_equal(
        run_logits(tmp_path / "out", tiny.token_ids()), run_logits(finished(GLM, "w8a8-channel"), tiny.token_ids())
    )


def output_errors(seen: Walk, out: Path) -> float:
    """Error of layer 1's experts on the tokens that chose each, in float64, of the smoothed weights."""
    files, total = open_model(out), 0.0
    x, ids = normed(seen)
    inputs, hidden = expected_exponents(seen)
    for expert in range(EXPERTS):
        own = x[(ids == expert).any(-1)].astype(np.float64)
        fed = {"gate": own * np.exp2(-inputs), "up": own * np.exp2(-inputs)}
        fed["down"] = hidden_of(seen, own, expert) * np.exp2(-hidden[expert])
        for name, rows in fed.items():
            entry = files.manifest[f"moe.ffn.{name}"]
            cell = next(cell for cell in hub_cells(entry) if cell.position == (0, expert))
            found = files.source.read(entry, cell, tuple(slice(0, n) for n in entry.own_shape))
            exact = seen.weights[f"model.layers.{LAYER}.mlp.experts.{expert}.{name}_proj.weight"]
            total += float(((rows @ (found.astype(np.float64) - exact).T) ** 2).sum())
    return total


@pytest.mark.slow
def test_more_knowledge_is_less_error(tmp_path: Path) -> None:
    """4-bit experts through the whole run, on the layer's own samples: products of inputs, their squares, nothing."""
    errors = {}
    methods: list[MethodName] = ["gptq", "ssz", "nearest"]
    for method in methods:
        run(prepare(tiny_folder(GLM), experts_rounded(method)), tmp_path / method, some_samples())
        errors[method] = output_errors(walked(GLM), tmp_path / method)
    assert errors["gptq"] < 0.6 * errors["ssz"] and errors["ssz"] < 0.97 * errors["nearest"], errors


def test_smoothing_makes_outliers_cheap() -> None:
    """A channel a hundred times larger than the others: the error of INT8 activations falls by half and more."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((64, 96)).astype(np.float32)
    x[:, 5] *= 100
    weight = generator.standard_normal((32, 96)).astype(np.float32)
    chosen = exponents(np.abs(x).max(0), np.abs(weight).max(0), 0.8)
    assert chosen[5] >= 4
    errors = []
    for shift in (np.zeros(96, np.int8), chosen):
        q, scale = quantize_tokens(x * np.exp2(-shift.astype(np.float32)))
        restored = q.astype(np.float64) * scale[:, None] * np.exp2(shift.astype(np.float64))
        errors.append(np.sqrt(np.mean((restored @ weight.T - x.astype(np.float64) @ weight.T) ** 2)))
    assert errors[1] < 0.5 * errors[0]


@given(
    st.lists(st.floats(0, 1e6, width=32), min_size=4, max_size=4),
    st.lists(st.floats(0, 1e6, width=32), min_size=4, max_size=4),
    st.floats(0.05, 1),
)
def test_exponents_are_bounded_and_zero_where_nothing_is_known(a: list[float], w: list[float], alpha: float) -> None:
    chosen = exponents(np.array(a), np.array(w), alpha)
    assert chosen.dtype == np.int8 and (np.abs(chosen) <= LARGEST_EXPONENT).all()
    assert (chosen[(np.array(a) == 0) | (np.array(w) == 0)] == 0).all()


def test_treatments_are_exact() -> None:
    array = np.array([[1.25, -3], [0, 7]], np.float32)
    rows, columns = np.array([1, -2], np.int8), np.array([0, 3], np.int8)
    treatment = Treatment(rows=rows, columns=columns)
    np.testing.assert_array_equal(scale_weight(array, treatment), [[2.5, -48], [0, 14]])
    np.testing.assert_array_equal(scale_weight(array[0], Treatment(rows=rows)), [2.5, -0.75])
    assert scale_weight(array, treatment).dtype == np.float32
    assert Treatment().is_empty and not treatment.is_empty


def test_importance_of_unknown_channels() -> None:
    np.testing.assert_array_equal(unit_moment(np.zeros(3)), np.ones(3, np.float32))
    np.testing.assert_array_equal(unit_moment(np.zeros((3, 3))), np.eye(3, dtype=np.float32))
    np.testing.assert_allclose(unit_moment(np.array([0.0, 1.0, 2.0])), [float(SMALLEST_IMPORTANCE), 1, 2])
    np.testing.assert_array_equal(unit_moment(np.diag([2.0, 6.0])), np.diag([0.5, 1.5]))


@pytest.mark.parametrize("part", ["self_attn.o_proj", "mlp.experts.{}.down_proj"])
def test_floats_that_overflow_are_named(part: str, tmp_path: Path) -> None:
    """Weights that are finite and give infinite outputs: what rounds by them would be nonsense."""
    source = tiny.write_checkpoint(tmp_path / "source", tiny.CONFIGS[GLM])
    busiest = int(np.argmax(walked(GLM).counts(LAYER)))
    name = f"model.layers.{LAYER}.{part.format(busiest)}.weight"
    change(source, name, np.full(open_checkpoint(source).tensors[name].shape, 3e38))
    where = f"layer {LAYER}" if "{}" not in part else f"layer {LAYER}, expert {busiest}"
    with pytest.raises(WeightsError, match=f"{where} of the float model gives NaN or infinite values on the samples"):
        run(prepare(source, experts_rounded("ssz")), tmp_path / "out", some_samples())
    assert not (tmp_path / "out").exists()


def test_samples_and_recipes_go_together(tmp_path: Path) -> None:
    files = open_model(tiny_folder(GLM))
    for recipe, data, message in [
        ("w4a8-experts-ssz", None, "recipe w4a8-experts-ssz is calibrated and needs samples"),
        ("w8a8-g128", windows(), "recipe w8a8-g128 takes no samples"),
    ]:
        with pytest.raises(RecipeError, match=message):
            quantize(make_job(files, load_recipe(recipe)), tmp_path / "out", calibration=data)
    assert not list(tmp_path.iterdir())


def test_without_smoothing_weights_are_as_they_were() -> None:
    seen = walk(
        GLM,
        with_calibration(all_rounded("ssz"), smooth=None),
        some_samples(),
        walked(GLM).folder.with_name("unsmoothed"),
    )
    before, after = seen.job.files.checkpoint, open_checkpoint(seen.folder)
    for name in before.tensors:
        np.testing.assert_array_equal(after.read(name), before.read(name), err_msg=name)
    x, _ = normed(seen)
    found = seen.moments[f"model.layers.{LAYER}.mlp.shared_experts.up_proj.weight"]
    assert found is not None
    np.testing.assert_allclose(found, unit(moment(x, "ssz")), rtol=TOLERANCES["moment"].value)


def test_each_expert_may_choose_its_share() -> None:
    """What it chooses is one of those that are tried, not all choose alike, and the float model stays the same."""
    folder = walked(GLM).folder.with_name("searched")
    seen = walk(GLM, all_rounded("ssz", search_hidden=True), some_samples(), folder)
    x, ids = normed(seen)
    chosen = []
    for expert in range(EXPERTS):
        fed = np.abs(hidden_of(seen, x[(ids == expert).any(-1)], expert)).max(0, initial=0)
        tops = np.abs(weight(seen, "moe.ffn.down", expert)).max(0)
        tried = [exponents_of(fed, tops, share) for share in (0, *SHARES)]
        tried[0] = np.zeros_like(tops)
        found = seen.weights[f"model.layers.{LAYER}.mlp.experts.{expert}.down_proj.weight"]
        factors = found.astype(np.float64) / weight(seen, "moe.ffn.down", expert)
        fits = [index for index, each in enumerate(tried) if (factors == np.exp2(each)).all()]
        assert fits, expert
        chosen.append(fits[0])
    assert len(set(chosen)) > 1, chosen
    exact = run_logits(tiny_folder(GLM), tiny.token_ids())
    unit = max(1.0, float(exact.std()))
    smoothed = run_logits(seen.folder, tiny.token_ids())
    np.testing.assert_allclose(smoothed, exact, rtol=0, atol=TOLERANCES["same_logits"].value * unit)


def test_layers_and_their_stacks() -> None:
    config = open_model(tiny_folder(GLM)).manifest.config
    assert [stack_of_layer(config, layer) for layer in range(3)] == [("dense", 0), ("moe", 0), ("moe", 1)]
    assert len(jax.devices()) == 8
