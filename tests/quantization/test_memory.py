# SPDX-License-Identifier: Apache-2.0
"""A quantised checkpoint is never held twice while it is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

K, INNER, LAYERS, GROUP = 2048, 2048, 24, 128

PEAK = """
import gc, json, sys
from pathlib import Path
import torch
from torch import nn
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization import resolve_quantization
from vllm.model_executor.model_loader.weight_utils import (
    freed_memory_goes_back, load_weights, match_specs, read_safetensors)
from vllm.model_executor.parameter import collect_weight_specs

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

linear.get_tensor_model_parallel_world_size = lambda: 1
linear.get_tensor_model_parallel_rank = lambda: 0
folder, K, INNER, LAYERS = Path(sys.argv[1]), *map(int, sys.argv[2:5])
model = nn.ModuleList(
    linear.MergedColumnParallelLinear(K, [INNER] * 2, False, torch.bfloat16, [f"{i}.gate", f"{i}.up"])
    for i in range(LAYERS))
specs = collect_weight_specs(model)
config = resolve_quantization(None, {"quant_method": "gptq", "bits": 4, "group_size": 128})
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
with freed_memory_goes_back():
    stored = config.adapt(read_safetensors(sorted(folder.glob("*.safetensors"))), specs)
    load_weights(model, match_specs(specs, stored, (), "test"), torch.bfloat16)
assert all(layer.packed.format == "int4" for layer in model)
print(json.dumps(memory("VmHWM") - before))
"""


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
    command = [sys.executable, "-c", PEAK, str(tmp_path), *map(str, (K, INNER, LAYERS))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    peak = json.loads(done.stdout)
    assert 0.9 * sum(sizes) < peak <= sum(sizes) + max(sizes) + (40 << 20), (peak, sizes)
