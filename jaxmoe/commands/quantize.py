"""jaxmoe quantize MODEL OUT --recipe w8a8-g128 [--dry-run]."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from jaxmoe import log
from jaxmoe.commands.common import bar, checkpoint_folder, console, open_described, progress_bars

if TYPE_CHECKING:
    from jaxmoe.ptq.stream import Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="folder of the checkpoint; with --dry-run also a config.json or a preset")
    parser.add_argument("out", type=Path, help="folder to write; must not exist or be empty")
    parser.add_argument("--recipe", default="w8a8-g128", help="name in configs/quant or a .toml file")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, write nothing")


def run(options: argparse.Namespace) -> int:
    """Quantises, or prints the matched table."""
    log.configure()
    from jaxmoe.planner.ledger import gib
    from jaxmoe.ptq.recipe import load_recipe
    from jaxmoe.ptq.stream import check_output, make_job, quantize
    from jaxmoe.weights.load import open_model

    out = console()
    recipe = load_recipe(options.recipe)
    files = open_described(options.model) if options.dry_run else open_model(checkpoint_folder(options.model))
    job = make_job(files, recipe)
    check_output(options.out)
    print_matches(out, job)
    if options.dry_run:
        return 0
    with progress_bars(out) as progress, bar(progress, "quantise") as move:
        quantize(job, options.out, move)
    out.print(
        f"{options.out}: {gib(job.source_bytes)} -> {gib(job.result_bytes)}; report in jaxmoe_report.json", markup=False
    )
    return 0


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
