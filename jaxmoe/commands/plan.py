"""jaxmoe plan MODEL [--devices N] [--recipe R] [--memory 64GiB]: the ledger, from config.json alone."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from jaxmoe import log
from jaxmoe.assets import asset
from jaxmoe.commands.common import add_engine_arguments, console, engine_config, parse_bytes
from jaxmoe.errors import ConfigError

if TYPE_CHECKING:
    from jaxmoe.planner.ledger import Ledger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="folder with config.json, a config.json, or a name in configs/models")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="devices of the mesh")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="sharding plan")
    parser.add_argument("--recipe", help="recipe to plan for (default: as the checkpoint is, else float)")
    parser.add_argument("--memory", help="memory of one device, such as 64GiB: refuse what does not fit")
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the ledger; refuses what does not fit."""
    log.configure()
    from jaxmoe.decode import read_json
    from jaxmoe.engine.llm import choose_plan
    from jaxmoe.models.manifest import build_manifest
    from jaxmoe.models.registry import read_config
    from jaxmoe.planner.ledger import Ledger, gib, kv_token_bytes, serve_items
    from jaxmoe.ptq.recipe import load_recipe, match_recipe, schemes_of_matches
    from jaxmoe.weights.formats import read_quantization, schemes_of

    path = _config_path(options.model)
    data = read_json(path)
    family, config = read_config(data, str(path))
    manifest = build_manifest(family, config)
    if options.recipe is None:
        schemes = schemes_of(read_quantization(data, str(path)), manifest, str(path))
    else:
        schemes = schemes_of_matches(match_recipe(load_recipe(options.recipe), manifest))
    plan = choose_plan(config.family, options.devices, options.plan)
    engine = engine_config(options)
    items = serve_items(
        manifest,
        schemes,
        plan,
        dtype=engine.dtype,
        kv_cache=engine.kv_cache,
        page_size=engine.page_size,
        pages=engine.pages,
        layouts=engine.layouts(),
    )
    ledger = Ledger(devices=plan.num_devices, items=tuple(items))
    out = console()
    out.print(f"{config.family}, {manifest.num_parameters / 1e9:.3f} B parameters, mesh {dict(plan.mesh)}")
    print_ledger(out, ledger, shared_host=False)
    per_token = kv_token_bytes(manifest, engine.kv_cache)
    tokens = (engine.pages - 1) * engine.page_size
    out.print(f"keys and values: {per_token:,} bytes a token; {tokens:,} tokens a device")
    if options.memory is not None:
        limit = parse_bytes(options.memory)
        ledger.check(limit, shared_host=False)
        out.print(f"fits {gib(limit)} a device: {gib(limit - ledger.device_bytes)} left")
    return 0


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


def _config_path(model: str) -> Path:
    path = Path(model)
    if path.is_dir():
        return path / "config.json"
    if path.suffix == ".json":
        return path
    try:
        return asset("configs", "models", f"{model}.json")
    except ConfigError:
        known = sorted(entry.stem for entry in asset("configs", "models").glob("*.json"))
        raise ConfigError(f"{model} is no folder, no config.json and no preset; presets: {', '.join(known)}") from None
