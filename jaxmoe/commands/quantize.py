"""jaxmoe quantize MODEL OUT --recipe w8a8-g128 [--calib FILE] [--dry-run]."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from jaxmoe.assets import asset
from jaxmoe.commands.common import bar, checkpoint_folder, console, open_described, progress_bars, start_jax
from jaxmoe.errors import ConfigError, RecipeError

if TYPE_CHECKING:
    from jaxmoe.ptq.calib import Calibration
    from jaxmoe.ptq.stream import Job


BUNDLED = {"samples": 48, "min_tokens": 128, "max_tokens": 512}
"""Sampling of the bundled calibration text, which is far smaller than what recipes ask for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="folder of the checkpoint; with --dry-run also a config.json or a preset")
    parser.add_argument("out", type=Path, help="folder to write; must not exist or be empty")
    parser.add_argument("--recipe", default="w8a8-g128", help="name in configs/quant or a .toml file")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, write nothing")
    parser.add_argument(
        "--calib",
        type=Path,
        action="append",
        metavar="FILE",
        help="calibration data of a calibrated recipe: .json, .jsonl or text (default: the bundled text)",
    )
    parser.add_argument("--calib-samples", type=int, metavar="N", help="samples (default: as the recipe says)")
    parser.add_argument("--calib-tokens", type=int, nargs=2, metavar=("MIN", "MAX"), help="lengths of samples")
    parser.add_argument(
        "--devices", type=int, default=1, metavar="N", help="devices that run samples; on CPU they are emulated"
    )
    parser.add_argument("--no-compile-cache", action="store_true", help="do not keep compiled programs on disk")


def run(options: argparse.Namespace) -> int:
    """Quantises, or prints the matched table."""
    start_jax(options)
    from jaxmoe.planner.ledger import gib
    from jaxmoe.ptq.recipe import load_recipe
    from jaxmoe.ptq.stream import check_output, make_job, quantize
    from jaxmoe.weights.load import open_model

    out = console()
    recipe = load_recipe(options.recipe)
    files = open_described(options.model) if options.dry_run else open_model(checkpoint_folder(options.model))
    job = make_job(files, recipe)
    check_output(options.out)
    if recipe.calibration is None and options.calib:
        raise RecipeError(f"recipe {recipe.name} is not calibrated: it takes no --calib data")
    print_matches(out, job)
    if options.dry_run:
        return 0
    if recipe.calibration is None:
        with progress_bars(out) as progress, bar(progress, "quantise") as move:
            quantize(job, options.out, move)
    else:
        _calibrated(out, job, options)
    out.print(
        f"{options.out}: {gib(job.source_bytes)} -> {gib(job.result_bytes)}; report in jaxmoe_report.json", markup=False
    )
    return 0


def _calibrated(out: Console, job: "Job", options: argparse.Namespace) -> None:
    import jax

    from jaxmoe.errors import PlanError
    from jaxmoe.ptq.calibrate import quantize_calibrated

    devices = jax.devices()
    if len(devices) < options.devices:
        raise PlanError(f"--devices {options.devices}: this process has {len(devices)}")
    samples = calibration_samples(job, options)
    out.print("calibration: " + _described(samples))
    with progress_bars(out) as progress, bar(progress, "observe layers") as observing:
        with bar(progress, "quantise") as rounding:
            coverage = quantize_calibrated(
                job,
                samples,
                options.out,
                devices=devices[: options.devices],
                observing=observing,
                rounding=rounding,
            )
    out.print(coverage.text(), markup=False)


def calibration_samples(job: "Job", options: argparse.Namespace) -> "Calibration":
    """The samples that the options ask for.

    Raises:
        ConfigError: the data is wrong or too small, or the tokenizer has no end token.
    """
    from jaxmoe.engine.tokenizer import Tokenizer
    from jaxmoe.ptq.calib import sample_windows
    from jaxmoe.ptq.calib_documents import read_documents, tokenize_documents

    recipe = job.recipe.calibration
    assert recipe is not None
    files = options.calib or sorted(asset("configs", "text", "calib").glob("*.txt"))
    numbers = {"samples": recipe.samples, "min_tokens": recipe.min_tokens, "max_tokens": recipe.max_tokens}
    if not options.calib:
        numbers = BUNDLED
    if options.calib_samples is not None:
        numbers = {**numbers, "samples": options.calib_samples}
    if options.calib_tokens is not None:
        numbers = {**numbers, "min_tokens": options.calib_tokens[0], "max_tokens": options.calib_tokens[1]}
    tokenizer = Tokenizer(job.files.folder, job.files.manifest.config.vocab)
    if not tokenizer.eos_ids:
        raise ConfigError(f"{job.files.folder}: no end-of-text token, which separates documents in a sample")
    documents = [document for path in files for document in read_documents(path)]
    return sample_windows(tokenize_documents(documents, tokenizer), separator=min(tokenizer.eos_ids), **numbers)


def _described(samples: "Calibration") -> str:
    report = samples.report
    text = f"{report.samples} samples, {report.tokens:,} tokens of {len(report.domains)} domains"
    if report.repeats:
        text += f"; the data is too small: {report.repeats} samples repeat {report.repeated_tokens:,} tokens"
    return text


def print_matches(out: Console, job: "Job") -> None:
    """The matched table: every role with its rule, scheme, tensors and bytes."""
    from jaxmoe.planner.ledger import gib
    from jaxmoe.ptq.stream import matched_table

    table = Table(title=f"recipe {job.recipe.name}", title_justify="left")
    for column in ("role", "rule", "scheme", "tensors", "before", "after"):
        table.add_column(column, justify="left" if column in ("role", "scheme") else "right")
    for row in matched_table(job):
        before, after = gib(row.source_bytes), gib(row.result_bytes)
        table.add_row(row.role, str(row.rule + 1), row.scheme, str(row.tensors), before, after)
    table.add_section()
    table.add_row("total", "", "", "", gib(job.source_bytes), gib(job.result_bytes))
    out.print(table)
    out.print(f"peak host memory of the stream: {gib(job.peak_bytes)} beside the interpreter")
