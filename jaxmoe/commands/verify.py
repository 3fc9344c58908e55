"""jaxmoe verify OUT [--source MODEL] [--min-sqnr-db DB] [--json]."""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from jaxmoe import log
from jaxmoe.commands.common import bar, checkpoint_folder, console, progress_bars
from jaxmoe.errors import ConfigError

if TYPE_CHECKING:
    from jaxmoe.ptq.verification import Verification

_MOST_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("out", help="folder of a finished checkpoint")
    parser.add_argument("--source", metavar="MODEL", help="folder of the checkpoint that it was made from")
    parser.add_argument(
        "--min-sqnr-db", type=float, metavar="DB", help="least signal-to-noise ratio of a quantised tensor (default: 6)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(options: argparse.Namespace) -> int:
    """Prints what was found; 1 if something is wrong."""
    log.configure()
    from jaxmoe.ptq.verify import verify

    least = options.min_sqnr_db
    if least is not None and not math.isfinite(least):
        raise ConfigError(f"--min-sqnr-db {least} is not a finite number")
    source: Path | None = None if options.source is None else checkpoint_folder(options.source)
    folder = checkpoint_folder(options.out)
    if options.json:
        found = verify(folder, source, min_sqnr_db=least)
        print(json.dumps({"passed": found.passed, **asdict(found)}, indent=2))
        return 0 if found.passed else 1
    out = console()
    with progress_bars(out) as progress, bar(progress, "verify") as move:
        found = verify(folder, source, min_sqnr_db=least, progress=move)
    print_found(out, found)
    return 0 if found.passed else 1


def print_found(out: Console, found: "Verification") -> None:
    """The table of roles, then every problem."""
    from jaxmoe.planner.ledger import gib
    from jaxmoe.ptq.report import REPORT_NAME

    table = Table(title=f"{found.folder} ({found.method})", title_justify="left")
    for column in ("role", "scheme", "tensors", "bytes", "share", "worst SQNR", "mean SQNR"):
        table.add_column(column, justify="left" if column in ("role", "scheme") else "right")
    for row in found.rows:
        share = f"{row.nbytes / found.nbytes:.1%}"
        ratios = (_decibels(row.least_sqnr_db), _decibels(row.mean_sqnr_db))
        table.add_row(row.role, row.scheme, str(row.tensors), gib(row.nbytes), share, *ratios)
    if found.rows:
        out.print(table)
        out.print(f"{found.tensors} tensors, {gib(found.nbytes)}, {found.quantised_share:.1%} of it quantised")
    if found.sqnr_of == "source":
        out.print(f"SQNR against {found.source}", markup=False)
    elif found.sqnr_of == "report":
        out.print(f"SQNR as the quantiser measured it ({REPORT_NAME})", markup=False)
    for problem in found.problems[:_MOST_SHOWN]:
        out.print(f"{problem.check}: {problem.where}: {problem.text}", markup=False)
    if len(found.problems) > _MOST_SHOWN:
        out.print(f"and {len(found.problems) - _MOST_SHOWN} more (all with --json)")
    out.print("verified" if found.passed else f"FAILED: {len(found.problems)} problems")


def _decibels(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1f} dB"
