"""jaxmoe analyze MODEL -o FOLDER [--calib FILE ...] [--budget 420GB]: what is hard to quantise, and a recipe."""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from jaxmoe.commands.calibration import add_calibration_arguments, calibration_samples, described
from jaxmoe.commands.common import (
    DeviceChoice,
    bar,
    checkpoint_folder,
    console,
    parse_bytes,
    parse_devices,
    progress_bars,
    start_jax,
)
from jaxmoe.errors import ConfigError

if TYPE_CHECKING:
    from jaxmoe.ptq.job import Job
    from jaxmoe.ptq.sensitivity.suggest import Suggestion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="folder of the float checkpoint")
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="FOLDER", help="folder to write; must not exist or be empty"
    )
    parser.add_argument(
        "--schemes", metavar="A,B,..", help="candidates (default: w8a8-channel,w8a8-g128,w4a8-g128,w8a16-g128)"
    )
    parser.add_argument("--budget", metavar="BYTES", help="suggest a recipe of at most so much, such as 420GB")
    parser.add_argument(
        "--activation-bits",
        type=int,
        choices=(8, 16),
        help="of the suggested recipe's schemes (with --budget; default: 8)",
    )
    parser.add_argument("--metric", default="kurtosis", help="ranking that is printed (default: kurtosis)")
    parser.add_argument("--top-k", type=int, default=15, metavar="K", help="rows that are printed (default: 15)")
    add_calibration_arguments(parser, "that is looked at")
    parser.add_argument(
        "--devices",
        type=parse_devices,
        default=DeviceChoice(count=1),
        metavar="N|all|0,1,..",
        help="devices that work; on CPU they are emulated (default: 1); any number gives the same result",
    )
    parser.add_argument("--no-compile-cache", action="store_true", help="do not keep compiled programs on disk")


def run(options: argparse.Namespace) -> int:
    """Analyses, prints the ranking, writes the folder."""
    start_jax(options)
    from jaxmoe.ptq.quantize import check_output
    from jaxmoe.ptq.sensitivity.analyze import DEFAULT_SCHEMES, analyze, check_schemes, float_job
    from jaxmoe.ptq.sensitivity.plots import analysis_charts
    from jaxmoe.ptq.sensitivity.suggest import check_budget, schemes_of_bits, suggest
    from jaxmoe.ptq.sensitivity.summary import LINEAR_METRICS
    from jaxmoe.quant.scheme import parse_scheme
    from jaxmoe.weights.load import open_model

    out, names = console(), DEFAULT_SCHEMES if options.schemes is None else tuple(options.schemes.split(","))
    if len(set(names)) < len(names):
        raise ConfigError(f"--schemes {options.schemes} names a scheme twice")
    if options.top_k < 1:
        raise ConfigError(f"--top-k {options.top_k} is below 1")
    schemes = [parse_scheme(name) for name in names]
    metrics = [*LINEAR_METRICS, *(f"{kind} {name}" for kind in ("error", "mse") for name in names)]
    if options.metric not in metrics:
        raise ConfigError(f"--metric {options.metric!r} is none of {', '.join(metrics)}")
    budget = None if options.budget is None else parse_bytes(options.budget)
    if budget is None and options.activation_bits is not None:
        raise ConfigError(f"--activation-bits {options.activation_bits} is of the suggested recipe: give --budget too")
    candidates = None if budget is None else schemes_of_bits(names, options.activation_bits or 8)
    check_output(options.out)
    job = float_job(open_model(checkpoint_folder(options.model)))
    check_schemes(job, schemes)
    if budget is not None and candidates is not None:
        check_budget(job, candidates, budget)
    _, samples = calibration_samples(job, options)
    out.print(f"calibration: {described(samples)}", markup=False)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="work-", dir=options.out) as work, progress_bars(out) as progress:
        with bar(progress, "analyse") as move:
            result, summary = analyze(
                job,
                samples,
                schemes,
                work=Path(work),
                devices=options.devices.choose(),
                progress=lambda done, total, _task: move(done, total),
            )
    out.print(summary.text(), markup=False)
    print_ranking(out, result, options.metric, options.top_k)
    files = {"analysis.json": json.dumps(result, indent=1) + "\n", "ranking.yaml": ranking_yaml(result)}
    files |= analysis_charts(result)
    if budget is not None and candidates is not None:
        suggestion = suggest(job, result, candidates, budget, name="suggested")
        files["recipe.toml"] = suggestion.text
    _write(options.out, files)
    if budget is not None and candidates is not None:
        print_suggestion(out, job, options.out / "recipe.toml", suggestion, budget)
    out.print(f"{options.out}: {', '.join(sorted(files))}", markup=False)
    return 0


def ranking_yaml(result: dict[str, Any]) -> str:
    """All rankings as YAML: metric -> names, the most sensitive first."""
    import yaml

    return yaml.safe_dump(result["ranking"], sort_keys=False)


def print_ranking(out: Console, result: dict[str, Any], metric: str, count: int) -> None:
    """The most sensitive linear layers, or layers, by a metric."""
    kind, _, scheme = metric.partition(" ")
    out.print(_layer_table(result, scheme, count) if kind == "mse" else _linear_table(result, kind, scheme, count))


def _linear_table(result: dict[str, Any], kind: str, scheme: str, count: int) -> Table:
    def value(row: dict[str, Any]) -> float:
        known = row["error"][scheme] if scheme else row[kind]
        return -math.inf if known is None else known

    title = f"linear layers, most sensitive by {f'{kind} {scheme}'.strip()}; errors: noise / signal of the output in dB"
    table = Table("layer", "role", title=title, title_justify="left", box=None)
    for head in ("std", "quantile", "kurtosis", *(name.replace("-", "\n") for name in result["schemes"])):
        table.add_column(head, justify="right")
    for row in sorted(result["linears"], key=value, reverse=True)[:count]:
        cells = [_number(row[key]) for key in ("std", "quantile", "kurtosis")]
        cells += [_decibel(row["error"][name]) for name in result["schemes"]]
        table.add_row(str(row["layer"]), row["role"], *cells)
    return table


def _layer_table(result: dict[str, Any], scheme: str, count: int) -> Table:
    title = f"layers, most sensitive by mse under {scheme}"
    table = Table("layer", title=title, title_justify="left", box=None)
    for head in ("mse", "noise / signal\ndB", "experts that\nstay chosen", "INT8 cache\nSQNR, dB"):
        table.add_column(head, justify="right")
    for row in sorted(result["layers"], key=lambda row: row["mse"][scheme], reverse=True)[:count]:
        agreement = row["router_agreement"]
        shown = "" if agreement is None else f"{agreement[scheme]:.2%}"
        known = [(name, value) for name, value in row["cache_sqnr_db"].items() if value is not None]
        cache = ", ".join(f"{name} {value:.1f}" for name, value in known)
        relative = _decibel(row["relative"][scheme])
        table.add_row(str(row["layer"]), _number(row["mse"][scheme]), relative, shown, cache)
    return table


def print_suggestion(out: Console, job: "Job", path: Path, suggestion: "Suggestion", budget: int) -> None:
    """What the suggested recipe does; it is read back from its file and matched, as `jaxmoe quantize` would."""
    from jaxmoe.ptq.job import make_job
    from jaxmoe.ptq.recipe import load_recipe

    whole = make_job(job.files, load_recipe(str(path)))
    assert whole.result_bytes == suggestion.total_bytes <= budget, (whole.result_bytes, suggestion.total_bytes, budget)
    table = Table(title=f"suggested for {budget:,} bytes", title_justify="left")
    for head, side in (("roles", "left"), ("scheme", "left"), ("bytes", "right"), ("error", "right")):
        table.add_column(head, justify=side)  # type: ignore[arg-type]
    for roles, choice in zip(suggestion.units, suggestion.solution.choices, strict=True):
        table.add_row(", ".join(roles), choice.scheme, f"{choice.nbytes:,}", _number(choice.error))
    table.add_section()
    table.add_row("all, with what stays float", "", f"{whole.result_bytes:,}", _number(suggestion.solution.error))
    out.print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _decibel(ratio: float | None) -> str:
    return f"{10 * math.log10(ratio):.1f}" if ratio else ""


def _write(folder: Path, files: dict[str, str]) -> None:
    from jaxmoe.weights.layout import write_text_atomic

    for name, text in files.items():
        write_text_atomic(folder / name, text)
