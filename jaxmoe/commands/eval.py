"""jaxmoe eval MODEL [--baseline FLOAT] [--text FILE ...]: perplexity per position range, divergence, routing, gate."""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxmoe.commands.common import add_mesh_arguments, bar, checkpoint_folder, console, progress_bars, start_jax

if TYPE_CHECKING:
    import numpy as np

    from jaxmoe.evals.perplexity import EvalResult, Evaluator, RangeResult
    from jaxmoe.evals.setup import EvalShape
    from jaxmoe.ops.pages import KVDtype
    from jaxmoe.weights.load import ModelFiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="folder of the checkpoint")
    parser.add_argument("--baseline", type=Path, help="float checkpoint to compare with; enables the gate")
    parser.add_argument("--text", type=Path, action="append", help="UTF-8 file (default: the bundled evaluation text)")
    parser.add_argument("--windows", type=int, default=8, help="windows of text")
    parser.add_argument("--window-tokens", type=int, default=2176, help="tokens of a window")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of one step and window")
    parser.add_argument("--kv-cache", choices=["int8", "float32", "bfloat16"], help="default: as the checkpoint says")
    parser.add_argument("--gates", type=Path, help="limits (default: configs/gates.toml)")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    add_mesh_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Evaluates; 1 when a gate fails."""
    start_jax(options)
    from jaxmoe.engine.tokenizer import Tokenizer
    from jaxmoe.errors import ConfigError
    from jaxmoe.evals.gates import check_gate, gate_kind, load_gates
    from jaxmoe.evals.setup import EvalShape, make_windows, tokenize
    from jaxmoe.evals.windows import bundled_texts
    from jaxmoe.weights.load import open_model

    if min(options.windows, options.window_tokens, options.chunk) < 1:
        raise ConfigError("--windows, --window-tokens and --chunk must be at least 1")
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(f"--json {options.json}: the folder {options.json.parent} does not exist")
    out = console()
    files = open_model(checkpoint_folder(options.model))
    baseline = None if options.baseline is None else open_model(options.baseline)
    shape = EvalShape(windows=options.windows, window_tokens=options.window_tokens, chunk=options.chunk)
    tokenizer = Tokenizer(files.folder, files.manifest.config.vocab)
    windows = make_windows(tokenize(options.text or bundled_texts(), tokenizer), shape)
    kv_cache = options.kv_cache or files.kv_cache
    kind = gate_kind(files.schemes, kv_cache)
    gates = load_gates(options.gates)
    if kind not in gates:
        raise ConfigError(f"{options.gates} has no gate [{kind}], which this model is held to")
    gate = gates[kind]
    with progress_bars(out) as progress:
        evaluator, result, seconds = measure(progress, files, baseline, windows, shape, kv_cache, options)
    print_result(out, result)
    fed = windows[:, 1:].size * (1 if baseline is None else 2)
    out.print(
        f"{fed} tokens fed in {seconds:.1f} s ({fed / seconds:.0f} tokens/s, {options.devices} devices); "
        f"compilations after warm-up {evaluator.compilations_after_warm_up}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"kind": kind, **asdict(result)}, indent=2) + "\n", encoding="utf-8")
    if baseline is None:
        return 0
    failures = check_gate(result, gate)
    for failure in failures:
        out.print(f"gate {kind} failed: {failure}")
    if not failures:
        out.print(
            f"gate {kind} passed: at most {gate.max_perplexity_increase:+.2%} over all tokens, "
            f"{gate.max_range_increase:+.2%} in every range"
        )
    return 1 if failures else 0


def measure(
    progress: Progress,
    files: "ModelFiles",
    baseline: "ModelFiles | None",
    windows: "np.ndarray",
    shape: "EvalShape",
    kv_cache: "KVDtype",
    options: argparse.Namespace,
) -> tuple["Evaluator", "EvalResult", float]:
    """Loads, compiles and evaluates with a bar each; the last value is the seconds of the evaluation alone."""
    from jaxmoe.evals.setup import build_evaluator

    with bar(progress, "load") as move:
        evaluator = build_evaluator(
            files,
            baseline,
            shape=shape,
            kv_cache=kv_cache,
            devices=options.devices,
            plan=options.plan,
            progress=move,
        )
    with bar(progress, "compile"):
        evaluator.warm_up()
    with bar(progress, "perplexity") as move:
        start = time.perf_counter()
        result = evaluator.run(windows, move)
        seconds = time.perf_counter() - start
    return evaluator, result, seconds


def print_result(out: Console, result: "EvalResult") -> None:
    """The evaluation as a table."""
    table = Table("positions", title="perplexity", title_justify="left")
    for column in ("tokens", "baseline", "model", "difference", "KL (nats)"):
        table.add_column(column, justify="right")
    for part in result.ranges:
        table.add_row(*_cells(f"{part.start}-{part.stop or result.window_tokens}", part))
    table.add_section()
    table.add_row(*_cells("all", result.overall))
    out.print(table)
    if result.router_agreement is not None:
        out.print(
            f"router agreement {result.router_agreement:.2%} of chosen experts, worst layer "
            f"{result.router_agreement_worst_layer:.2%}"
        )


def _cells(label: str, part: "RangeResult") -> tuple[str, ...]:
    if part.increase is None:
        return label, f"{part.tokens}", "", f"{part.perplexity:.3f}", "", ""
    difference = f"{part.increase:+.2%} ± {part.standard_error:.2%}"
    return (
        label,
        f"{part.tokens}",
        f"{part.baseline_perplexity:.3f}",
        f"{part.perplexity:.3f}",
        difference,
        f"{part.kl:.4f}",
    )
