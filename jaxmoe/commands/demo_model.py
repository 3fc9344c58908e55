"""jaxmoe demo-model OUT [--top-k 6]."""

import argparse
from pathlib import Path

from jaxmoe.commands.common import bar, console, progress_bars


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("out", type=Path, help="folder to write; must not exist or be empty")
    parser.add_argument("--top-k", type=int, default=6, help="routed experts per token, 1..8; 8 equals the dense model")


def run(options: argparse.Namespace) -> int:
    """Writes the checkpoint."""
    from jaxmoe.demo.checkpoint import make_demo_model

    out = console()
    with progress_bars(out) as progress, bar(progress, "demo model") as move:
        report = make_demo_model(
            options.out, top_k=options.top_k, progress=lambda _stage, done, total: move(done, total)
        )
    recall = sum(layer.recall for layer in report.layers) / len(report.layers)
    out.print(
        f"{options.out}: {report.total_bytes / 1e6:.1f} MB, router recall@{options.top_k} {recall:.3f}", markup=False
    )
    return 0
