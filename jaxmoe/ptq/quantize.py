"""Runs a quantisation: resumable, on any number of devices and processes, with the same bytes.

All is written into `<out>.partial`: `result`, whose shards are filled in place, a record of each finished task, and in
`work` what tasks hand to each other. A killed run leaves that folder, and takes it up again where it stopped; at the
end `result` gets its name: what has the final name is complete, and nothing but the result.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxmoe
from jaxmoe.decode import read_json
from jaxmoe.errors import ConfigError, RecipeError
from jaxmoe.ptq.actions import Context, Record, tensor_reports
from jaxmoe.ptq.calib import Calibration
from jaxmoe.ptq.calib_coverage import Coverage, measure_coverage
from jaxmoe.ptq.graph import Planned, build_graph
from jaxmoe.ptq.job import Job, gram_taps, output_specs
from jaxmoe.ptq.report import REPORT_NAME, build_report
from jaxmoe.ptq.tasks.link import Link
from jaxmoe.ptq.tasks.run import Summary, run_tasks
from jaxmoe.ptq.tasks.task import Task
from jaxmoe.ptq.work import WorkFolder
from jaxmoe.weights.foreign import SIDE_FILES
from jaxmoe.weights.layout import MAX_SHARD_BYTES, plan_shards, sync, write_text_atomic
from jaxmoe.weights.shards import ShardFiles

Progress = Callable[[float, float, str], None]
"""Called with (work done, work in all, the task that ended)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a quantisation went."""

    summary: Summary
    resumed: int
    """Tasks that an earlier run had finished."""
    coverage: Coverage | None
    """How well the samples reached the experts; None: a recipe without calibration."""
    to_nearest: tuple[str, ...]
    """Tensors on which their rounding method gave up."""


def quantize(
    job: Job,
    out: Path,
    *,
    calibration: Calibration | None = None,
    devices: Sequence[Any] = (),
    resume: bool = False,
    progress: Progress | None = None,
    link: Link | None = None,
    strict: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Result:
    """Writes the quantised checkpoint folder.

    Args:
        job: a checked quantisation.
        out: folder to write.
        calibration: samples, if the recipe is calibrated.
        devices: that work; the first one if none are given. Any number gives the same bytes.
        resume: take up what a killed run left; without it such a folder is refused.
        progress: called after each task.
        link: where the other processes of this run are; all see the same folders, and the one that serves makes and
            finishes the result.
        strict: end the run where a rounding method gives up on a tensor, instead of rounding it to nearest.
        max_shard_bytes: most bytes of tensors in a file of the result.

    Raises:
        ConfigError: `out` exists and is not an empty folder, or there is an unfinished run that does not match.
        RecipeError: the recipe is calibrated and there are no samples, or the other way round.
        WeightsError: a source tensor, or what a layer makes of the samples, is not finite; or the disk fails.
    """
    check_output(out)
    if (job.recipe.calibration is None) != (calibration is None):
        raise RecipeError(
            f"recipe {job.recipe.name} {'is calibrated and needs' if calibration is None else 'takes no'} samples"
        )
    folder = partial_folder(out)
    specs = output_specs(job)
    plans = plan_shards(
        specs, max_shard_bytes=max_shard_bytes, metadata={"format": "pt"}, file_name=job.output.shard_name
    )
    shards = ShardFiles(folder / "result", specs, plans, job.output.index_name)
    marks = fingerprint(job, shards, calibration)
    serves = link is None or link.serve
    records = folder / "tasks"
    if serves:
        _claim(folder, marks, resume=resume)
        if records.exists() and not shards.are_there:
            raise ConfigError(f"{folder} has lost files of the unfinished run that it holds; remove it")
        shards.create()
        records.mkdir(exist_ok=True)
    work = WorkFolder(folder / "work")
    context = Context(job=job, shards=shards, work=work, calibration=calibration, grams=gram_taps(job))
    graph = build_graph(context, _digest(marks))
    files = {planned.task.name: records / f"{_short(planned.task.name)}.json" for planned in graph}
    done = frozenset(name for name, path in files.items() if path.exists())
    actions = {planned.task.name: planned.action for planned in graph}

    def execute(task: Task, device: Any) -> None:
        record = actions[task.name].run(context, device)
        given_up = _given_up([record])
        if strict and given_up:
            raise RecipeError(f"{given_up[0]}: the products of its inputs are not positive definite; use more samples")
        # Under a name of its own first: another process may have been given the same task.
        own = files[task.name].with_suffix(f".{uuid.uuid4().hex[:8]}")
        write_text_atomic(own, json.dumps({"task": task.name, **record}) + "\n")
        own.replace(files[task.name])
        sync(records)

    workers = list(devices) or jax.devices()[:1]
    summary = run_tasks(
        [planned.task for planned in graph],
        execute,
        workers,
        done=done,
        on_done=_counted(graph, done, progress),
        link=link,
        shared_cores=all(device.platform == "cpu" for device in workers),
    )
    if not serves:
        return Result(summary=summary, resumed=0, coverage=None, to_nearest=())
    ended = [read_json(files[planned.task.name]) for planned in graph]
    coverage = _finish(job, folder / "result", shards, ended, calibration)
    _give_name(folder, out)
    return Result(summary=summary, resumed=len(done), coverage=coverage, to_nearest=_given_up(ended))


def _given_up(records: Sequence[Record]) -> tuple[str, ...]:
    """Tensors on which their rounding method gave up."""
    return tuple(tensor.name for tensor in tensor_reports(records) if tensor.to_nearest)


def partial_folder(out: Path) -> Path:
    """Where a run works until it is complete."""
    return out.with_name(f"{out.name}.partial")


def check_output(out: Path) -> None:
    """Refuses to write over something.

    Raises:
        ConfigError: `out` is a file or a folder with something in it.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already and is not an empty folder; remove it or choose another name")


def fingerprint(job: Job, shards: ShardFiles, calibration: Calibration | None) -> dict[str, str]:
    """What a run may be taken up with: the same program, recipe, source and samples."""
    source = hashlib.sha256()
    for path in sorted(job.files.folder.iterdir()):
        if path.is_file() and path.suffix in (".safetensors", ".json"):
            stat = path.stat()
            source.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    samples = "none"
    if calibration is not None:
        digest = hashlib.sha256(calibration.tokens.tobytes() + calibration.lengths.tobytes())
        samples = digest.hexdigest()
    return {
        # Another backend sums in another order.
        "version": f"jaxmoe {jaxmoe.__version__}, jax {jax.__version__}, {jax.default_backend()}",
        "recipe": _digest(asdict(job.recipe)),
        "source": source.hexdigest(),
        "samples": samples,
        "layout": shards.sha256,
    }


def _claim(folder: Path, marks: Mapping[str, str], *, resume: bool) -> None:
    """Makes the folder, or takes up the one of an earlier run.

    Raises:
        ConfigError: there is one and `resume` is not asked for, or it is of another job.
    """
    path = folder / "run.json"
    if not path.exists():
        # A run that was killed at once leaves a file without its final name, at most.
        if folder.exists() and any(entry.name != f"{path.name}.tmp" for entry in folder.iterdir()):
            raise ConfigError(f"{folder} is in the way, and no run of this program left it; remove it")
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, json.dumps(dict(marks), indent=2) + "\n")
        return
    if not resume:
        raise ConfigError(f"{folder} holds an unfinished run; give --resume to take it up, or remove it")
    left = read_json(path)
    different = [name for name in marks if left.get(name) != marks[name]]
    if different:
        raise ConfigError(
            f"{folder} holds an unfinished run with another {', '.join(different)}; it cannot be taken up: remove it, "
            "or give what it was started with"
        )


def _counted(
    graph: Sequence[Planned], done: frozenset[str], progress: Progress | None
) -> Callable[[Task, float], None] | None:
    if progress is None:
        return None
    total = sum(planned.task.cost for planned in graph)
    state = {"done": sum(planned.task.cost for planned in graph if planned.task.name in done)}

    def on_done(task: Task, _seconds: float) -> None:
        state["done"] += task.cost
        progress(state["done"], total, task.name)

    return on_done


def _finish(
    job: Job,
    folder: Path,
    shards: ShardFiles,
    records: Sequence[Record],
    calibration: Calibration | None,
) -> Coverage | None:
    """Publishes the shards and all that stands beside them."""
    shards.publish()
    _copy_side_files(job.files.folder, folder)
    data, coverage = _calibration_report(job, records, calibration)
    order = {own.label: index for index, own in enumerate(own for part in job.parts for _, own in part.cells)}
    report = build_report(
        source=job.files,
        recipe=job.recipe,
        tensors=sorted(tensor_reports(records), key=lambda tensor: order[tensor.name]),
        source_bytes=job.source_bytes,
        result_bytes=job.result_bytes,
        calibration=data,
    )
    copied = [meta.name for meta in job.not_loaded]
    source = read_json(job.files.folder / "config.json")
    source = source if job.rotated is None else job.rotated.config_json(source)
    config = job.output.config(source, job.matches, job.files.manifest, kv_cache=job.recipe.kv_cache, copied=copied)
    for name, text in job.output.side_files(job.matches, copied=copied).items():
        write_text_atomic(folder / name, text)
    write_text_atomic(folder / REPORT_NAME, json.dumps(report, indent=2) + "\n")
    write_text_atomic(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return coverage


def _give_name(folder: Path, out: Path) -> None:
    """The result of a partial folder becomes `out`; the rest goes."""
    if out.exists():
        out.rmdir()
    (folder / "result").rename(out)
    sync(out.parent)
    # What is left is no unfinished run any more.
    (folder / "run.json").unlink()
    shutil.rmtree(folder)


def _calibration_report(
    job: Job, records: Sequence[Record], calibration: Calibration | None
) -> tuple[dict[str, Any] | None, Coverage | None]:
    recipe, config = job.recipe.calibration, job.files.manifest.config
    if calibration is None or recipe is None:
        return None, None
    counts = np.array([record["tokens_per_expert"] for record in records if "tokens_per_expert" in record], np.int64)
    layers = range(config.dense_layers, config.layers)
    coverage = measure_coverage(counts, layers=layers, threshold_tokens=recipe.expert_tokens)
    data = {
        "data_sha256": calibration.data_sha256,
        "samples": asdict(calibration.report),
        "coverage": asdict(coverage),
        "tokens_per_expert": counts.tolist(),
    }
    return data, coverage


def is_side_file(path: Path) -> bool:
    """Whether a result gets a file of its source: tokenizer, chat template, generation config, licence.

    All but weights and what describes them.
    """
    weights = path.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".pt", ".gguf"))
    return path.is_file() and not weights and path.name not in ("config.json", REPORT_NAME, *SIDE_FILES)


def _copy_side_files(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        if is_side_file(path):
            shutil.copyfile(path, target / path.name)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:24]
