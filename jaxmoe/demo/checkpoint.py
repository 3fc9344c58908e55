"""Writes the carved demo model as a `glm4_moe` checkpoint in the form of the Hugging Face hub."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer

from jaxmoe.assets import asset
from jaxmoe.demo.card import LICENSE_NOTE, model_card
from jaxmoe.demo.carve import NUM_EXPERTS, LayerCarve, carve_layer, dense_layers
from jaxmoe.demo.source import LlamaShape, Source, Vocabulary, build_tokenizer, find_gguf, read_source
from jaxmoe.errors import ConfigError
from jaxmoe.weights.writer import CheckpointWriter, TensorSpec, write_text_atomic

MAX_SHARD_BYTES = 128 * 2**20

_SHARED_UNITS = 4
_BF16 = np.dtype(ml_dtypes.bfloat16)
_F32 = np.dtype(np.float32)
_WINDOW_TOKENS = 256
_CALIBRATION_WINDOWS = {"austen": 3, "pydoc": 2, "humaneval": 3}
_TRANSFORMERS_VERSION = "5.24.0"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """What was made: one `LayerCarve` a layer, with the router's recall and load for `top_k` on the calibration text.

    Invariants: total_bytes is the sum of the tensors' sizes; len(layers) is the number of layers of the model.
    """

    folder: Path
    top_k: int
    total_bytes: int
    layers: tuple[LayerCarve, ...]


def make_demo_model(out: Path, *, top_k: int = 6, progress: Progress | None = None) -> DemoReport:
    """Carves SmolLM2-135M-Instruct and writes the checkpoint folder; on one machine always the same bytes.

    All is written into `<out>.partial`, which is renamed at the end: a run that is killed leaves nothing under `out`.

    Args:
        out: folder to make; it must be absent or empty.
        top_k: routed experts a token takes, 1 to 8; with 8 the model equals the dense one.
        progress: called with (stage, steps done, steps in all); the stages are "read" (tensors) and "carve" (layers).

    Raises:
        ConfigError: `top_k` is out of range, `out` is not empty, or the package with the weights is not installed.
        WeightsError: the package's file is damaged.
    """
    if not 1 <= top_k <= NUM_EXPERTS:
        raise ConfigError(
            f"top_k is {top_k}, but the demo model has {NUM_EXPERTS} routed experts: give 1 to {NUM_EXPERTS}"
        )
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder: give another path or remove it")
    notify = progress or (lambda stage, done, total: None)
    source = read_source(find_gguf(), progress=lambda done, total: notify("read", done, total))
    tokenizer = build_tokenizer(source.vocabulary)
    specs = tensor_specs(source.shape)
    out = out.absolute()
    partial = out.with_name(out.name + ".partial")
    if partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial)
    partial.unlink(missing_ok=True)
    partial.mkdir(parents=True)
    layers: list[LayerCarve] = []
    with CheckpointWriter(partial, specs, max_shard_bytes=MAX_SHARD_BYTES, metadata={"format": "pt"}) as writer:
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            writer.write(name, source.weights[name].astype(_BF16))
        for carved in _carve_layers(source, tokenizer, top_k):
            for name, array in layer_tensors(source.weights, len(layers), carved).items():
                writer.write(name, array)
            layers.append(carved)
            notify("carve", len(layers), source.shape.num_layers)
    report = DemoReport(
        folder=out,
        top_k=top_k,
        total_bytes=sum(spec.nbytes for spec in specs),
        layers=tuple(layers),
    )
    for name, text in _text_files(source, tokenizer, report).items():
        write_text_atomic(partial / name, text)
    partial.rename(out)
    return report


def dense_reference(source: Source | None = None) -> dict[str, np.ndarray]:
    """The dense weights as the checkpoint rounds them: bfloat16 by Hugging Face llama name, the output tied.

    Args:
        source: the model; read from the installed package where it is None.

    Raises:
        ConfigError: the package with the weights is not installed.
        WeightsError: the package's file is damaged.
    """
    source = source or read_source(find_gguf())
    return {name: array.astype(_BF16) for name, array in source.weights.items()}


def model_config(shape: LlamaShape, vocabulary: Vocabulary, top_k: int) -> dict[str, object]:
    """The `config.json` that transformers writes for this model as a `Glm4MoeConfig`."""
    expert_neurons = shape.intermediate_size // (_SHARED_UNITS + NUM_EXPERTS)
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": vocabulary.bos_id,
        "dtype": "bfloat16",
        "eos_token_id": vocabulary.eos_id,
        "first_k_dense_replace": 0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_tokens,
        "model_type": "glm4_moe",
        "moe_intermediate_size": expert_neurons,
        "n_group": 1,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": _SHARED_UNITS,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_heads,
        "num_experts_per_tok": top_k,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "num_nextn_predict_layers": 0,
        "output_router_logits": False,
        "pad_token_id": vocabulary.pad_id,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {
            "partial_rotary_factor": 1.0,
            "rope_theta": shape.rope_theta,
            "rope_type": "default",
        },
        # Chosen experts weigh 1 / top_k each after renormalisation; this makes it 1.
        "routed_scaling_factor": float(top_k),
        "tie_word_embeddings": True,
        "topk_group": 1,
        "transformers_version": _TRANSFORMERS_VERSION,
        "use_cache": True,
        "use_qk_norm": False,
        "vocab_size": shape.vocab_size,
    }


def tensor_specs(shape: LlamaShape) -> tuple[TensorSpec, ...]:
    """Name, dtype and shape of every tensor of the checkpoint, in the order of writing."""
    hidden, kv_rows = shape.hidden_size, shape.num_kv_heads * shape.head_dim
    q_rows = shape.num_heads * shape.head_dim
    expert = shape.intermediate_size // (_SHARED_UNITS + NUM_EXPERTS)
    specs = [
        TensorSpec(name="model.embed_tokens.weight", dtype=_BF16, shape=(shape.vocab_size, hidden)),
        TensorSpec(name="model.norm.weight", dtype=_BF16, shape=(hidden,)),
    ]
    experts = {f"experts.{index}": expert for index in range(NUM_EXPERTS)}
    for layer in range(shape.num_layers):
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_rows, hidden),
            "self_attn.k_proj.weight": (kv_rows, hidden),
            "self_attn.v_proj.weight": (kv_rows, hidden),
            "self_attn.o_proj.weight": (hidden, q_rows),
            "mlp.gate.weight": (NUM_EXPERTS, hidden),
            "mlp.gate.e_score_correction_bias": (NUM_EXPERTS,),
        }
        for unit, neurons in {"shared_experts": _SHARED_UNITS * expert, **experts}.items():
            shapes[f"mlp.{unit}.gate_proj.weight"] = (neurons, hidden)
            shapes[f"mlp.{unit}.up_proj.weight"] = (neurons, hidden)
            shapes[f"mlp.{unit}.down_proj.weight"] = (hidden, neurons)
        specs += [
            TensorSpec(name=f"model.layers.{layer}.{name}", dtype=_F32 if ".gate." in name else _BF16, shape=dims)
            for name, dims in shapes.items()
        ]
    return tuple(specs)


def layer_tensors(weights: Mapping[str, np.ndarray], layer: int, carved: LayerCarve) -> dict[str, np.ndarray]:
    """One layer's tensors by checkpoint name, in the order of `tensor_specs`."""
    prefix = f"model.layers.{layer}."
    kept = ["input_layernorm", "post_attention_layernorm", *(f"self_attn.{name}_proj" for name in "qkvo")]
    tensors = {f"{prefix}{name}.weight": weights[f"{prefix}{name}.weight"].astype(_BF16) for name in kept}
    tensors[f"{prefix}mlp.gate.weight"] = carved.router
    tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = carved.bias
    gate, up, down = (weights[f"{prefix}mlp.{name}_proj.weight"].astype(_BF16) for name in ("gate", "up", "down"))
    units = {"shared_experts": carved.shared, **{f"experts.{index}": ids for index, ids in enumerate(carved.experts)}}
    for unit, neurons in units.items():
        tensors[f"{prefix}mlp.{unit}.gate_proj.weight"] = gate[neurons]
        tensors[f"{prefix}mlp.{unit}.up_proj.weight"] = up[neurons]
        tensors[f"{prefix}mlp.{unit}.down_proj.weight"] = np.ascontiguousarray(down[:, neurons])
    return tensors


def _carve_layers(source: Source, tokenizer: Tokenizer, top_k: int) -> Iterator[LayerCarve]:
    token_ids = _calibration_windows(tokenizer)
    num_shared = source.shape.intermediate_size * _SHARED_UNITS // (_SHARED_UNITS + NUM_EXPERTS)
    for layer, (hidden, activations) in enumerate(dense_layers(source.weights, source.shape, token_ids)):
        yield carve_layer(
            hidden,
            activations,
            source.weights[f"model.layers.{layer}.mlp.down_proj.weight"],
            num_shared=num_shared,
            num_experts=NUM_EXPERTS,
            top_k=top_k,
            seed=layer,
        )


def _calibration_windows(tokenizer: Tokenizer) -> np.ndarray:
    """Token ids [windows, _WINDOW_TOKENS] from the start of each calibration text."""
    parts = []
    for name, windows in _CALIBRATION_WINDOWS.items():
        text = asset("configs", "text", "calib", f"{name}.txt").read_text(encoding="utf-8")
        ids = np.array(tokenizer.encode(text).ids[: windows * _WINDOW_TOKENS])
        parts.append(ids.reshape(windows, _WINDOW_TOKENS))
    return np.concatenate(parts)


def _text_files(source: Source, tokenizer: Tokenizer, report: DemoReport) -> dict[str, str]:
    """The checkpoint's files that are text, by name."""
    vocabulary = source.vocabulary
    ids = {"bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.eos_id, "pad_token_id": vocabulary.pad_id}
    tokenizer_config = {
        "bos_token": vocabulary.tokens[vocabulary.bos_id],
        "clean_up_tokenization_spaces": False,
        "eos_token": vocabulary.tokens[vocabulary.eos_id],
        "model_max_length": source.shape.max_position_tokens,
        "pad_token": vocabulary.tokens[vocabulary.pad_id],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": vocabulary.tokens[vocabulary.unk_id],
    }
    return {
        "config.json": _json(model_config(source.shape, vocabulary, report.top_k)),
        "generation_config.json": _json({**ids, "transformers_version": _TRANSFORMERS_VERSION}),
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": _json(tokenizer_config),
        "chat_template.jinja": vocabulary.chat_template,
        "README.md": model_card(report.top_k),
        "LICENSE": LICENSE_NOTE,
    }


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
