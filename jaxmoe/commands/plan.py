"""jaxmoe plan MODEL [--devices N] [--recipe R] [--memory 64GiB]: the ledger, from config.json alone."""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from jaxmoe import log
from jaxmoe.commands.common import add_engine_arguments, console, engine_config, open_described, parse_bytes

if TYPE_CHECKING:
    from jaxmoe.models.manifest import Manifest
    from jaxmoe.planner.ledger import Ledger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="folder with config.json, a config.json, or a name in configs/models")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="devices of the mesh")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="sharding plan")
    parser.add_argument("--recipe", help="recipe to plan for (default: as the checkpoint is, else float)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="float weights and activations (default: the profile's)"
    )
    parser.add_argument("--memory", help="memory of one device, such as 64GiB: refuse what does not fit")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the ledger; refuses what does not fit."""
    log.configure()
    from jaxmoe.engine.llm import choose_plan
    from jaxmoe.planner.ledger import Ledger, gib, kv_token_bytes, serve_items
    from jaxmoe.ptq.recipe import load_recipe, match_recipe, schemes_of_matches

    files = open_described(options.model)
    manifest, config = files.manifest, files.manifest.config
    schemes = files.schemes
    if options.recipe is not None:
        schemes = schemes_of_matches(match_recipe(load_recipe(options.recipe), manifest))
    plan = choose_plan(config.family, options.devices, options.plan)
    engine = engine_config(options)
    if options.dtype is not None:
        engine = replace(engine, dtype=options.dtype)
    items = serve_items(
        manifest,
        schemes,
        plan,
        dtype=engine.dtype,
        kv_cache=engine.kv_cache,
        page_size=engine.page_size,
        pages=engine.pages,
        layouts=engine.layouts(),
        table_tokens=engine.table_width * engine.page_size,
    )
    ledger = Ledger(devices=plan.num_devices, items=tuple(items))
    out = console()
    out.print(f"{config.family}, {describe_parameters(manifest)}, mesh {dict(plan.mesh)}, {engine.dtype}")
    print_ledger(out, ledger, shared_host=False)
    per_token = kv_token_bytes(manifest, engine.kv_cache, plan)
    tokens = (engine.pages - 1) * engine.page_size
    out.print(f"keys and values: {per_token:,} bytes a token; {tokens:,} tokens a device")
    if options.memory is not None:
        limit = parse_bytes(options.memory)
        ledger.check(limit, shared_host=False)
        out.print(f"fits {gib(limit)} a device: {gib(limit - ledger.device_bytes)} left")
    return 0


def describe_parameters(manifest: "Manifest") -> str:
    """'769.907 B parameters', and those of multi-token-prediction blocks where there are some."""
    extra = sum(math.prod(entry.shape) for entry in manifest.entries if entry.path.startswith("mtp."))
    text = f"{(manifest.num_parameters - extra) / 1e9:.3f} B parameters"
    return f"{text} and {extra / 1e9:.3f} B of multi-token prediction" if extra else text


def print_ledger(out: Console, ledger: "Ledger", *, shared_host: bool) -> None:
    """The ledger as a table, of one device or of a host that emulates all of them."""
    from jaxmoe.planner.ledger import gib

    title = f"memory of this host ({ledger.devices} emulated devices)" if shared_host else "memory of one device"
    table = Table("owner", "kind", title=title, title_justify="left")
    table.add_column("bytes", justify="right")
    for item in ledger.items:
        count = item.host_bytes if shared_host else item.device_bytes
        table.add_row(item.owner, item.kind, gib(count))
    table.add_section()
    table.add_row("total", "", gib(ledger.host_bytes if shared_host else ledger.device_bytes))
    out.print(table)
