"""Tiny checkpoints with a tokenizer, and commands run in this process."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import tokenizers

from jaxmoe.cli import main
from jaxmoe.ptq.job import prepare
from jaxmoe.ptq.quantize import quantize
from jaxmoe.ptq.recipe import load_recipe
from tests import tiny
from tests.running import scratch

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PROFILE = """
page_size = 8
pages = 9
max_context_tokens = 64
decode_rows = [1]
prefill_tokens = [16]
kv_cache = "int8"
"""


def write_tokenizer(folder: Path) -> None:
    """One token a byte: 256 tokens, no special ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_model(folder: Path) -> Path:
    """A tiny checkpoint of several shards, with a tokenizer."""
    tiny.write_checkpoint(folder, tiny.CONFIGS["glm4_moe"], max_shard_bytes=200_000)
    write_tokenizer(folder)
    return folder


@cache
def model() -> Path:
    """A float checkpoint; not to be changed."""
    return write_model(scratch() / "commands")


@cache
def quantized() -> Path:
    """Its INT8 form."""
    folder = scratch() / "commands-w8a8"
    quantize(prepare(model(), load_recipe("w8a8-g128")), folder)
    return folder


@cache
def profile() -> Path:
    """Engine settings with two small programs."""
    path = scratch() / "profile.toml"
    path.write_text(PROFILE, encoding="utf-8")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


def jaxmoe(capsys: pytest.CaptureFixture[str], *arguments: object) -> Outcome:
    """Runs a command line in this process, whose JAX has started already."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return Outcome(code=code, out=captured.out, err=captured.err)
