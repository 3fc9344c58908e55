"""Calibration data on the command line: options, and the samples that they ask for."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmoe.assets import asset
from jaxmoe.errors import ConfigError

if TYPE_CHECKING:
    from jaxmoe.ptq.calib import Calibration
    from jaxmoe.ptq.calib_documents import TokenizedDocument
    from jaxmoe.ptq.job import Job

BUNDLED = {"samples": 96, "min_tokens": 128, "max_tokens": 512}
"""Sampling of the bundled calibration text, which is far smaller than what recipes ask for."""


def add_calibration_arguments(parser: argparse.ArgumentParser, whose: str) -> None:
    """--calib, --calib-samples, --calib-tokens."""
    parser.add_argument(
        "--calib",
        type=Path,
        action="append",
        metavar="FILE",
        help=f"calibration data {whose}: .json, .jsonl or text (default: the bundled text)",
    )
    parser.add_argument("--calib-samples", type=int, metavar="N", help="samples (default: as the recipe says)")
    parser.add_argument("--calib-tokens", type=int, nargs=2, metavar=("MIN", "MAX"), help="lengths of samples")


def calibration_samples(job: "Job", options: argparse.Namespace) -> "tuple[tuple[TokenizedDocument, ...], Calibration]":
    """The documents, and the samples that the options ask for.

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
    tokenized = tokenize_documents(documents, tokenizer)
    return tokenized, sample_windows(tokenized, separator=min(tokenizer.eos_ids), **numbers)


def samples_of(job: "Job", options: argparse.Namespace, scratch: Path, devices: Sequence[Any]) -> "Calibration | None":
    """The samples of a recipe, extended if it says so; None: it is not calibrated.

    Args:
        job: whose recipe.
        options: of `add_calibration_arguments`.
        scratch: folder for intermediate results; made and removed.
        devices: that run samples, to see where their tokens go.

    Raises:
        ConfigError: see `calibration_samples`.
        WeightsError: the float model gives NaN on the samples, or the disk fails.
    """
    from jaxmoe.ptq.extend import extended

    recipe = job.recipe.calibration
    if recipe is None:
        return None
    documents, samples = calibration_samples(job, options)
    if not recipe.extend:
        return samples
    return extended(job, samples, documents, folder=scratch, devices=devices)


def described(samples: "Calibration") -> str:
    """One line for the log."""
    report = samples.report
    text = f"{report.samples} samples, {report.tokens:,} tokens of {len(report.domains)} domains"
    if report.repeats:
        text += f"; the data is too small: {report.repeats} samples repeat {report.repeated_tokens:,} tokens"
    return text
