# SPDX-License-Identifier: Apache-2.0
"""A quantised checkpoint is never held twice while it is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

K, INNER, LAYERS, GROUP = 2048, 2048, 24, 128

PEAK = """
import gc, sys
from pathlib import Path
import torch
from torch import nn
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization import resolve_quantization
from vllm.model_executor.model_loader.gguf_loader import gguf_tensors, kept_quantised
from vllm.model_executor.model_loader.weight_utils import (
    freed_memory_goes_back, load_weights, match_specs, read_safetensors)
from vllm.model_executor.parameter import collect_weight_specs

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

linear.get_tensor_model_parallel_world_size = lambda: 1
linear.get_tensor_model_parallel_rank = lambda: 0
path, name, K, INNER, LAYERS = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
model = nn.ModuleList(
    linear.MergedColumnParallelLinear(
        K, [INNER] * 2, False, torch.bfloat16, [name.format(i, x) for x in ("gate", "up")])
    for i in range(LAYERS))
specs = collect_weight_specs(model)
if path.is_dir():
    config = resolve_quantization(None, {"quant_method": "gptq", "bits": 4, "group_size": 128})
    read = lambda: config.adapt(read_safetensors(sorted(path.glob("*.safetensors"))), specs)
else:
    gguf_tensors(path)  # loads half of transformers
    read = lambda: kept_quantised(gguf_tensors(path), specs, torch.bfloat16)
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
with freed_memory_goes_back():
    load_weights(model, match_specs(specs, read(), (r"embed",), "test"), torch.bfloat16)
assert all(layer.is_quantized for layer in model)
print(memory("VmHWM") - before)
"""


def peak(path: Path, name: str) -> int:
    """Bytes of memory that a process takes at most while it loads layers of ``name.format(layer, part)``."""
    command = [sys.executable, "-c", PEAK, str(path), name, *map(str, (K, INNER, LAYERS))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    return int(done.stdout.splitlines()[-1])


def test_peak_is_at_most_one_file_above_the_weights(tmp_path):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31 - 1, (K // 8, INNER), generator=generator, dtype=torch.int32)
    for shard in range(4):
        tensors = {}
        for layer in range(shard, LAYERS, 4):
            for name in (f"{layer}.gate", f"{layer}.up"):
                tensors[f"{name}.qweight"] = words.clone()
                tensors[f"{name}.qzeros"] = words[: K // GROUP, : INNER // 8].clone()
                tensors[f"{name}.scales"] = torch.rand(K // GROUP, INNER, generator=generator).add(0.1).half()
        save_file(tensors, tmp_path / f"model-{shard}.safetensors")
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    most = peak(tmp_path, "{}.{}")
    assert 0.9 * sum(sizes) < most <= sum(sizes) + max(sizes) + (40 << 20), (most, sizes)


def test_peak_of_a_gguf_file_is_its_size_and_one_layer(tmp_path):
    """It has one file, so what may come on top is far less: a layer's matrices as read, copied and packed."""
    for kind in ("Q4_0", "Q5_K"):
        writer, file = gguf.GGUFWriter(tmp_path / f"{kind}.gguf", "llama"), tmp_path / f"{kind}.gguf"
        for key in ("embedding_length", "feed_forward_length", "block_count", "context_length"):
            writer.add_uint32(f"llama.{key}", 64)
        writer.add_uint32("llama.attention.head_count", 1)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        raw = np.zeros((INNER, K // block * block_bytes), np.uint8)
        writer.add_tensor("token_embd.weight", raw[:1], raw_dtype=gguf.GGMLQuantizationType[kind])
        for layer in range(LAYERS):
            for name in ("gate", "up"):
                writer.add_tensor(f"blk.{layer}.ffn_{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        size, most = file.stat().st_size, peak(file, "model.layers.{}.mlp.{}_proj")
        assert 0.9 * size < most <= size + 6 * raw.nbytes + (40 << 20), (kind, most, size)
