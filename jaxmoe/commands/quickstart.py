"""jaxmoe quickstart: the whole product on one page, on 8 emulated devices."""

import argparse
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxmoe.commands.common import (
    add_mesh_arguments,
    bar,
    console,
    host_memory_bytes,
    peak_memory_bytes,
    progress_bars,
    start_jax,
)
from jaxmoe.commands.eval import measure, print_result
from jaxmoe.commands.plan import print_ledger

if TYPE_CHECKING:
    from jaxmoe.engine.llm import Answer
    from jaxmoe.evals.perplexity import EvalResult
    from jaxmoe.evals.setup import EvalShape
    from jaxmoe.planner.ledger import Ledger
    from jaxmoe.weights.load import ModelFiles

_PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Name three colours of the rainbow.",
    "What do bees make?",
    "Explain in one sentence what a computer is.",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
    "Who wrote Romeo and Juliet?",
)
_RUNTIME_BYTES = 640 * 2**20
"""Python, JAX, transformers and compiled programs: 560 to 710 MiB in three runs on x86-64 Linux, since the compiler's
garbage is given back (engine.heap)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--dir", type=Path, default=Path("demo"), help="folder for the two checkpoints (default: demo)")
    parser.add_argument("--recipe", default="w8a8-g128", help="name in configs/quant or a .toml file")
    parser.add_argument("--fresh", action="store_true", help="make the checkpoints again even if they are there")
    parser.add_argument("--windows", type=int, default=8, help="evaluation windows")
    parser.add_argument("--window-tokens", type=int, default=2176, help="tokens of an evaluation window")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of each chat answer")
    add_mesh_arguments(parser, devices=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What the final table shows."""

    result: "EvalResult"
    eval_tokens_per_s: float
    decode_tokens_per_s: float
    compilations: int
    pages_in_use: int


def run(options: argparse.Namespace) -> int:
    """Makes, plans, quantises, measures, chats; 1 when a gate fails."""
    start_jax(options)
    from jaxmoe.evals.gates import check_gate, gate_kind, load_gates
    from jaxmoe.evals.setup import EvalShape
    from jaxmoe.weights.load import open_model

    began = time.perf_counter()
    out = console()
    source, target = options.dir / "smollm2-moe", options.dir / f"smollm2-moe-{Path(options.recipe).stem}"
    shape = EvalShape(windows=options.windows, window_tokens=options.window_tokens)
    with progress_bars(out) as progress:
        _make_demo(out, progress, source, fresh=options.fresh)
        baseline = open_model(source)
        ledger = _ledger(baseline, shape, options)
        print_ledger(out, ledger, shared_host=True)
        ledger.check(host_memory_bytes(), shared_host=True)
        _quantize(out, progress, source, target, options)
        files = open_model(target)
        measured, answers = _measure(progress, files, baseline, shape, options)
    for prompt, answer in zip(_PROMPTS, answers, strict=True):
        out.print(f"[bold]> {prompt}[/bold]")
        out.print(answer.text.strip(), markup=False)
    out.print()
    print_result(out, measured.result)
    _print_table(out, files, baseline, ledger, measured)
    kind = gate_kind(files.schemes, files.kv_cache)
    failures = check_gate(measured.result, load_gates()[kind])
    for failure in failures:
        out.print(f"gate {kind} failed: {failure}")
    out.print(f"gate {kind} {'FAILED' if failures else 'passed'}; {time.perf_counter() - began:.0f} s in all")
    return 1 if failures else 0


def _make_demo(out: Console, progress: Progress, source: Path, *, fresh: bool) -> None:
    from jaxmoe.demo.checkpoint import make_demo_model

    if fresh and source.exists():
        shutil.rmtree(source)
    if (source / "config.json").exists():
        out.print(f"demo model: {source} is there already (--fresh makes it again)")
        return
    source.parent.mkdir(parents=True, exist_ok=True)
    with bar(progress, "demo model") as move:
        make_demo_model(source, progress=lambda _stage, done, total: move(done, total))


def _quantize(out: Console, progress: Progress, source: Path, target: Path, options: argparse.Namespace) -> None:
    from jaxmoe.ptq.job import prepare
    from jaxmoe.ptq.quantize import quantize
    from jaxmoe.ptq.recipe import load_recipe

    if options.fresh and target.exists():
        shutil.rmtree(target)
    if (target / "config.json").exists():
        out.print(f"quantised model: {target} is there already (--fresh makes it again)")
        return
    with bar(progress, f"quantise to {options.recipe}") as move:
        quantize(
            prepare(source, load_recipe(options.recipe)), target, progress=lambda done, total, _: move(done, total)
        )


def _ledger(baseline: "ModelFiles", shape: "EvalShape", options: argparse.Namespace) -> "Ledger":
    """Both models at once, one of them not made yet: the evaluation is the widest point."""
    from jaxmoe.engine.llm import choose_plan
    from jaxmoe.planner.ledger import Ledger, reserve_item
    from jaxmoe.ptq.recipe import load_recipe, match_recipe, schemes_of_matches

    manifest = baseline.manifest
    plan = choose_plan(manifest.config.family, options.devices, options.plan)
    recipe = load_recipe(options.recipe)
    schemes = schemes_of_matches(match_recipe(recipe, manifest))
    items = [
        *shape.items(manifest, {}, plan, "float32", "baseline: "),
        *shape.items(manifest, schemes, plan, recipe.kv_cache, "model: "),
        reserve_item("Python, JAX, compiled programs", _RUNTIME_BYTES, plan.num_devices),
    ]
    return Ledger(devices=plan.num_devices, items=tuple(items))


def _measure(
    progress: Progress,
    files: "ModelFiles",
    baseline: "ModelFiles",
    shape: "EvalShape",
    options: argparse.Namespace,
) -> tuple[_Measured, list["Answer"]]:
    from jaxmoe.engine.llm import LLM
    from jaxmoe.engine.request import SamplingParams
    from jaxmoe.engine.tokenizer import Tokenizer
    from jaxmoe.evals.setup import make_windows, tokenize
    from jaxmoe.evals.windows import bundled_texts

    tokenizer = Tokenizer(files.folder, files.manifest.config.vocab)
    windows = make_windows(tokenize(bundled_texts(), tokenizer), shape)
    evaluator, result, eval_seconds = measure(progress, files, baseline, windows, shape, files.kv_cache, options)
    compilations = evaluator.compilations_after_warm_up
    with bar(progress, "warm up to chat"):
        llm = LLM(evaluator.runner, tokenizer)
    with bar(progress, "chat"):
        start = time.perf_counter()
        answers = llm.generate(_PROMPTS, SamplingParams(max_tokens=options.max_tokens), chat=True)
        chat_seconds = time.perf_counter() - start
    generated = sum(len(answer.completion.token_ids) for answer in answers)
    measured = _Measured(
        result=result,
        eval_tokens_per_s=2 * windows[:, 1:].size / eval_seconds,
        decode_tokens_per_s=generated / chat_seconds,
        compilations=compilations + llm.engine.compilations_after_warm_up,
        pages_in_use=llm.engine.pages_in_use,
    )
    return measured, answers


def _print_table(
    out: Console, files: "ModelFiles", baseline: "ModelFiles", ledger: "Ledger", measured: _Measured
) -> None:
    from jaxmoe.planner.ledger import gib

    result = measured.result
    before, after = baseline.tensor_bytes, files.tensor_bytes
    peak = peak_memory_bytes()
    table = Table("quickstart", title_justify="left")
    table.add_column("value", justify="right")
    table.add_row("checkpoint before", gib(before))
    table.add_row("checkpoint after", f"{gib(after)} ({after / before:.0%})")
    for part in result.ranges:
        label = f"perplexity, positions {part.start}-{part.stop or result.window_tokens}"
        table.add_row(label, f"{part.baseline_perplexity:.3f} -> {part.perplexity:.3f} ({part.increase:+.2%})")
    table.add_row("router agreement", f"{result.router_agreement:.2%}")
    table.add_row("prefill, both models", f"{measured.eval_tokens_per_s:.0f} tokens/s")
    table.add_row("decode, 8 chats at once", f"{measured.decode_tokens_per_s:.1f} tokens/s")
    table.add_row("compilations after warm-up", str(measured.compilations))
    table.add_row("pages in use at the end", str(measured.pages_in_use))
    table.add_row("memory: ledger, peak", f"{gib(ledger.host_bytes)}, {gib(peak)} ({peak / ledger.host_bytes:.0%})")
    out.print(table)
