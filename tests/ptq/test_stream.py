"""The stream: what it writes is the source rounded to nearest, complete or absent, and the same bytes every time."""

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxmoe.errors import ConfigError, WeightsError
from jaxmoe.ptq.recipe import load_recipe
from jaxmoe.ptq.stream import check_output, matched_table, output_specs, prepare, quantize
from jaxmoe.weights.load import open_model
from jaxmoe.weights.safetensors import open_checkpoint
from jaxmoe.weights.writer import CheckpointWriter, TensorSpec
from tests import tiny

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


def change(folder: Path, tensor: str, values: np.ndarray) -> None:
    """Overwrites a tensor of a checkpoint in place."""
    meta = open_checkpoint(folder).tensors[tensor]
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        if tensor in header:
            start, stop = (8 + size + offset for offset in header[tensor]["data_offsets"])
            data = np.ascontiguousarray(values, meta.dtype).tobytes()
            assert len(data) == stop - start
            path.write_bytes(raw[:start] + data + raw[stop:])
            return
    raise AssertionError(tensor)


def round_to_nearest(weight: np.ndarray, group: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """The oracle: symmetric, half to even, one scale per group of inputs, all in float32."""
    q, scales = [], []
    for start in range(0, weight.shape[-1], group):
        part = weight[..., start : start + group].astype(np.float32)
        amax = np.abs(part).max(-1, keepdims=True)
        inverse = np.float32(127) / np.where(amax == 0, np.float32(127), amax)
        q.append(np.clip(np.rint(part * inverse), -127, 127).astype(np.int8))
        scales.append(np.where(amax == 0, np.float32(1), amax * np.float32(1 / 127)))
    return np.concatenate(q, -1), np.concatenate(scales, -1)


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir()) if p.is_file()}


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
    assert files.quantization is not None and files.quantization.kv_cache == "int8"
    by_role = {entry.role: files.schemes.get(entry.path) for entry in files.manifest.entries}
    assert {role for role, scheme in by_role.items() if scheme is None} == set(RECIPE.rule[0].roles)
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


def test_predicted_bytes_are_the_written_ones(source: Path, result: Path) -> None:
    job = prepare(source, RECIPE)
    after = open_checkpoint(result).tensors
    assert {spec.name: spec.nbytes for spec in output_specs(job)} == {m.name: m.nbytes for m in after.values()}
    table = matched_table(job)
    assert sum(row.source_bytes for row in table) == job.source_bytes
    assert sum(row.result_bytes for row in table) == job.result_bytes < job.source_bytes
    assert sum(row.tensors for row in table) == len(job.files.checkpoint.tensors)
    assert 0 < job.peak_bytes < 4 * job.source_bytes


def test_two_runs_give_the_same_bytes(source: Path, result: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    quantize(prepare(source, RECIPE), tmp_path / "again", lambda done, total: calls.append((done, total)))
    assert digest(tmp_path / "again") == digest(result)
    assert [done for done, _ in calls] == list(range(1, len(calls) + 1)) and calls[-1] == (len(calls), len(calls))


def test_killed_run_leaves_nothing_and_can_be_repeated(source: Path, result: Path, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(done: int, total: int) -> None:
        if done == total // 2:
            raise Killed

    out = tmp_path / "out"
    with pytest.raises(Killed):
        quantize(prepare(source, RECIPE), out, kill)
    assert not out.exists()
    quantize(prepare(source, RECIPE), out)
    assert digest(out) == digest(result)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "no partial folder stays behind"


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


def test_quantised_source(result: Path) -> None:
    with pytest.raises(ConfigError, match=r"is quantised already \(jaxmoe\); give the float checkpoint"):
        prepare(result, RECIPE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_source_that_is_not_finite(own: Path, tmp_path: Path, value: float) -> None:
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    weight = open_checkpoint(own).read(name).copy()
    weight[3, 7] = value
    change(own, name, weight)
    with pytest.raises(WeightsError, match=f"^{name}: the source holds NaN or infinite values"):
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


def test_tensors_that_are_not_loaded_are_copied(tmp_path: Path) -> None:
    """Multi-token-prediction layers follow the last block; the stream carries them along."""
    plain = open_checkpoint(write_source(tmp_path / "plain"))
    extra = {f"model.layers.3.{part}.weight": np.ones((4, 8), np.float32) for part in ("eh_proj", "enorm")}
    tensors = {name: plain.read(name) for name in plain.tensors} | extra
    whole = tmp_path / "whole"
    with CheckpointWriter(whole, [TensorSpec(name=n, dtype=a.dtype, shape=a.shape) for n, a in tensors.items()]) as out:
        for name, array in tensors.items():
            out.write(name, array)
    shutil.copyfile(tmp_path / "plain" / "config.json", whole / "config.json")
    job = prepare(whole, RECIPE)
    assert job.files.unused and all(name.startswith("model.layers.3.") for name in job.files.unused)
    quantize(job, tmp_path / "out")
    after = open_model(tmp_path / "out")
    assert after.unused == job.files.unused
    for name in after.unused:
        assert after.checkpoint.read(name).tobytes() == job.files.checkpoint.read(name).tobytes()
