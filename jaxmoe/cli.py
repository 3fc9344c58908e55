"""The `jaxmoe` command: one subcommand a task, imported lazily so that help and errors are instant."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from jaxmoe import __version__
from jaxmoe.errors import JaxMoeError

COMMANDS: dict[str, str] = {
    "quickstart": "make the demo model, quantise it, measure it and chat with it on 8 emulated devices",
    "demo-model": "write the bundled demo checkpoint (a real MoE carved from SmolLM2-135M)",
    "plan": "print the memory ledger of a model on a mesh; reads config.json only",
    "analyze": "measure how hard each layer is to quantise, and suggest a recipe for a number of bytes",
    "quantize": "quantise a Hugging Face checkpoint, layer by layer",
    "tune": "quantise and evaluate recipes, the smallest first, until one holds a gate",
    "verify": "check a finished checkpoint: files, values, scales, rounding error, what is quantised",
    "report": "write the quality report of a quantised checkpoint as one HTML page",
    "generate": "answer prompts with a checkpoint on a mesh",
    "eval": "perplexity through the serving path, against a float baseline, with gates",
    "doctor": "report devices, versions and which implementation every operator uses, and prove INT8 is INT8",
}
"""Subcommand -> help; each is a module of jaxmoe.commands with `add_arguments` and `run`."""


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"jaxmoe.commands.{command.replace('-', '_')}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="jaxmoe", description="Plan, quantise and serve mixture-of-experts models in INT8 on JAX meshes."
    )
    parser.add_argument("--version", action="version", version=f"jaxmoe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        _module(name).add_arguments(commands.add_parser(name, help=text, description=text))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command: 0 done, 1 a gate failed, 2 bad input (one sentence on standard error)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = build_parser().parse_args(words)
    except JaxMoeError as error:
        # Of an option's value, so that the command is known.
        print(f"jaxmoe {words[0]}: {error}", file=sys.stderr)
        return 2
    try:
        return _module(options.command).run(options)
    except JaxMoeError as error:
        print(f"jaxmoe {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"jaxmoe {options.command}: interrupted", file=sys.stderr)
        return 130
