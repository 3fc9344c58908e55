"""jaxmoe quantize MODEL OUT [--recipe NAME|FILE | --quant-type TYPE] [--devices N|all|LIST] [--resume] [--dry-run]."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxmoe.commands.calibration import add_calibration_arguments, described, samples_of
from jaxmoe.commands.common import (
    DeviceChoice,
    checkpoint_folder,
    console,
    open_described,
    parse_devices,
    progress_bars,
    start_jax,
)
from jaxmoe.errors import ConfigError, RecipeError

if TYPE_CHECKING:
    from jaxmoe.models.manifest import Manifest
    from jaxmoe.ptq.calib import Calibration
    from jaxmoe.ptq.job import Job
    from jaxmoe.ptq.quantize import Result
    from jaxmoe.ptq.recipe import Recipe
    from jaxmoe.ptq.tasks.link import Link


DEFAULT_RECIPE = "w8a8-g128-smooth"
_ANY_SIZE = 1 << 62
_JOIN_S = 600.0
"""Process 0 may read calibration data for minutes before it answers."""
FORMATS = ("jaxmoe", "compressed-tensors", "ascendv1")
TARGETS = {"jaxmoe": "jaxmoe", "vllm": "compressed-tensors", "vllm-ascend": "ascendv1", "sglang": "compressed-tensors"}
"""Engine -> the format that it gets unless another is asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="folder of the checkpoint; with --dry-run also a config.json or a preset")
    parser.add_argument("out", type=Path, help="folder to write; must not exist or be empty")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--recipe",
        help="name in configs/quant, a .toml file, or a .yaml file of msModelSlim (default: w8a8-g128-smooth)",
    )
    how.add_argument("--quant-type", metavar="TYPE", help="w8a8, w4a8c8, ...: the recipe that fits the model's family")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, write nothing")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse what would only be reported: notes, and weights on which their rounding method gives up",
    )
    parser.add_argument("--resume", action="store_true", help="take up what a killed run left")
    add_target_arguments(parser)
    add_calibration_arguments(parser, "of a calibrated recipe")
    parser.add_argument(
        "--devices",
        type=parse_devices,
        default=DeviceChoice(count=1),
        metavar="N|all|0,1,..",
        help="devices that work: how many, all, or which; on CPU they are emulated (default: 1)",
    )
    add_process_arguments(parser)
    parser.add_argument("--no-compile-cache", action="store_true", help="do not keep compiled programs on disk")


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """--format, --target, --tp."""
    parser.add_argument("--format", choices=FORMATS, help="format of the result (default: what the target reads)")
    parser.add_argument(
        "--target", choices=sorted(TARGETS), default="jaxmoe", help="engine that must be able to load the result"
    )
    parser.add_argument(
        "--tp", default="", metavar="1,2,4,8", help="degrees of tensor parallelism that it must load at"
    )


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """--coordinator, --processes, --process-id."""
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0, when several processes share the work and the folders"
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many take part")
    parser.add_argument("--process-id", type=int, metavar="I", help="which this is, from 0")


def run(options: argparse.Namespace) -> int:
    """Quantises, or prints the matched table."""
    start_jax(options)
    from jaxmoe.planner.ledger import gib
    from jaxmoe.ptq.export import output_format
    from jaxmoe.ptq.export.targets import check_target
    from jaxmoe.ptq.job import make_job
    from jaxmoe.ptq.quantize import check_output
    from jaxmoe.ptq.report_html import write_report_page
    from jaxmoe.weights.load import open_model

    out = console()
    link = link_of(options)
    files = open_described(options.model) if options.dry_run else open_model(checkpoint_folder(options.model))
    chosen = chosen_recipe(options, files.manifest)
    recipe = chosen.recipe
    output = output_format(options.format or chosen.output or TARGETS[options.target])
    job = make_job(files, recipe, output)
    notes = (*chosen.notes, *job.notes)
    check_target(options.target, parse_degrees(options.tp), job.matches, files.manifest, output)
    check_output(options.out)
    if recipe.calibration is None and options.calib:
        raise RecipeError(f"recipe {recipe.name} is not calibrated: it takes no --calib data")
    for note in notes:
        out.print(f"note: {note}", markup=False)
    if notes and options.strict:
        raise RecipeError(f"--strict: recipe {recipe.name} is not followed to the letter, see the notes above")
    print_matches(out, job)
    for measured in recipe.evidence:
        out.print(f"measured with this recipe: {measured.line()}", markup=False)
    if options.dry_run:
        print_memory(out, job, options.devices.count or 1, None)
        print_estimate(out, job, options.devices.count or 1)
        return 0
    result = _quantize(out, job, options, link, chosen.max_shard_bytes)
    out.print(result.summary.text(), markup=False)
    if result.coverage is not None:
        out.print(result.coverage.text(), markup=False)
    if result.to_nearest:
        more = ", ..." if len(result.to_nearest) > 3 else ""
        out.print(
            f"{len(result.to_nearest)} weights were rounded to nearest, since their rounding method gave up on the "
            f"products of their inputs (more samples help): {', '.join(result.to_nearest[:3])}{more}",
            markup=False,
        )
    if link is None or link.serve:
        page = write_report_page(options.out)
        sizes = f"{gib(job.source_bytes)} -> {gib(job.result_bytes)}"
        out.print(f"{options.out}: {sizes}; report in jaxmoe_report.json and {page.name}", markup=False)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A recipe, and what its file says besides."""

    recipe: "Recipe"
    output: str | None = None
    """The output format that it asks for."""
    max_shard_bytes: int = 4 << 30
    notes: tuple[str, ...] = ()
    """What of the file is not followed to the letter."""


def chosen_recipe(options: argparse.Namespace, manifest: "Manifest") -> Chosen:
    """What the options ask for.

    Raises:
        RecipeError, ConfigError, UnsupportedError: it does not exist, or cannot be done.
    """
    from jaxmoe.ptq.recipe import load_recipe
    from jaxmoe.ptq.recipes.library import recipe_for
    from jaxmoe.ptq.recipes.modelslim import read_modelslim

    if options.quant_type is not None:
        return Chosen(recipe=recipe_for(options.quant_type, manifest.config.family))
    name = options.recipe or DEFAULT_RECIPE
    if name.endswith((".yaml", ".yml")):
        read = read_modelslim(Path(name), manifest)
        # Of the file's own: 0 is one file of any size.
        sizes = {} if read.shard_gib is None else {"max_shard_bytes": (read.shard_gib << 30) or _ANY_SIZE}
        return Chosen(recipe=read.recipe, output=read.output, notes=read.notes, **sizes)
    return Chosen(recipe=load_recipe(name))


def parse_degrees(text: str) -> list[int]:
    """'1,2,4' -> [1, 2, 4]; nothing of an empty text.

    Raises:
        ConfigError: it is no list of numbers.
    """
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"--tp {text}: give degrees of tensor parallelism such as 1,2,4,8") from None


def link_of(options: argparse.Namespace) -> "Link | None":
    """Where the other processes are; None: there are none.

    Raises:
        ConfigError: the options do not go together.
    """
    given = (options.coordinator, options.processes, options.process_id)
    if all(each is None for each in given):
        return None
    if any(each is None for each in given):
        raise ConfigError("--coordinator, --processes and --process-id go together: give all three or none")
    if not 0 <= options.process_id < options.processes:
        raise ConfigError(f"--process-id {options.process_id} is not one of 0 to {options.processes - 1}")
    from jaxmoe.ptq.tasks.link import Link

    host, _, port = options.coordinator.rpartition("://")[2].rpartition(":")
    if not (host and port.isdigit()):
        raise ConfigError(f"--coordinator {options.coordinator}: give HOST:PORT of process 0, such as 10.0.0.1:7777")
    address = options.coordinator if "://" in options.coordinator else f"tcp://{options.coordinator}"
    return Link(address=address, serve=options.process_id == 0, processes=options.processes, join_s=_JOIN_S)


def _quantize(
    out: Console, job: "Job", options: argparse.Namespace, link: "Link | None", max_shard_bytes: int
) -> "Result":
    from jaxmoe.ptq.quantize import quantize

    devices = options.devices.choose()
    scratch = options.out.with_name(f"{options.out.name}.routing{options.process_id or ''}")
    samples = samples_of(job, options, scratch, devices)
    if samples is not None:
        out.print("calibration: " + described(samples))
    print_memory(out, job, len(devices), samples)
    with progress_bars(out) as progress:
        return quantize(
            job,
            options.out,
            calibration=samples,
            devices=devices,
            resume=options.resume,
            progress=_Moved(progress, f"quantise to {job.recipe.name}"),
            link=link,
            strict=options.strict,
            max_shard_bytes=max_shard_bytes,
        )


class _Moved:
    """Moves a bar, and prints a line when a layer is done."""

    def __init__(self, progress: Progress, description: str):
        self._progress = progress
        self._bar = progress.add_task(description, total=None)

    def __call__(self, done: float, total: float, task: str) -> None:
        self._progress.update(self._bar, completed=done, total=total)
        words = task.split()
        if words[0] == "layer" and words[-1] == "clean":
            self._progress.console.print(f"layer {words[1]} done, {100 * done / max(total, 1):.0f} % of the work")


def print_estimate(out: Console, job: "Job", workers: int) -> None:
    """How long it would take."""
    from jaxmoe.ptq.estimate import estimate

    time = estimate(job, workers=workers)
    hours, minutes = divmod(round(time.seconds / 60), 60)
    out.print(
        f"{time.tasks:,} tasks in {time.waves:,} waves; roughly {hours} h {minutes:02} min of computing on {workers} "
        f"device{'s' if workers > 1 else ''} like this one ({time.rate / 1e9:,.0f} GFLOP/s measured), beside reading "
        "and writing",
        markup=False,
    )


def print_memory(out: Console, job: "Job", workers: int, samples: "Calibration | None") -> None:
    """What it takes of memory and disk, with these samples or as many as the recipe asks for."""
    from jaxmoe.planner.ledger import gib
    from jaxmoe.ptq.memory import memory_of

    tokens, longest = (None, None) if samples is None else (int(samples.lengths.sum()), samples.tokens.shape[1])
    memory = memory_of(job, workers=workers, tokens=tokens, longest=longest)
    out.print(f"host memory at most: {gib(memory.host_bytes)} beside the interpreter and compiled programs")
    if memory.disk_bytes:
        out.print(f"disk for intermediate results at most: {gib(memory.disk_bytes)}")


def print_matches(out: Console, job: "Job") -> None:
    """The matched table: every role with its rule, scheme, tensors and bytes."""
    from jaxmoe.planner.ledger import gib
    from jaxmoe.ptq.job import matched_table

    table = Table(title=f"recipe {job.recipe.name}, written as {job.output.name}", title_justify="left")
    columns: dict[str, Any] = {"role": "left", "rule": "right", "scheme": "left", "rounding": "left"}
    for column in (*columns, "tensors", "before", "after"):
        table.add_column(column, justify=columns.get(column, "right"))
    for row in matched_table(job):
        before, after = gib(row.source_bytes), gib(row.result_bytes)
        table.add_row(row.role, str(row.rule + 1), row.scheme, row.rounding, str(row.tensors), before, after)
    table.add_section()
    table.add_row("total", "", "", "", "", gib(job.source_bytes), gib(job.result_bytes))
    out.print(table)
