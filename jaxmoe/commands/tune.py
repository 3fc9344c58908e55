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

from jaxmoe.commands.calibration import add_calibration_arguments, samples_of
from jaxmoe.commands.common import add_mesh_arguments, bar, checkpoint_folder, console, progress_bars, start_jax
from jaxmoe.errors import ConfigError

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
    shape = EvalShape(windows=options.windows, window_tokens=options.window_tokens, chunk=options.chunk)
    tokenizer = Tokenizer(files.folder, files.manifest.config.vocab)
    windows = make_windows(tokenize(options.text or bundled_texts(), tokenizer), shape)
    out, history = console(), read_history(options.out)
    table = Table("recipe", "bytes", "perplexity", "difference", "gate", title=f"gate {options.gate}")
    chosen = None
    for job in sorted(jobs, key=lambda job: (job.result_bytes, job.recipe.name)):
        samples = _samples(job, options)
        key = trial_key(job, samples, windows, shape)
        folder = options.out / job.recipe.name
        result = _known(history, key)
        if result is None:
            _quantize(out, job, samples, folder, options)
            result = _evaluate(out, folder, files, windows, shape, options)
            history[key] = {"recipe": job.recipe.name, "bytes": job.result_bytes, "result": asdict(result)}
            _write_history(options.out, history)
        failures = check_gate(result, gates[options.gate])
        _row(table, job, result, passed=not failures)
        if not failures:
            chosen = folder
            # A result that was measured by an earlier run may be gone, its numbers are not.
            if not (folder / "config.json").exists():
                _quantize(out, job, samples, folder, options)
            break
        shutil.rmtree(folder, ignore_errors=True)
    out.print(table)
    out.print("no recipe holds the gate" if chosen is None else f"{chosen}: the smallest that holds the gate")
    return 1 if chosen is None else 0


def trial_key(job: "Job", samples: "Calibration | None", windows: "np.ndarray", shape: "EvalShape") -> str:
    """A digest of all that a trial's numbers depend on: program, recipe, source, samples, windows, steps."""
    from jaxmoe.ptq.job import output_specs
    from jaxmoe.ptq.quantize import fingerprint
    from jaxmoe.weights.layout import plan_shards
    from jaxmoe.weights.shards import ShardFiles

    specs = output_specs(job)
    plans = plan_shards(specs, metadata={"format": "pt"}, file_name=job.output.shard_name)
    marks = fingerprint(job, ShardFiles(Path(), specs, plans, job.output.index_name), samples)
    marks = {**marks, "windows": hashlib.sha256(windows.tobytes()).hexdigest(), "shape": asdict(shape)}
    return hashlib.sha256(json.dumps(marks, sort_keys=True).encode()).hexdigest()


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

    write_text_atomic(folder / HISTORY, json.dumps(history, indent=1) + "\n")


def _known(history: Mapping[str, Any], key: str) -> "EvalResult | None":
    from jaxmoe.decode import decode
    from jaxmoe.evals.perplexity import EvalResult

    return decode(EvalResult, history[key]["result"], where=f"{HISTORY}.{key}.result") if key in history else None


def _samples(job: "Job", options: argparse.Namespace) -> "Calibration | None":
    import jax

    return samples_of(job, options, options.out / f"{job.recipe.name}.routing", jax.devices()[: options.devices])


def _quantize(
    out: Console, job: "Job", samples: "Calibration | None", folder: Path, options: argparse.Namespace
) -> None:
    import jax

    from jaxmoe.ptq.quantize import partial_folder, quantize

    # What a trial of this recipe with other data left, finished or not.
    for path in (folder, partial_folder(folder)):
        shutil.rmtree(path, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with progress_bars(out) as progress, bar(progress, f"quantise {job.recipe.name}") as move:
        quantize(
            job,
            folder,
            calibration=samples,
            devices=jax.devices()[: options.devices],
            progress=lambda done, total, _task: move(done, total),
        )


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
