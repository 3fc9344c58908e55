"""What a quantisation without calibration writes: the source rounded to nearest, complete, from every encoding."""

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxmoe.errors import ConfigError, WeightsError
from jaxmoe.ptq.job import matched_table, output_specs, prepare
from jaxmoe.ptq.quantize import check_output, quantize
from jaxmoe.ptq.recipe import Recipe, load_recipe
from jaxmoe.weights.cells import hub_cells, own_cells
from jaxmoe.weights.encodings import Plain
from jaxmoe.weights.formats import QuantizationConfig
from jaxmoe.weights.load import ModelFiles, open_model
from jaxmoe.weights.packing import pairs_to_int8
from jaxmoe.weights.safetensors import open_checkpoint
from tests import tiny
from tests.ptq.jobs import change, digest, finished, round_to_nearest, run
from tests.running import tiny_folder
from tests.tolerances import TOLERANCES
from tests.weights import encoders
from tests.weights.test_cells import expected as view_of
from tests.weights.test_formats import encoded

GLM = {**tiny.CONFIGS["glm4_moe"], "hidden_size": 160}
"""160 inputs: a whole group of 128 and a ragged one of 32."""
RECIPE = load_recipe("w8a8-g128")
SIDE_FILES = {"tokenizer.json": "{}", "chat_template.jinja": "hello", "generation_config.json": "{}", "LICENSE": "free"}
VALUE = "model.layers.1.self_attn.v_proj.weight"


def write_source(folder: Path, config: dict[str, Any] | None = None, **options: Any) -> Path:
    tiny.write_checkpoint(folder, GLM if config is None else config, max_shard_bytes=300_000, **options)
    for name, text in SIDE_FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "leftover.bin").write_bytes(b"weights of another format")
    (folder / "a_folder").mkdir()
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def result(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("result") / "tiny-w8a8"
    quantize(prepare(source, RECIPE), out)
    return out


@pytest.fixture
def own(source: Path, tmp_path: Path) -> Path:
    """A copy of the source that a test may damage."""
    return Path(shutil.copytree(source, tmp_path / "own"))


def test_result_opens(result: Path) -> None:
    files = open_model(result)
    assert isinstance(files.quantization, QuantizationConfig) and files.kv_cache == "int8"
    by_role = {entry.role: files.schemes.get(entry.path) for entry in files.manifest.entries}
    assert {role for role, scheme in by_role.items() if scheme is None} == set(RECIPE.rule[0].roles) & set(by_role)
    assert {scheme.name for scheme in by_role.values() if scheme is not None} == {"w8a8-g128"}


def test_every_tensor_is_rounded_to_nearest_or_unchanged(source: Path, result: Path) -> None:
    before, after = open_checkpoint(source), open_model(result).checkpoint
    files = open_model(result)
    quantised = {
        name for e in files.manifest.entries if files.schemes.get(e.path) is not None for _, name in e.tensors()
    }
    assert len(quantised) == 2 * 3 + 3 + 2 * 8 * 3 + 2 * 3
    assert set(after.tensors) == set(before.tensors) | {f"{name}_scale" for name in quantised}
    for name, meta in before.tensors.items():
        weight = before.read(name)
        if name not in quantised:
            assert after.tensors[name].dtype == meta.dtype
            assert after.read(name).tobytes() == weight.tobytes(), name
            continue
        q, scale = round_to_nearest(weight)
        assert after.read(name).dtype == np.int8 and after.read(f"{name}_scale").dtype == np.float32
        np.testing.assert_array_equal(after.read(name), q, err_msg=name)
        np.testing.assert_array_equal(after.read(f"{name}_scale"), scale, err_msg=name)
        step = np.repeat(scale, 128, -1)[:, : weight.shape[-1]]
        assert (np.abs(q * step - weight) <= step * np.float32(0.5001)).all(), name
    for part in ("mlp.gate.weight", "input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        assert f"model.layers.1.{part}" in set(before.tensors) - quantised


def test_bfloat16_source(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "source", dtype=ml_dtypes.bfloat16)
    quantize(prepare(folder, RECIPE), tmp_path / "out")
    before, after = open_checkpoint(folder), open_model(tmp_path / "out").checkpoint
    q, scale = round_to_nearest(before.read(VALUE))
    np.testing.assert_array_equal(after.read(VALUE), q)
    np.testing.assert_array_equal(after.read(f"{VALUE}_scale"), scale)
    assert after.tensors["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16


def test_side_files(source: Path, result: Path) -> None:
    for name, text in SIDE_FILES.items():
        assert (result / name).read_text(encoding="utf-8") == text
    assert not (result / "leftover.bin").exists() and not (result / "a_folder").exists()
    config, own = (json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in (source, result))
    quantization = own.pop("quantization_config")
    assert own == config
    assert quantization["quant_method"] == "jaxmoe"
    assert quantization["tensors"]["model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"] == "w8a8-g128"


def test_report(source: Path, result: Path) -> None:
    report = json.loads((result / "jaxmoe_report.json").read_text(encoding="utf-8"))
    before, after = open_checkpoint(source), open_checkpoint(result)
    assert report["recipe"]["name"] == "w8a8-g128"
    assert report["source"] == {
        "format": "float",
        "config_sha256": hashlib.sha256((source / "config.json").read_bytes()).hexdigest(),
        "bytes": sum(meta.nbytes for meta in before.tensors.values()),
        "tensors": len(before.tensors),
    }
    assert report["result_bytes"] == sum(meta.nbytes for meta in after.tensors.values())
    assert report["zero_groups"] == 0
    tensors = {entry["name"]: entry for entry in report["tensors"]}
    assert set(tensors) == {name.removesuffix("_scale") for name in after.tensors if name.endswith("_scale")}
    assert (tensors[VALUE]["role"], tensors[VALUE]["scheme"]) == ("attention.v", "w8a8-g128")
    weight = before.read(VALUE).astype(np.float64)
    q, scale = round_to_nearest(before.read(VALUE))
    error = q * np.repeat(scale, 128, -1)[:, : weight.shape[-1]].astype(np.float64) - weight
    ratio = 10 * math.log10((weight**2).sum() / (error**2).sum())
    assert tensors[VALUE]["sqnr_db"] == pytest.approx(ratio, abs=0.01)
    ratios = sorted(entry["sqnr_db"] for entry in report["tensors"])
    assert report["sqnr_db"] == {"mean": pytest.approx(np.mean(ratios)), "min": ratios[0]}
    assert [entry["sqnr_db"] for entry in report["worst"]] == ratios[:10]


def test_two_runs_give_the_same_bytes(source: Path, result: Path, tmp_path: Path) -> None:
    calls: list[tuple[float, float, str]] = []
    ended = quantize(prepare(source, RECIPE), tmp_path / "again", progress=lambda *call: calls.append(call))
    assert digest(tmp_path / "again") == digest(result)
    assert ended.summary.tasks == len(calls) == len({task for _, _, task in calls})
    assert ended.resumed == 0 and ended.coverage is None
    done, totals = [call[0] for call in calls], {call[1] for call in calls}
    assert done == sorted(done) and totals == {done[-1]}, "what is done grows up to the total"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again"], "no partial folder stays behind"


def test_output_that_is_there_already(source: Path, result: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious.txt").write_text("mine", encoding="utf-8")
    for wrong in (full, full / "precious.txt", source):
        with pytest.raises(ConfigError, match=f"{wrong} exists already and is not an empty folder"):
            quantize(prepare(source, RECIPE), wrong)
        with pytest.raises(ConfigError, match="exists already"):
            check_output(wrong)
    assert [path.name for path in full.iterdir()] == ["precious.txt"]
    empty = tmp_path / "empty"
    empty.mkdir()
    quantize(prepare(source, RECIPE), empty)
    assert digest(empty) == digest(result)


def test_files_of_a_chosen_size(source: Path, result: Path, tmp_path: Path) -> None:
    """As large as a recipe's file asks for; the tensors are the same."""
    quantize(prepare(source, RECIPE), tmp_path / "out", max_shard_bytes=40_000)
    one, several = open_checkpoint(result), open_checkpoint(tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert one.tensors.keys() == several.tensors.keys()
    assert all(one.read(name).tobytes() == several.read(name).tobytes() for name in one.tensors)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_source_that_is_not_finite(own: Path, tmp_path: Path, value: float) -> None:
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    weight = open_checkpoint(own).read(name).copy()
    weight[3, 7] = value
    change(own, name, weight)
    with pytest.raises(WeightsError, match=f"{name}: the source holds NaN or infinite values; it cannot"):
        quantize(prepare(own, RECIPE), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_expert_of_zeros(own: Path, tmp_path: Path) -> None:
    stem = "model.layers.2.mlp.experts.3"
    names = [f"{stem}.{part}_proj.weight" for part in ("gate", "up", "down")]
    for name in names:
        change(own, name, np.zeros(open_checkpoint(own).tensors[name].shape))
    quantize(prepare(own, RECIPE), tmp_path / "out")
    after = open_model(tmp_path / "out").checkpoint
    report = json.loads((tmp_path / "out" / "jaxmoe_report.json").read_text(encoding="utf-8"))
    tensors = {entry["name"]: entry for entry in report["tensors"]}
    groups = 0
    for name in names:
        assert not after.read(name).any()
        scale = after.read(f"{name}_scale")
        assert (scale == 1).all(), "scales stay positive and finite, or the loader would refuse them"
        assert tensors[name]["zero_groups"] == scale.size and tensors[name]["sqnr_db"] is None
        groups += scale.size
    assert report["zero_groups"] == groups


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.gate.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_what_stays_float_and_is_not_finite(own: Path, tmp_path: Path, name: str, value: float) -> None:
    weight = open_checkpoint(own).read(name).copy()
    weight.reshape(-1)[-1] = value
    change(own, name, weight)
    with pytest.raises(WeightsError, match=f"{name}: the source holds NaN or infinite values; they would stay"):
        quantize(prepare(own, RECIPE), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def result_of(folder: Path, out: Path, recipe: Recipe = RECIPE) -> ModelFiles:
    job = prepare(folder, recipe)
    quantize(job, out)
    files = open_model(out)
    tensors = files.checkpoint.tensors
    assert {spec.name: spec.nbytes for spec in output_specs(job)} == {m.name: m.nbytes for m in tensors.values()}
    assert sum(row.result_bytes for row in matched_table(job)) == job.result_bytes == files.tensor_bytes
    assert sum(row.source_bytes for row in matched_table(job)) == job.source_bytes
    return files


def check_rounded(before: ModelFiles, after: ModelFiles, exact: Mapping[str, np.ndarray]) -> None:
    """Every tensor of a result is the source's values rounded to nearest, or those values.

    Args:
        before: the source.
        after: the result.
        exact: values of the source's logical tensors.
    """
    names = set()
    for entry in before.manifest.entries:
        scheme = after.schemes.get(entry.path)
        assert after.manifest[entry.path].hub == entry.own, entry.path
        values = np.empty(entry.shape, np.float32)
        for position, name in entry.tensors():
            values[position] = view_of(exact[name].astype(np.float32), entry.view, bias=entry.role == "experts.bias")
        for position, name in entry.own_tensors():
            names |= {name} if scheme is None else {name, f"{name}_scale"}
            found = after.checkpoint.read(name)
            if scheme is None:
                expected = values[position].astype(found.dtype)
                assert found.tobytes() == expected.tobytes(), name
            else:
                q, scale = round_to_nearest(values[position])
                np.testing.assert_array_equal(found, q, err_msg=name)
                np.testing.assert_array_equal(after.checkpoint.read(f"{name}_scale"), scale, err_msg=name)
    assert names == set(after.checkpoint.tensors)


@pytest.mark.parametrize("kind", [kind for kind in encoders.WRITERS if kind not in encoders.SCHEMES])
def test_source_that_is_decoded(tmp_path: Path, kind: str) -> None:
    """Rounded from its exact values; what stays float is bfloat16 where it was decoded, and copied where not."""
    folder, exact = encoded(kind)
    before = open_model(folder)
    after = result_of(folder, tmp_path / "out")
    check_rounded(before, after, exact)
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["quant_method"] == "jaxmoe"
    assert "quantization_config" not in config.get("text_config", {})
    report = json.loads((tmp_path / "out" / "jaxmoe_report.json").read_text(encoding="utf-8"))
    methods = {"fp8": "fp8", "mxfp8": "modelopt", "mxfp4": "mxfp4", "int4": "compressed-tensors"}
    assert report["source"]["format"] == methods[kind]
    for entry in before.manifest.entries:
        if after.schemes.get(entry.path) is not None:
            continue
        for hub, own in zip(hub_cells(entry), own_cells(entry), strict=True):
            plain = isinstance(before.source.stored[hub.tensor].encoding, Plain)
            stored = before.checkpoint.tensors[hub.tensor].dtype if plain else np.dtype(ml_dtypes.bfloat16)
            assert after.checkpoint.tensors[own.tensor].dtype == stored, own


@pytest.mark.parametrize("family", ["hy_v4", "gpt_oss", "deepseek_v3", "ernie4_5_moe"])
def test_source_that_shares_tensors(tmp_path: Path, family: str) -> None:
    """Fused, interleaved and transposed experts become tensors of their own; prediction blocks are rounded too."""
    folder = tiny_folder(family)
    before = open_model(folder)
    exact = {name: before.checkpoint.read(name) for name in before.checkpoint.tensors}
    after = result_of(folder, tmp_path / "out")
    check_rounded(before, after, exact)
    assert after.mtp_layers == before.mtp_layers == (1 if family in ("hy_v4", "deepseek_v3") else 0)
    if after.mtp_layers:
        assert after.schemes["mtp.block.ffn.up"] is not None and after.schemes.get("mtp.projection") is None


def test_own_tensor_of_all_experts(tmp_path: Path) -> None:
    """Where a family names no tensor for each expert, the result has one for all, written expert by expert."""
    job = prepare(tiny_folder("hy_v4"), RECIPE)
    down = job.files.manifest["moe.ffn.down"]
    one = dataclasses.replace(down, own=down.hub)
    matches = [dataclasses.replace(m, entry=one) if m.entry == down else m for m in job.matches]
    quantize(dataclasses.replace(job, matches=tuple(matches)), tmp_path / "out")
    before, after = job.files.checkpoint, open_checkpoint(tmp_path / "out")
    name = "model.layers.3.mlp.experts.down_proj"
    q, scale = round_to_nearest(before.read(name))
    np.testing.assert_array_equal(after.read(name), q)
    np.testing.assert_array_equal(after.read(f"{name}_scale"), scale)
    report = json.loads((tmp_path / "out" / "jaxmoe_report.json").read_text(encoding="utf-8"))
    names = [entry["name"] for entry in report["tensors"]]
    assert len(set(names)) == len(names) and {f"{name}[{expert}]" for expert in range(8)} <= set(names)


def test_fused_source_that_is_not_finite(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("hy_v4"), tmp_path / "own"))
    name = "model.layers.2.mlp.experts.gate_up_proj"
    weight = open_checkpoint(folder).read(name).copy()
    weight[5, -1, 3] = np.nan
    change(folder, name, weight)
    with pytest.raises(WeightsError, match=r" model.layers.2.mlp.experts.gate_up_proj\[5\]: the source holds NaN"):
        quantize(prepare(folder, RECIPE), tmp_path / "out")


@pytest.mark.parametrize("family", ["glm4_moe", "hy_v4"])
def test_pieces_do_not_change_the_bytes(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three experts at a time in two tasks, tables a few rows at a time."""
    job, expected = prepare(tiny_folder(family), RECIPE), finished(family, "w8a8-g128")
    whole = max(part.peak_bytes(job) for part in job.parts)
    for module in ("job", "write_part"):
        monkeypatch.setattr(f"jaxmoe.ptq.{module}.CHUNK_ELEMENTS", 3 * 32 * 64)
    monkeypatch.setattr("jaxmoe.ptq.graph.MOST_EXPERT_TASKS", 2)
    pieces = sum(min(2, len(part.cells)) for part in job.parts)
    assert run(job, tmp_path / "pieces").summary.tasks == pieces + len(job.not_loaded)
    ours, theirs = digest(tmp_path / "pieces"), digest(expected)
    assert {**ours, "jaxmoe_report.json": ""} == {**theirs, "jaxmoe_report.json": ""}
    # Sums of squares of one cell are added in another order than those of three at a time.
    reports = [
        json.loads((folder / "jaxmoe_report.json").read_text(encoding="utf-8"))["tensors"]
        for folder in (tmp_path / "pieces", expected)
    ]
    for one, other in zip(*reports, strict=True):
        assert one.pop("sqnr_db") == pytest.approx(other.pop("sqnr_db"), rel=TOLERANCES["sqnr"].value)
        assert one == other
    assert max(part.peak_bytes(job) for part in job.parts) < whole


def test_four_bits(tmp_path: Path) -> None:
    recipe = load_recipe("w4a8-experts")
    before, after = open_model(tiny_folder("hy_v4")), result_of(tiny_folder("hy_v4"), tmp_path / "out", recipe)
    entry = before.manifest["moe.ffn.up"]
    scheme = after.schemes["moe.ffn.up"]
    assert scheme is not None and scheme.weight_bits == 4
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    weight = before.checkpoint.read("model.layers.1.mlp.experts.gate_up_proj")[2, 32:]
    scale = np.abs(weight).max(-1, keepdims=True) * np.float32(1 / 7)
    np.testing.assert_array_equal(after.checkpoint.read(f"{name}_scale"), scale)
    integers = pairs_to_int8(after.checkpoint.read(f"{name}_packed"), entry.shape[-1])
    assert (np.abs(integers * scale - weight) <= scale * np.float32(0.5001)).all()
    assert name not in after.checkpoint.tensors


def test_files_that_describe_another_format_are_left_out(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(encoded("mxfp8")[0], tmp_path / "own"))
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MXFP8"}}', encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    result_of(folder, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


def test_tensors_that_are_not_loaded_are_copied(tmp_path: Path) -> None:
    """A vision tower, in whatever dtypes, and what transformers left behind."""
    plain = open_checkpoint(tiny_folder("kimi_k25"))
    extra = {
        "vision_tower.patch_embed.weight": np.ones((4, 8), ml_dtypes.float8_e4m3fn),
        "vision_tower.scale": np.full((), 2, np.float32),
        "mm_projector.empty": np.ones((0, 3), np.float32),
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    tensors = {name: plain.read(name) for name in plain.tensors} | extra
    config = json.loads((tiny_folder("kimi_k25") / "config.json").read_text(encoding="utf-8"))
    whole = encoders.write(tmp_path / "whole", config, tensors)
    job = prepare(whole, RECIPE)
    assert job.files.not_loaded == tuple(sorted(extra))
    run(job, tmp_path / "out")
    after = open_model(tmp_path / "out")
    assert after.not_loaded == job.files.not_loaded
    for name, array in extra.items():
        found = after.checkpoint.read(name)
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    rows = {row.role: row for row in matched_table(job)}
    assert rows["(not loaded, copied)"].tensors == len(extra)
