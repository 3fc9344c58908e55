"""jaxmoe report OUT [--eval RESULT.json]: the quality report of a quantised checkpoint as a page."""

import argparse
from pathlib import Path

from jaxmoe import log
from jaxmoe.commands.common import checkpoint_folder, console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("out", help="folder of a quantised checkpoint; report.html is written into it")
    parser.add_argument(
        "--eval", type=Path, metavar="FILE", help="result of `jaxmoe eval OUT --json FILE`, whose perplexity it shows"
    )


def run(options: argparse.Namespace) -> int:
    """Writes the page."""
    log.configure()
    from jaxmoe.decode import read_json
    from jaxmoe.ptq.report_html import write_report_page

    evaluation = None if options.eval is None else read_json(options.eval)
    path = write_report_page(checkpoint_folder(options.out), evaluation)
    console().print(f"{path} written", markup=False)
    return 0
