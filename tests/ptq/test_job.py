"""Jobs: what is refused before any work, and what the matched table, the specs and the ledger promise."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxmoe.errors import ConfigError, RecipeError
from jaxmoe.ptq.export import FORMATS
from jaxmoe.ptq.job import Job, is_routed, make_job, matched_table, needs_of, output_specs, prepare, tap_of_match
from jaxmoe.ptq.memory import memory_of
from jaxmoe.ptq.recipe import Recipe, Rule, load_recipe
from jaxmoe.weights.cells import cell_shape
from jaxmoe.weights.load import open_model
from jaxmoe.weights.safetensors import open_checkpoint
from tests import tiny
from tests.ptq.jobs import EXPERTS, all_rounded, experts_rounded, finished, with_calibration
from tests.running import tiny_folder
from tests.weights import encoders
from tests.weights.test_formats import encoded

RECIPE = load_recipe("w8a8-g128")


def job_of(family: str, recipe: str | Recipe) -> Job:
    return prepare(tiny_folder(family), load_recipe(recipe) if isinstance(recipe, str) else recipe)


@pytest.mark.parametrize(
    ("family", "recipe"), [("glm4_moe", "w8a8-g128"), ("glm4_moe", "w8a8-g128-smooth"), ("hy_v4", "w8a8-g128")]
)
def test_predicted_bytes_are_the_written_ones(family: str, recipe: str) -> None:
    job, after = job_of(family, recipe), open_checkpoint(finished(family, recipe)).tensors
    specs = output_specs(job)
    assert {spec.name: spec.nbytes for spec in specs} == {meta.name: meta.nbytes for meta in after.values()}
    assert {spec.name: (spec.dtype, spec.shape) for spec in specs} == {
        meta.name: (meta.dtype, meta.shape) for meta in after.values()
    }
    table = matched_table(job)
    assert sum(row.source_bytes for row in table) == job.source_bytes
    assert sum(row.result_bytes for row in table) == job.result_bytes < job.source_bytes
    own = {name for entry in job.files.manifest.entries for _, name in entry.own_tensors()}
    assert sum(row.tensors for row in table) == len(own) + len(job.not_loaded)


@pytest.mark.parametrize("family", [*tiny.CONFIGS])
def test_every_cell_of_every_layer_has_one_part(family: str) -> None:
    job = job_of(family, RECIPE)
    labels = [own.label for part in job.parts for _, own in part.cells]
    assert len(set(labels)) == len(labels)
    assert {name for part in job.parts for name in part.tensors} == {
        name for entry in job.files.manifest.entries for _, name in entry.own_tensors()
    }
    layers = [part.layer for part in job.parts]
    assert layers == sorted(layers) and set(layers) >= {-1, *range(job.files.manifest.config.layers)}
    assert sum(part.source_bytes(job) for part in job.parts) + sum(m.nbytes for m in job.not_loaded) == job.source_bytes
    for part in job.parts:
        assert len({hub.position[:1] for hub, _ in part.cells}) == 1, "a part is of one layer"


@pytest.mark.parametrize("family", [*tiny.CONFIGS])
def test_every_matrix_that_is_rounded_has_inputs_that_are_seen(family: str) -> None:
    """What the rules round in layers reads a tap or is a routed expert's; without either it could only be nearest."""
    job = job_of(family, "w4a8-experts-ssz")
    for match in job.matches:
        if match.scheme is None or match.entry.path.startswith("mtp."):
            continue
        assert is_routed(match.entry) != (tap_of_match(match, job.matches) is not None), match.entry.path


def test_a_changed_job_has_its_own_parts() -> None:
    job = job_of("glm4_moe", RECIPE)
    assert any(part.match.scheme is not None for part in job.parts)
    plain = replace(job, matches=tuple(replace(match, scheme=None) for match in job.matches))
    assert all(part.match.scheme is None for part in plain.parts)


def test_quantised_source() -> None:
    message = r"is quantised already \(jaxmoe\): its weights are integers; give the checkpoint that it was made from"
    with pytest.raises(ConfigError, match=message):
        prepare(finished("glm4_moe", "w8a8-g128"), RECIPE)


@pytest.mark.parametrize("kind", encoders.SCHEMES)
def test_source_with_integers(kind: str) -> None:
    method = "ascend" if kind == "ascend" else "compressed-tensors"
    with pytest.raises(ConfigError, match=rf"is quantised already \({method}\): its weights are integers"):
        prepare(encoded(kind)[0], RECIPE)


def test_a_format_that_cannot_say_it_is_refused(tmp_path: Path) -> None:
    """Before any work: groups that do not divide the input axis."""
    files = open_model(tiny.write_checkpoint(tmp_path / "source", {**tiny.CONFIGS["glm4_moe"], "hidden_size": 160}))
    for name in ("compressed-tensors", "ascendv1"):
        message = rf"w8a8-g128 leaves a last group of \d+ of \d+ inputs, which {name} cannot say"
        with pytest.raises(RecipeError, match=message):
            make_job(files, RECIPE, FORMATS[name])
        job = make_job(files, load_recipe("w8a8-channel"), FORMATS[name])
        assert job.output is FORMATS[name] and job.result_bytes < job.source_bytes


def test_products_of_inputs_that_nobody_sees() -> None:
    """GPTQ of what calibration does not run, or whose input it does not look at, is refused by name."""
    base = experts_rounded("gptq")
    inner = Rule(roles=("attention.q_b",), scheme="w8a8-g32", rounding="gptq")
    without = tuple(replace(rule, roles=tuple(r for r in rule.roles if r not in inner.roles)) for rule in base.rule)
    message = (
        r"recipe experts-gptq: rule 1 rounds attention.q_b of \w+.attention.q_b with gptq, which needs the products of "
        "its inputs, and calibration does not see those; use ssz or nearest there"
    )
    with pytest.raises(RecipeError, match=message):
        job_of("deepseek_v2", replace(base, rule=(inner, *without)))
    job = job_of("glm4_moe", all_rounded("gptq"))
    assert {needs_of(match) for match in job.matches if match.scheme is not None} == {"hessian"}


def test_prediction_blocks_are_rounded_without_data() -> None:
    """They are not run on samples: what GPTQ would need there is not known, and ssz needs nothing."""
    job = job_of("deepseek_v3", experts_rounded("gptq"))
    kinds = {
        (match.entry.path.startswith("mtp."), match.rounding) for match in job.matches if match.entry.role in EXPERTS
    }
    assert kinds == {(False, "gptq"), (True, "ssz")}
    assert {row.rounding for row in matched_table(job) if row.role in EXPERTS} == {"gptq", "ssz"}


def test_an_int8_cache_that_the_format_cannot_say_is_noted() -> None:
    """Else it would be lost without a word: the engine that serves such a result decides by itself."""
    files = open_model(tiny_folder("glm4_moe"))
    recipe = load_recipe("w8a8-channel")
    assert recipe.kv_cache == "int8" and make_job(files, recipe).notes == ()
    for name in ("compressed-tensors", "ascendv1"):
        (note,) = make_job(files, recipe, FORMATS[name]).notes
        assert note == (
            f"kv_cache: output format {name} cannot say that keys and values are stored as int8: the engine that "
            "serves the result decides it; choose output format jaxmoe to keep it"
        )
        assert make_job(files, replace(recipe, kv_cache="bfloat16"), FORMATS[name]).notes == ()


def test_the_ledger_grows_with_what_it_counts() -> None:
    plain = memory_of(job_of("glm4_moe", RECIPE), workers=1)
    assert plain.disk_bytes == 0 and plain.host_bytes > 0
    assert memory_of(job_of("glm4_moe", RECIPE), workers=3).host_bytes == 3 * plain.host_bytes
    ssz, gptq = (job_of("glm4_moe", experts_rounded(rounding)) for rounding in ("ssz", "gptq"))
    few = memory_of(ssz, workers=1, tokens=1000, longest=40)
    many = memory_of(ssz, workers=1, tokens=2000, longest=40)
    assert many.disk_bytes == 2 * few.disk_bytes > 0 and many.host_bytes == few.host_bytes, "tokens are on disk"
    assert memory_of(gptq, workers=1, tokens=1000, longest=40).host_bytes > few.host_bytes
    asked = memory_of(job_of("glm4_moe", with_calibration(load_recipe("w4a8-experts-ssz"), samples=7)), workers=1)
    mean = (1024 + 4096) // 2
    assert asked == memory_of(ssz, workers=1, tokens=7 * mean, longest=4096)


def test_a_chunk_is_counted_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("glm4_moe", RECIPE)
    part = next(part for part in job.parts if part.match.entry.role == EXPERTS[0])
    rows, columns = cell_shape(part.match.entry)
    assert part.peak_bytes(job) > len(part.cells) * rows * columns * 4
    monkeypatch.setattr("jaxmoe.ptq.job.CHUNK_ELEMENTS", 3 * rows * columns)
    assert part.cells_at_once == 3
    three = part.peak_bytes(job)
    monkeypatch.setattr("jaxmoe.ptq.job.CHUNK_ELEMENTS", 1)
    assert part.cells_at_once == 1 and 2 * rows * columns * 4 < part.peak_bytes(job) < three


def test_recipes_of_files_and_jobs_are_the_same(tmp_path: Path) -> None:
    """A job opens nothing but headers: with the tensors' bytes cut to zeros it is the same."""
    source = tiny.write_checkpoint(tmp_path / "zeros", tiny.CONFIGS["glm4_moe"])
    before = matched_table(prepare(source, RECIPE))
    for path in source.glob("*.safetensors"):
        raw = path.read_bytes()
        size = 8 + int.from_bytes(raw[:8], "little")
        path.write_bytes(raw[:size] + bytes(len(raw) - size))
    assert matched_table(prepare(source, RECIPE)) == before
