"""jaxmoe tune MODEL OUT --recipes A,B,C --gate NAME: the smallest of some recipes that holds a gate."""

import argparse
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from jaxmoe.commands.calibration import add_calibration_arguments, calibration_samples, samples_of
from jaxmoe.commands.common import add_mesh_arguments, bar, checkpoint_folder, console, progress_bars, start_jax
from jaxmoe.errors import ConfigError, RecipeError

if TYPE_CHECKING:
    import numpy as np

    from jaxmoe.evals.perplexity import EvalResult
    from jaxmoe.evals.setup import EvalShape
    from jaxmoe.ptq.calib import Calibration
    from jaxmoe.ptq.job import Job
    from jaxmoe.weights.load import ModelFiles

HISTORY = "history.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="folder of the float checkpoint, which is the baseline too")
    parser.add_argument(
        "out", type=Path, help="folder of the results and of history.json; may be one of an earlier run"
    )
    parser.add_argument("--recipes", required=True, metavar="A,B,..", help="names in configs/quant or .toml files")
    parser.add_argument("--gate", required=True, metavar="NAME", help="limits in configs/gates.toml, such as w8a8")
    parser.add_argument("--gates", type=Path, help="other limits")
    parser.add_argument("--text", type=Path, action="append", help="evaluation text (default: the bundled one)")
    parser.add_argument("--windows", type=int, default=8, help="windows of text")
    parser.add_argument("--window-tokens", type=int, default=2176, help="tokens of a window")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of one step and window")
    add_calibration_arguments(parser, "of calibrated recipes")
    add_mesh_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Tries the recipes, the smallest result first; 1 when none holds the gate."""
    start_jax(options)
    from jaxmoe.engine.tokenizer import Tokenizer
    from jaxmoe.evals.gates import check_gate, load_gates
    from jaxmoe.evals.setup import EvalShape, make_windows, tokenize
    from jaxmoe.evals.windows import bundled_texts
    from jaxmoe.ptq.job import make_job
    from jaxmoe.ptq.recipe import load_recipe
    from jaxmoe.weights.load import open_model

    if min(options.windows, options.window_tokens, options.chunk) < 1:
        raise ConfigError("--windows, --window-tokens and --chunk must be at least 1")
    gates = load_gates(options.gates)
    if options.gate not in gates:
        raise ConfigError(f"no gate {options.gate!r}; there are {', '.join(gates)}")
    files = open_model(checkpoint_folder(options.model))
    jobs = [make_job(files, load_recipe(name)) for name in options.recipes.split(",")]
    names = [job.recipe.name for job in jobs]
    if len(set(names)) < len(names):
        raise ConfigError(f"--recipes {options.recipes}: two recipes have the same name ({', '.join(names)})")
    given = (options.calib, options.calib_samples, options.calib_tokens)
    if any(value is not None for value in given) and all(job.recipe.calibration is None for job in jobs):
        raise RecipeError(f"none of the recipes {', '.join(names)} is calibrated: leave out --calib, --calib-*")
    shape = EvalShape(windows=options.windows, window_tokens=options.window_tokens, chunk=options.chunk)
    tokenizer = Tokenizer(files.folder, files.manifest.config.vocab)
    windows = make_windows(tokenize(options.text or bundled_texts(), tokenizer), shape)
    out, history = console(), read_history(options.out)
    table = Table("recipe", "bytes", "perplexity", "difference", "gate", title=f"gate {options.gate}")
    # All that can be refused is refused here, before the first trial.
    trials = [(job, trial_key(job, _first_samples(job, options), windows, shape, mesh_marks(options))) for job in jobs]
    chosen = None
    for job, key in sorted(trials, key=lambda trial: (trial[0].result_bytes, trial[0].recipe.name)):
        folder = trial_folder(options.out, job, key)
        result = _known(history, key)
        if result is None:
            # Before the first trial too: a run that is killed in it leaves a folder that the next one takes up.
            _write_history(options.out, history)
            _quantize(out, job, folder, options)
            result = _evaluate(out, folder, files, windows, shape, options)
            history[key] = {"recipe": job.recipe.name, "bytes": job.result_bytes, "result": asdict(result)}
            _write_history(options.out, history)
        failures = check_gate(result, gates[options.gate])
        _row(table, job, result, passed=not failures)
        if not failures:
            chosen = folder
            # A result that was measured by an earlier run may be gone, its numbers are not.
            _quantize(out, job, folder, options)
            break
        _remove(folder)
    out.print(table)
    out.print("no recipe holds the gate" if chosen is None else f"{chosen}: the smallest that holds the gate")
    return 1 if chosen is None else 0


def trial_key(
    job: "Job",
    samples: "Calibration | None",
    windows: "np.ndarray",
    shape: "EvalShape",
    mesh: Mapping[str, Any],
) -> str:
    """A digest of all that a trial's numbers depend on: program, recipe, source, samples, windows, steps, mesh.

    Args:
        job: of the trial.
        samples: before they are extended; what is added follows from them, their documents and the rest.
        windows: that are evaluated.
        shape: of the evaluation.
        mesh: of `mesh_marks`.
    """
    from jaxmoe.ptq.job import output_specs
    from jaxmoe.ptq.quantize import fingerprint
    from jaxmoe.weights.layout import plan_shards
    from jaxmoe.weights.shards import ShardFiles

    specs = output_specs(job)
    plans = plan_shards(specs, metadata={"format": "pt"}, file_name=job.output.shard_name)
    marks: dict[str, Any] = dict(fingerprint(job, ShardFiles(Path(), specs, plans, job.output.index_name), samples))
    marks["documents"] = None if samples is None else samples.data_sha256
    marks |= {"windows": hashlib.sha256(windows.tobytes()).hexdigest(), "shape": asdict(shape), "mesh": dict(mesh)}
    return hashlib.sha256(json.dumps(marks, sort_keys=True, default=str).encode()).hexdigest()


def mesh_marks(options: argparse.Namespace) -> dict[str, Any]:
    """What of --devices and --plan the evaluation depends on: another mesh adds floats in another order.

    Raises:
        ConfigError: the plan cannot be read.
    """
    from jaxmoe.decode import read_toml

    return {"devices": options.devices, "plan": None if options.plan is None else read_toml(options.plan)}


def trial_folder(out: Path, job: "Job", key: str) -> Path:
    """Where a trial's result is: never in the place of one with other data, text or source."""
    return out / f"{job.recipe.name}-{key[:8]}"


def read_history(folder: Path) -> dict[str, Any]:
    """Digest -> trial of earlier runs; nothing of a new folder.

    Raises:
        ConfigError: the folder holds something else.
    """
    from jaxmoe.decode import read_json

    path = folder / HISTORY
    if path.exists():
        return read_json(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already, is not empty and holds no {HISTORY}; choose another name")
    return {}


def _write_history(folder: Path, history: Mapping[str, Any]) -> None:
    from jaxmoe.weights.layout import write_text_atomic

    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(folder / HISTORY, json.dumps(history, indent=1) + "\n")


def _known(history: Mapping[str, Any], key: str) -> "EvalResult | None":
    from jaxmoe.decode import decode
    from jaxmoe.evals.perplexity import EvalResult

    return decode(EvalResult, history[key]["result"], where=f"{HISTORY}.{key}.result") if key in history else None


def _first_samples(job: "Job", options: argparse.Namespace) -> "Calibration | None":
    """The samples of a calibrated recipe before they are extended, which would take a pass over the model."""
    return None if job.recipe.calibration is None else calibration_samples(job, options)[1]


def _quantize(out: Console, job: "Job", folder: Path, options: argparse.Namespace) -> None:
    """Makes a trial's result unless it is there; what a killed run left of it is taken up."""
    import jax

    from jaxmoe.ptq.quantize import quantize

    # A folder has its final name only when it is complete.
    if folder.exists():
        return
    devices = jax.devices()[: options.devices]
    samples = samples_of(job, options, folder.with_name(f"{folder.name}.routing"), devices)
    with progress_bars(out) as progress, bar(progress, f"quantise {job.recipe.name}") as move:
        quantize(
            job,
            folder,
            calibration=samples,
            devices=devices,
            resume=True,
            progress=lambda done, total, _task: move(done, total),
        )


def _remove(folder: Path) -> None:
    """Removes a result; first its name, so that a run that is killed here leaves nothing that looks complete."""
    if folder.exists():
        going = folder.with_name(f"{folder.name}.removed")
        shutil.rmtree(going, ignore_errors=True)
        folder.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def _evaluate(
    out: Console,
    folder: Path,
    baseline: "ModelFiles",
    windows: "np.ndarray",
    shape: "EvalShape",
    options: argparse.Namespace,
) -> "EvalResult":
    from jaxmoe.commands.eval import measure
    from jaxmoe.weights.load import open_model

    files = open_model(folder)
    with progress_bars(out) as progress:
        return measure(progress, files, baseline, windows, shape, files.kv_cache, options)[1]


def _row(table: Table, job: "Job", result: "EvalResult", *, passed: bool) -> None:
    overall = result.overall
    difference = "" if overall.increase is None else f"{overall.increase:+.2%} ± {overall.standard_error:.2%}"
    verdict = "holds" if passed else "fails"
    table.add_row(job.recipe.name, f"{job.result_bytes:,}", f"{overall.perplexity:.3f}", difference, verdict)
