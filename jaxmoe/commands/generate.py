"""jaxmoe generate MODEL -p PROMPT ... [--chat]."""

import argparse
import time

from jaxmoe.commands.common import (
    add_engine_arguments,
    add_mesh_arguments,
    bar,
    checkpoint_folder,
    console,
    engine_config,
    progress_bars,
    start_jax,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("model", help="folder of the checkpoint, float or quantised")
    parser.add_argument("-p", "--prompt", action="append", required=True, help="may be given several times")
    parser.add_argument("--chat", action="store_true", help="wrap each prompt in the checkpoint's chat template")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0 keeps all tokens")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="prompt i draws with seed + i")
    parser.add_argument("--poison", action="store_true", help="debug: fill free pages with garbage; nothing may change")
    add_mesh_arguments(parser)
    add_engine_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Answers the prompts and prints speed, compilations and pages."""
    start_jax(options)
    from jaxmoe.engine.llm import LLM, choose_plan, encode_prompt, load_runner
    from jaxmoe.engine.request import SamplingParams, check_request
    from jaxmoe.engine.tokenizer import Tokenizer
    from jaxmoe.weights.load import open_model

    out = console()
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    files = open_model(checkpoint_folder(options.model))
    plan = choose_plan(files.manifest.config.family, options.devices, options.plan)
    config = engine_config(options)
    tokenizer = Tokenizer(files.folder, files.manifest.config.vocab)
    prompts = [encode_prompt(tokenizer, prompt, chat=options.chat) for prompt in options.prompt]
    for ids in prompts:
        check_request(ids, params, config=config, model=files.manifest.config)
    with progress_bars(out) as progress:
        with bar(progress, "load") as move:
            runner = load_runner(files, plan, config, move)
        with bar(progress, "compile and warm up"):
            llm = LLM(runner, tokenizer, poison=options.poison)
    start = time.perf_counter()
    answers = llm.generate_ids(prompts, params)
    seconds = time.perf_counter() - start
    for prompt, answer in zip(options.prompt, answers, strict=True):
        out.print(f"\n[bold]> {_escape(prompt)}[/bold]")
        out.print(_escape(answer.text))
    generated = sum(len(answer.completion.token_ids) for answer in answers)
    out.print(
        f"\n{generated} tokens in {seconds:.2f} s ({generated / seconds:.1f} tokens/s, {runner.shards} devices); "
        f"compilations after warm-up {llm.engine.compilations_after_warm_up}, pages in use {llm.engine.pages_in_use}"
    )
    return 0


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
