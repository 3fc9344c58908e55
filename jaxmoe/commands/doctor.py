"""jaxmoe doctor [MODEL]: devices, versions, which implementation each operator uses, and proof that INT8 is INT8."""

import argparse
from importlib import metadata

from rich.table import Table

from jaxmoe.commands.common import (
    add_engine_arguments,
    add_mesh_arguments,
    checkpoint_folder,
    console,
    engine_config,
    start_jax,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", nargs="?", help="checkpoint whose generation step is proved as well")
    add_mesh_arguments(parser)
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the report; 1 when INT8 is slower than float somewhere."""
    start_jax(options)
    import jax

    from jaxmoe.bench.int8 import compare_int8
    from jaxmoe.engine.llm import choose_plan, load_runner
    from jaxmoe.ops.lint import check_integer_dots
    from jaxmoe.ops.report import operator_report
    from jaxmoe.weights.load import open_model

    out = console()
    kinds = ", ".join(sorted({device.device_kind for device in jax.devices()}))
    packages = ("jaxmoe", "jax", "jaxlib", "flax")
    out.print(", ".join(f"{name} {metadata.version(name)}" for name in packages))
    out.print(f"{len(jax.devices())} devices: {kinds} ({jax.default_backend()})\n")
    for line in operator_report():
        out.print(line)
    table = Table("rows", title="INT8 against float32, one linear layer 2048 x 2048", title_justify="left")
    for column in ("float32 (ms)", "INT8 g128 (ms)", "speed-up", "relative error"):
        table.add_column(column, justify="right")
    slower = []
    for row in compare_int8():
        table.add_row(
            str(row.tokens), f"{row.float_ms:.2f}", f"{row.int8_ms:.2f}", f"{row.speedup:.2f}", f"{row.error:.4f}"
        )
        if row.speedup < 1:
            slower.append(row.tokens)
    out.print()
    out.print(table)
    if slower:
        out.print(f"INT8 is SLOWER than float32 on this backend at {', '.join(map(str, slower))} rows")
    if options.model is not None:
        files = open_model(checkpoint_folder(options.model))
        plan = choose_plan(files.manifest.config.family, options.devices, options.plan)
        runner = load_runner(files, plan, engine_config(options))
        for layout in runner.config.layouts():
            dots = check_integer_dots(runner.jaxpr(layout))
            out.print(f"step {layout.rows} x {layout.chunk}: {dots} integer products, all INT8 x INT8 -> INT32")
    return 1 if slower else 0
