"""Calibrated quantisation: the first pass is the served model, smoothing is exact, devices do not change a byte."""

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.errors import RecipeError
from jaxmoe.models.manifest import stack_of_layer
from jaxmoe.ops.linear.reference import quantize_tokens
from jaxmoe.ptq.calib import sample_windows
from jaxmoe.ptq.calib_documents import TokenizedDocument
from jaxmoe.ptq.calibrate import quantize_calibrated
from jaxmoe.ptq.layer_run import LayerRunner, embed_samples, load_layer
from jaxmoe.ptq.observe import Observed, TreatmentStore, importance_of, observe, scale_weight
from jaxmoe.ptq.recipe import Recipe, load_recipe, match_recipe, schemes_of_matches
from jaxmoe.ptq.smooth import LARGEST_EXPONENT, Treatment, exponents
from jaxmoe.ptq.stream import make_job, quantize
from jaxmoe.weights.cells import hub_cells
from jaxmoe.weights.load import ModelFiles, open_model
from jaxmoe.weights.writer import CheckpointWriter, TensorSpec
from tests import tiny
from tests.running import run_logits, scratch, tiny_folder
from tests.tolerances import TOLERANCES

QUICK = ("glm4_moe", "hy_v4")
"""Families of the default run; the others are marked slow."""
families = pytest.mark.parametrize(
    "family",
    [*QUICK, *(pytest.param(f, marks=pytest.mark.slow) for f in tiny.CONFIGS if f not in QUICK)],
)
WIDTH = 40


@cache
def files_of(family: str) -> ModelFiles:
    return open_model(tiny_folder(family))


def smooth_recipe() -> Recipe:
    return load_recipe("w4a8-experts-ssz")


@cache
def observed(family: str, devices: int = 1) -> tuple[Path, Observed]:
    """Treatments of a tiny model from its goldens' tokens and shorter samples."""
    files = files_of(family)
    ids = np.full((5, WIDTH), -1, np.int32)
    lengths = [37, 20, 1, 37, 9]
    for row, length in enumerate(lengths):
        ids[row, :length] = tiny.token_ids(rows=5)[row, :length]
    folder = scratch() / f"{family}-observed-{devices}"
    seen = observe(
        files.source,
        files.manifest,
        schemes_of_matches(match_recipe(smooth_recipe(), files.manifest)),
        token_ids=ids,
        lengths=lengths,
        alpha=0.7,
        folder=folder,
        devices=jax.devices()[:devices],
    )
    return folder, seen


@families
def test_the_first_pass_is_the_served_model(family: str) -> None:
    """The residual stream after the last layer, brought to logits by hand, equals the engine's; padding included."""
    files, ids = files_of(family), tiny.token_ids()
    config = files.manifest.config
    padded = np.full((2, WIDTH), -1, np.int32)
    padded[:, :37] = ids
    samples = list(embed_samples(files.source, files.manifest, padded, [37, 37]))
    for layer in range(config.layers):
        weights = load_layer(files.source, files.manifest, layer)
        samples, _, _ = LayerRunner(config, layer, weights, WIDTH, jax.devices()[:1]).run(samples)
    hidden = np.stack([sample.x[:37] for sample in samples]).astype(np.float64)
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
    served = run_logits(tiny_folder(family), ids)
    unit = max(1.0, float(served.std()))
    np.testing.assert_allclose(logits, served, rtol=0, atol=TOLERANCES["golden_logits"].value * unit)


@families
def test_smoothing_is_exact(family: str, tmp_path: Path) -> None:
    """A float checkpoint with every treatment applied computes the same logits: powers of two move exponents only."""
    files, (folder, _) = files_of(family), observed(family)
    store, changed = TreatmentStore(folder, files.manifest), 0
    entries = [entry for entry in files.manifest.entries if not entry.path.startswith("mtp.")]
    specs = [
        TensorSpec(name=name, dtype=np.dtype(np.float32), shape=entry.own_shape)
        for entry in entries
        for _, name in entry.own_tensors()
    ]
    out = tmp_path / "smoothed"
    out.mkdir()
    with CheckpointWriter(out, specs) as writer:
        for entry in entries:
            for cell, (position, name) in zip(hub_cells(entry), entry.own_tensors(), strict=True):
                array = files.source.read(entry, cell, tuple(slice(0, n) for n in entry.own_shape))
                treatment = store.get(entry, position[0]) if position else Treatment()
                scaled = scale_weight(array, treatment, cell.position[1:])
                changed += int(not np.array_equal(scaled, array))
                writer.write(name, scaled)
    (out / "config.json").write_text((files.folder / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    assert changed > 10
    before = run_logits(files.folder, tiny.token_ids())
    unit = max(1.0, float(before.std()))
    after = run_logits(out, tiny.token_ids())
    np.testing.assert_allclose(after, before, rtol=0, atol=TOLERANCES["same_logits"].value * unit)


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_any_number_of_devices_gives_the_same_files(devices: int) -> None:
    (one, seen), (many, again) = observed("glm4_moe"), observed("glm4_moe", devices)
    np.testing.assert_array_equal(seen.counts, again.counts)
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in many.iterdir()) and len(names) == 3
    for name in names:
        with np.load(one / name) as first, np.load(many / name) as second:
            assert set(first) == set(second)
            for key in first:
                assert first[key].tobytes() == second[key].tobytes(), (name, key)


@families
def test_every_routed_token_is_counted(family: str) -> None:
    """Tokens of each layer's experts add up to tokens times top-k; padding is routed nowhere."""
    config, (_, seen) = files_of(family).manifest.config, observed(family)
    assert seen.tokens == 37 + 20 + 1 + 37 + 9
    np.testing.assert_array_equal(seen.counts.sum(1), seen.tokens * config.moe.router.top_k)


def test_statistics_of_the_first_norm() -> None:
    """Against numpy: the input of the first attention is the normalised embedding of the real tokens."""
    files, (folder, _) = files_of("glm4_moe"), observed("glm4_moe")
    config = files.manifest.config
    ids = np.concatenate([tiny.token_ids(rows=5)[row, :n] for row, n in enumerate([37, 20, 1, 37, 9])])
    table, gain = (
        files.source.read(entry, next(hub_cells(entry)), (slice(None),) * (2 if entry.path == "embed.weight" else 1))
        for entry in (files.manifest["embed.weight"], files.manifest["dense.attention_norm.weight"])
    )
    x = table[ids].astype(np.float64)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * gain
    entry = files.manifest["dense.attention.v"]
    treatment = TreatmentStore(folder, files.manifest).get(entry, 0)
    assert treatment.columns is not None and treatment.importance is not None
    expected = (normed**2).mean(0) * np.exp2(-2.0 * treatment.columns)
    np.testing.assert_allclose(treatment.importance, expected, rtol=1e-5)


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


def test_importance_of_unknown_channels() -> None:
    assert (importance_of(Treatment(), (), 3) == 1).all()
    zero = Treatment(importance=np.zeros((2, 3), np.float32))
    assert (importance_of(zero, (1,), 3) == 1).all()
    some = Treatment(importance=np.array([0.0, 1.0, 2.0], np.float32))
    np.testing.assert_allclose(importance_of(some, (), 3), [1e-3, 1, 2])


def samples() -> tuple[TokenizedDocument, ...]:
    generator = np.random.default_rng(5)
    return tuple(
        TokenizedDocument(domain=name, where=name, ids=generator.integers(3, 256, 400).astype(np.int32))
        for name in ("a", "b")
    )


@pytest.mark.parametrize("family", ["glm4_moe", "hy_v4"])
def test_whole_runs_on_one_and_on_three_devices_write_the_same_bytes(family: str, tmp_path: Path) -> None:
    job = make_job(files_of(family), smooth_recipe())
    data = sample_windows(samples(), separator=2, samples=6, min_tokens=8, max_tokens=WIDTH)
    for devices in (1, 3):
        coverage = quantize_calibrated(job, data, tmp_path / str(devices), devices=jax.devices()[:devices])
        assert coverage.tokens > 0
    first, second = tmp_path / "1", tmp_path / "3"
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    assert not list(tmp_path.glob("*.observed")) and not list(tmp_path.glob("*.partial"))
    logits = run_logits(first, tiny.token_ids())
    assert np.isfinite(logits).all()
    assert '"tokens_per_expert"' in (first / "jaxmoe_report.json").read_text(encoding="utf-8")


def test_calibrated_recipes_need_their_first_pass(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="needs the treatments of a first pass"):
        quantize(make_job(files_of("glm4_moe"), smooth_recipe()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_and_their_stacks() -> None:
    config = files_of("glm4_moe").manifest.config
    assert [stack_of_layer(config, layer) for layer in range(3)] == [("dense", 0), ("moe", 0), ("moe", 1)]
