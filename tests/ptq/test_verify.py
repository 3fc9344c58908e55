"""Verification: an intact folder passes with figures that arithmetic confirms, and each kind of damage is named."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmoe.cli import main
from jaxmoe.errors import ConfigError, UnsupportedError, WeightsError
from jaxmoe.ptq.export import FORMATS
from jaxmoe.ptq.job import prepare
from jaxmoe.ptq.recipe import load_recipe
from jaxmoe.ptq.report import REPORT_NAME
from jaxmoe.ptq.verification import Verification
from jaxmoe.ptq.verify import changes_weights, verify
from jaxmoe.weights.safetensors import open_checkpoint
from tests import tiny
from tests.ptq.export import folders
from tests.ptq.export.folders import EXPERTS
from tests.ptq.jobs import change, experts_rounded, finished, windows
from tests.ptq.jobs import run as run_job
from tests.running import tiny_folder
from tests.tolerances import TOLERANCES

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
NATIVE = {"": "w8a8-g32", **dict.fromkeys(EXPERTS, "w4a8-g32")}
PACKED = {"": "w8a8-channel", **dict.fromkeys(EXPERTS, "w4a16-g32")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.write_checkpoint(tmp_path_factory.mktemp("verify") / "source", tiny.CONFIGS["glm4_moe"])
    (folder / "chat_template.jinja").write_text("hello", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def made(source: Path) -> Callable[[str], Path]:
    """A finished folder of a format."""

    def folder(name: str) -> Path:
        out = source.with_name(name)
        if not out.exists():
            folders.write(out, source, FORMATS[name], PACKED if name == "compressed-tensors" else NATIVE)
        return out

    return folder


@pytest.fixture
def own(made: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the native folder that a test may damage."""
    return Path(shutil.copytree(made("jaxmoe"), tmp_path / "own"))


def poke(folder: Path, tensor: str, values: Any, *, first: int = 0) -> None:
    """Overwrites some items of a tensor in place."""
    meta = open_checkpoint(folder).tensors[tensor]
    data = np.asarray(values, meta.dtype).tobytes()
    raw = bytearray(meta.file.read_bytes())
    start = meta.offset_bytes + first * meta.dtype.itemsize
    raw[start : start + len(data)] = data
    meta.file.write_bytes(raw)


def write_report(folder: Path, recipe: dict[str, Any], tensors: list[dict[str, Any]]) -> None:
    (folder / REPORT_NAME).write_text(json.dumps({"recipe": recipe, "tensors": tensors}), encoding="utf-8")


def problems(found: Verification) -> list[tuple[str, str]]:
    return [(problem.check, problem.where) for problem in found.problems]


def ratio(exact: np.ndarray, rounded: np.ndarray) -> float:
    exact, rounded = exact.astype(np.float64), rounded.astype(np.float64)
    return float(10 * np.log10((exact**2).sum() / ((exact - rounded) ** 2).sum()))


def test_an_intact_folder(made: Callable[[str], Path], source: Path) -> None:
    found = verify(made("jaxmoe"), source)
    assert found.passed and found.method == "jaxmoe" and found.sqnr_of == "source"
    before, after = open_checkpoint(source), open_checkpoint(made("jaxmoe"))
    assert found.tensors == len(after.tensors)
    assert found.nbytes == sum(meta.nbytes for meta in after.tensors.values()) == sum(row.nbytes for row in found.rows)
    rows = {row.role: row for row in found.rows}
    assert {role: row.scheme for role, row in rows.items() if row.scheme != "float"} == {
        **dict.fromkeys(EXPERTS, "w4a8-g32"),
        **dict.fromkeys(("attention.q", "attention.k", "attention.v", "attention.o"), "w8a8-g32"),
        **dict.fromkeys(("shared.gate", "shared.up", "shared.down"), "w8a8-g32"),
        **dict.fromkeys(("ffn.gate", "ffn.up", "ffn.down"), "w8a8-g32"),
    }
    quantised = sum(row.nbytes for row in found.rows if row.scheme != "float")
    assert found.quantised_share == quantised / found.nbytes
    # One role by hand: int8 values, groups of 32, in float64.
    name = "model.layers.0.mlp.up_proj.weight"
    steps = np.repeat(after.read(f"{name}_scale"), 32, axis=-1)
    exact = ratio(before.read(name), after.read(name).astype(np.float32) * steps)
    least, mean = rows["ffn.up"].least_sqnr_db, rows["ffn.up"].mean_sqnr_db
    assert least is not None and mean is not None
    assert math.isclose(least, exact, rel_tol=1e-9) and math.isclose(mean, exact, rel_tol=1e-9)
    worst = rows["experts.up"].least_sqnr_db
    assert worst is not None and worst < least - 15 and rows["norm"].least_sqnr_db is None


def test_without_a_source(made: Callable[[str], Path]) -> None:
    found = verify(made("jaxmoe"))
    assert found.passed and found.sqnr_of is None and found.source is None
    assert all(row.least_sqnr_db is None for row in found.rows)


def test_compressed_tensors(made: Callable[[str], Path], source: Path) -> None:
    """What is decoded to floats counts as quantised, and is compared too."""
    found = verify(made("compressed-tensors"), source)
    assert found.passed and found.method == "compressed-tensors"
    rows = {row.role: row for row in found.rows}
    assert rows["experts.up"].scheme == "packed INT4" and rows["attention.v"].scheme == "w8a8-channel"
    packed, eight = rows["experts.up"].least_sqnr_db, rows["attention.v"].least_sqnr_db
    assert packed is not None and eight is not None and 15 < packed < 30 < eight
    native = {row.role: row for row in verify(made("jaxmoe"), source).rows}
    assert packed == native["experts.up"].least_sqnr_db, "the same integers and scales in another form"


def test_progress(made: Callable[[str], Path]) -> None:
    calls: list[tuple[int, int]] = []
    verify(made("jaxmoe"), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, len(calls)) for done in range(1, len(calls) + 1)]


DAMAGE: dict[str, tuple[str, Any, int, tuple[str, str], str]] = {
    "D5 NaN scale": (f"{EXPERT}_scale", [np.nan], 3, ("scales", EXPERT), "zero, negative, infinite or NaN"),
    "D5 zero scale": (f"{EXPERT}_scale", [0], 0, ("scales", EXPERT), "zero, negative, infinite or NaN"),
    "negative scale": (f"{EXPERT}_scale", [-1], 0, ("scales", EXPERT), "zero, negative, infinite or NaN"),
    "infinite scale": (f"{EXPERT}_scale", [np.inf], 0, ("scales", EXPERT), "zero, negative, infinite or NaN"),
    "NaN in a norm": (NORM, [np.nan], 5, ("values", NORM), "a value is NaN or infinite"),
    "infinity in a norm": (NORM, [-np.inf], 5, ("values", NORM), "a value is NaN or infinite"),
    "-128": (
        "model.layers.0.mlp.up_proj.weight",
        [-128],
        7,
        ("grid", "model.layers.0.mlp.up_proj.weight"),
        "an integer is -128, the grid of w8a8-g32 ends at -127",
    ),
    "-8": (f"{EXPERT}_packed", [0x18], 0, ("grid", EXPERT), "an integer is -8, the grid of w4a8-g32 ends at -7"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_numbers(own: Path, case: str) -> None:
    tensor, values, first, where, text = DAMAGE[case]
    poke(own, tensor, values, first=first)
    found = verify(own)
    assert problems(found) == [where] and text in found.problems[0].text
    assert not found.passed


def test_d6_corrupted_weights_against_the_source(own: Path, source: Path) -> None:
    """Legal integers of another expert: only the comparison finds it."""
    checkpoint = open_checkpoint(own)
    other = EXPERT.replace("experts.3", "experts.4")
    poke(own, f"{EXPERT}_packed", checkpoint.read(f"{other}_packed"))
    assert verify(own).passed
    found = verify(own, source)
    assert problems(found) == [("sqnr", EXPERT)] and "dB is below 6 dB" in found.problems[0].text
    assert verify(own, source, min_sqnr_db=-10.0).passed


def test_a_float_tensor_that_changed(own: Path, source: Path) -> None:
    poke(own, NORM, [0.5], first=2)
    assert verify(own).passed
    assert problems(verify(own, source)) == [("source", NORM)]


def test_a_zero_source(own: Path, source: Path, tmp_path: Path) -> None:
    zeroed = Path(shutil.copytree(source, tmp_path / "zeroed"))
    poke(zeroed, EXPERT, np.zeros((32, 64)))
    assert problems(verify(own, zeroed)) == [("sqnr", EXPERT)]


@pytest.mark.parametrize("name", [EXPERT, NORM])
def test_a_damaged_source_is_not_the_results_problem(own: Path, source: Path, tmp_path: Path, name: str) -> None:
    broken = Path(shutil.copytree(source, tmp_path / "broken"))
    poke(broken, name, [np.nan], first=3)
    with pytest.raises(WeightsError, match=rf"the source {broken} is damaged: {name}: a value is NaN"):
        verify(own, broken)


def test_fused_tensors_count_once() -> None:
    """gpt_oss keeps gate and up in one tensor; so does nothing that we write."""
    for folder in (tiny_folder("gpt_oss"), finished("gpt_oss", "w8a8-g128")):
        found = verify(folder)
        stored = {name: meta.nbytes for name, meta in open_checkpoint(folder).tensors.items()}
        assert found.passed, found.problems
        assert sum(row.nbytes for row in found.rows) == sum(stored.values()) == found.nbytes
        assert 0 <= found.quantised_share <= 1
        rows = {row.role: row.nbytes for row in found.rows}
        assert rows["experts.gate"] == rows["experts.up"]


def test_a_group_of_all_inputs_is_a_channel(tmp_path: Path) -> None:
    """AscendV1 does not tell them apart; the report does, and is right."""
    run_job(prepare(tiny_folder("glm4_moe"), load_recipe("w8a8-g128"), FORMATS["ascendv1"]), tmp_path / "out")
    found = verify(tmp_path / "out", tiny_folder("glm4_moe"))
    assert found.passed and (found.method, found.sqnr_of) == ("ascend", "source"), found.problems
    assert {row.scheme for row in found.rows if row.role == "attention.o"} == {"w8a8-channel"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recipe", "measured"),
    [
        ("glm4_moe", "w8a8-g128-smooth", "report"),
        ("glm4_moe", "w8a8-g128-rotated", "report"),
        ("gpt_oss", "w8a8-g128-rotated", "report"),
    ],
)
def test_results_of_changed_weights(family: str, recipe: str, measured: str, tmp_path: Path) -> None:
    """Made through the whole pipeline: nothing is wrong, and damage is found by what the quantiser wrote down."""
    folder = finished(family, recipe)
    report = json.loads((folder / REPORT_NAME).read_text(encoding="utf-8"))
    assert changes_weights(report)
    found = verify(folder, tiny_folder(family))
    assert found.passed, found.problems
    assert found.sqnr_of == measured
    said = {tensor["name"]: tensor["sqnr_db"] for tensor in report["tensors"]}
    assert min(row.least_sqnr_db for row in found.rows if row.least_sqnr_db is not None) == min(said.values())
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    name = next(iter(said)).partition("[")[0]
    poke(damaged, f"{name}_scale", [np.inf])
    assert {problem.check for problem in verify(damaged, tiny_folder(family)).problems} == {"scales"}


@pytest.mark.slow
def test_a_result_of_gptq(tmp_path: Path) -> None:
    """Nothing is changed before it is rounded: the source is the measure, and gives the quantiser's own figures."""
    out = tmp_path / "out"
    run_job(prepare(tiny_folder("glm4_moe"), experts_rounded("gptq", smooth=None)), out, windows())
    found = verify(out, tiny_folder("glm4_moe"))
    assert found.passed and found.sqnr_of == "source", found.problems
    report = json.loads((out / REPORT_NAME).read_text(encoding="utf-8"))
    said = [tensor["sqnr_db"] for tensor in report["tensors"] if tensor["role"] == "experts.up"]
    (row,) = (row for row in found.rows if row.role == "experts.up")
    assert row.least_sqnr_db == pytest.approx(min(said), rel=TOLERANCES["sqnr"].value)
    assert row.mean_sqnr_db == pytest.approx(sum(said) / len(said), rel=TOLERANCES["sqnr"].value)
    # Other legal integers, of another expert.
    checkpoint = open_checkpoint(out)
    other = EXPERT.replace("experts.3", "experts.4")
    change(out, f"{EXPERT}_packed", checkpoint.read(f"{other}_packed"))
    assert problems(verify(out, tiny_folder("glm4_moe"))) == [("sqnr", EXPERT)]


def test_files(own: Path) -> None:
    index = own / "model.safetensors.index.json"
    data = json.loads(index.read_text(encoding="utf-8"))
    index.write_text(json.dumps({**data, "metadata": {"total_size": 17}}), encoding="utf-8")
    shutil.copyfile(next(own.glob("*.safetensors")), own / "old.safetensors")
    (own / "model-00009-of-00009.safetensors.tmp").write_bytes(b"x")
    assert problems(verify(own)) == [
        ("files", "model.safetensors.index.json"),
        ("files", "old.safetensors"),
        ("files", "model-00009-of-00009.safetensors.tmp"),
    ]


def test_d3_a_missing_tensor_is_found_and_not_bad_input(own: Path) -> None:
    data = json.loads((own / "config.json").read_text(encoding="utf-8"))
    data["quantization_config"]["tensors"].pop("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight")
    (own / "config.json").write_text(json.dumps(data), encoding="utf-8")
    found = verify(own)
    assert problems(found) == [("files", str(own))] and f"{EXPERT[:25]}" in found.problems[0].text
    assert found.rows == () and not found.passed
    for path in own.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])
    assert "truncated" in verify(own).problems[0].text


def test_d21_experts_that_stayed_float(made: Callable[[str], Path], source: Path, tmp_path: Path) -> None:
    """compressed-tensors: the configuration takes a role in, and its tensors are floats."""
    out = tmp_path / "out"
    folders.write(out, source, FORMATS["compressed-tensors"], {"": "w8a8-channel", **dict.fromkeys(EXPERTS, "float")})
    assert verify(out).passed
    data = json.loads((out / "config.json").read_text(encoding="utf-8"))
    ignore = data["quantization_config"]["ignore"]
    data["quantization_config"]["ignore"] = [name for name in ignore if "up_proj" not in name]
    (out / "config.json").write_text(json.dumps(data), encoding="utf-8")
    found = verify(out)
    assert {problem.check for problem in found.problems} == {"share"} and len(found.problems) == 2 * 8
    assert EXPERT in {problem.where for problem in found.problems}


def test_d21_the_report_says_more(own: Path) -> None:
    said = [
        {"name": EXPERT, "scheme": "w4a8-g64", "sqnr_db": 20.0},
        {"name": NORM, "scheme": "w8a8-g32", "sqnr_db": None},
    ]
    write_report(own, {}, said)
    assert set(problems(verify(own))) == {("share", EXPERT), ("share", NORM)}
    write_report(own, {}, [{"name": EXPERT, "scheme": "w9", "sqnr_db": 20.0}])
    assert problems(verify(own)) == [("share", EXPERT)]
    write_report(own, {}, [{"name": "model.layers.7.nothing", "scheme": "w8a8-g32", "sqnr_db": 20.0}])
    found = verify(own)
    assert (
        problems(found) == [("share", "model.layers.7.nothing")] and "there is no such tensor" in found.problems[0].text
    )


def test_weights_that_were_changed_before_rounding(own: Path, source: Path) -> None:
    """A smoothed result is no copy of its source: the quantiser's own figures count."""
    checkpoint = open_checkpoint(own)
    poke(own, NORM, 2 * checkpoint.read(NORM))
    said = [{"name": EXPERT, "scheme": "w4a8-g32", "sqnr_db": 19.5}]
    write_report(own, {"calibration": None}, said)
    assert problems(verify(own, source)) == [("source", NORM)]
    write_report(own, {"calibration": {"smooth": 0.4}}, said)
    found = verify(own, source)
    assert found.passed and found.sqnr_of == "report"
    assert {row.role: row.least_sqnr_db for row in found.rows if row.least_sqnr_db} == {"experts.up": 19.5}
    assert problems(verify(own, source, min_sqnr_db=19.6)) == [("sqnr", EXPERT)]
    assert changes_weights({"recipe": {"calibration": {"smooth": None}, "rotation": {"seed": 1}}})
    assert not changes_weights({"recipe": {"calibration": {"smooth": None}, "rotation": None}})


def test_another_source(own: Path, tmp_path: Path) -> None:
    config = {**tiny.CONFIGS["glm4_moe"], "moe_intermediate_size": 64}
    other = tiny.write_checkpoint(tmp_path / "other", config)
    found = verify(own, other)
    assert problems(found) == [("source", "config.json")] and "another model" in found.problems[0].text


def test_d14_lost_side_files(own: Path, source: Path) -> None:
    (own / "chat_template.jinja").unlink()
    assert problems(verify(own, source)) == [("source", "chat_template.jinja")]


def test_bad_input(own: Path, source: Path, made: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        verify(tmp_path / "absent")
    with pytest.raises(ConfigError, match="--min-sqnr-db 20: give --source"):
        verify(own, min_sqnr_db=20.0)
    (own / REPORT_NAME).write_text('{"tensors": [1]}', encoding="utf-8")
    with pytest.raises(ConfigError, match="tensors is no list of objects with name, scheme, sqnr_db"):
        verify(own)
    broken = Path(shutil.copytree(source, tmp_path / "broken"))
    next(broken.glob("*.safetensors")).unlink()
    with pytest.raises(WeightsError, match="are missing"):
        verify(made("jaxmoe"), broken)
    config = json.loads((own / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["quant_method"] = "gguf"
    (own / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (own / REPORT_NAME).unlink()
    with pytest.raises(UnsupportedError, match="'gguf' is not supported"):
        verify(own)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["verify", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own: Path, source: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(capsys, own, "--source", source)
    assert code == 0 and "experts.up" in out and "w4a8-g32" in out and "dB" in out
    assert f"SQNR against {source}" in out and out.rstrip().endswith("verified")
    code, out, _ = run(capsys, own, "--source", source, "--min-sqnr-db", 30, "--json")
    found = json.loads(out)
    assert code == 1 and found["passed"] is False and found["method"] == "jaxmoe"
    assert {problem["check"] for problem in found["problems"]} == {"sqnr"} and len(found["problems"]) == 2 * 8 * 3
    code, out, _ = run(capsys, own, "--source", source, "--min-sqnr-db", 30)
    assert code == 1 and "FAILED: 48 problems" in out and "and 28 more (all with --json)" in out
    poke(own, f"{EXPERT}_scale", [0])
    code, out, _ = run(capsys, own)
    assert code == 1 and f"scales: {EXPERT}: " in out
    code, _, err = run(capsys, tmp_path / "absent")
    assert code == 2 and err.startswith("jaxmoe verify: ") and err.count("\n") == 1
    code, _, err = run(capsys, own, "--min-sqnr-db", "nan")
    assert code == 2 and "is not a finite number" in err
    code, _, err = run(capsys, "glm-4.5")
    assert code == 2 and "a config without weights" in err
