"""Our compressed-tensors folders through the `compressed-tensors` package: the same modules, the same floats."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmoe.ptq.export import FORMATS
from jaxmoe.weights.safetensors import open_checkpoint
from tests import tiny
from tests.ptq.export import folders
from tests.ptq.export.folders import EXPERTS

torch = pytest.importorskip("torch", reason="compressed-tensors needs torch")
pytest.importorskip("compressed_tensors", reason="reads what we write in its format")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config  # noqa: E402
from compressed_tensors.quantization.utils import is_module_quantized  # noqa: E402
from transformers.utils.quantization_config import CompressedTensorsConfig  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]

CASES: dict[str, tuple[str, dict[str, str]]] = {
    "int8 channel": ("glm4_moe", {"": "w8a8-channel"}),
    "int8 groups": ("glm4_moe", {"": "w8a8-g32"}),
    "int8 channel, fused source": ("gpt_oss", {"": "w8a8-channel"}),
    "int4 in bytes": ("qwen3_moe", dict.fromkeys(EXPERTS, "w4a8-g32")),
    "int4 in bytes, channel": ("glm4_moe", dict.fromkeys(EXPERTS, "w4a8-channel")),
    "int4 packed": ("olmoe", dict.fromkeys(EXPERTS, "w4a16-g32")),
    "int8 packed": ("qwen3_moe", {"": "w8a16-g32", "attention.o": "w8a16-channel"}),
    "mixed": (
        "glm4_moe",
        {**dict.fromkeys(EXPERTS, "w4a16-g32"), "attention.o": "w8a8-channel", "ffn.down": "w8a8-g32"},
    ),
}


def modules_of(folder: Path) -> Any:
    """A tree of linear modules, one for each float or quantised matrix, under the checkpoint's names."""
    checkpoint = open_checkpoint(folder)
    root = torch.nn.Module()
    for name, meta in checkpoint.tensors.items():
        packed = name.endswith(".weight_packed")
        if not packed and (not name.endswith(".weight") or len(meta.shape) != 2 or "embed" in name):
            continue
        stem = name.removesuffix("_packed")
        rows, columns = checkpoint.read(f"{stem}_shape").tolist() if packed else meta.shape
        *path, last = stem.removesuffix(".weight").split(".")
        node = root
        for part in path:
            if not hasattr(node, part):
                node.add_module(part, torch.nn.Module())
            node = getattr(node, part)
        node.add_module(last, torch.nn.Linear(columns, rows, bias=False, device="meta"))
    return root


@pytest.mark.parametrize("case", CASES)
def test_the_package_reads_the_same_floats(tmp_path: Path, case: str) -> None:
    family, schemes = CASES[case]
    source = tiny.write_checkpoint(tmp_path / "source", tiny.CONFIGS[family])
    rounded = folders.write(tmp_path / "out", source, FORMATS["compressed-tensors"], schemes)
    data = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    parsed = CompressedTensorsConfig(**{key: value for key, value in data.items() if key != "quant_method"})
    config = parsed.quantization_config
    assert isinstance(config, QuantizationConfig)
    model = modules_of(tmp_path / "out")
    apply_quantization_config(model, config)
    checkpoint = open_checkpoint(tmp_path / "out")
    found = {}
    for name, module in model.named_modules():
        if not is_module_quantized(module):
            continue
        parts = ("weight", "weight_packed", "weight_scale", "weight_shape")
        state = {part: f"{name}.{part}" for part in parts if f"{name}.{part}" in checkpoint.tensors}
        arrays = {part: torch.from_numpy(checkpoint.read(tensor)) for part, tensor in state.items()}
        scheme = module.quantization_scheme
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        assert set(arrays) == set(compressor.compression_param_names(scheme))
        found[f"{name}.weight"] = compressor.decompress(arrays, scheme)["weight"].numpy()
    assert set(found) == set(rounded), "exactly the modules that were rounded"
    for name, (values, scales) in rounded.items():
        group = values.shape[-1] // scales.shape[-1]
        expected = values.astype(np.float32) * np.repeat(scales, group, axis=-1)
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
