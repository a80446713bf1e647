# SPDX-License-Identifier: Apache-2.0
"""``vllm doctor --fit``: what each rank of a layout would hold of a model, from its config alone or with its files."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.distributed.eplb import runs
from vllm.distributed.parallel_state import as_rank
from vllm.engine.arg_utils import EngineArgs
from vllm.kernels.quantized import FORMATS, QuantizedWeight
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.weight_update import held_tensors
from vllm.model_executor.model_loader.weight_utils import StoredTensor, load_weights, match_specs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.parameter import WeightSpec
from vllm.utils.argparse_utils import Parser
from vllm.v1.core.kv_cache_utils import cdiv, sizes
from vllm.v1.kv_cache_interface import KVCacheSpec

GiB = 2**30
INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
# Bytes of the sampler: logits, float32 copies and their order; counts and places of the tokens that a request has seen.
_PER_LOGIT, _PER_SEEN_TOKEN = 44, 36


@dataclass(frozen=True)
class Share:
    """What one rank holds, in bytes. ``experts``: those of a layer, None without a mixture; their weights are part of
    ``weights``. ``step``: what the largest step takes for a time, an estimate."""

    weights: int
    expert_weights: int
    experts: list[int] | None
    block: int
    state: int
    step: int
    block_size: int
    max_model_len: int

    def longest_context(self, memory: int) -> int:
        """Tokens of one request that ``memory`` leaves room for, at most ``max_model_len``; below 1 none."""
        left = memory - self.weights - self.step - self.state
        if left <= 0 or not self.block:
            return self.max_model_len if left > 0 else 0
        return min(max(left // self.block - 1, 0) * self.block_size, self.max_model_len)

    @property
    def least(self) -> int:
        """With the cache of one request of one block."""
        return self.weights + self.step + self.state + 2 * self.block


def share_of(vllm_config: VllmConfig, rank: int) -> Share:
    """What ``rank`` holds of the model, which is built without memory: its weights are shapes."""
    parallel, device = vllm_config.parallel_config, torch.device("meta")
    layout = parallel.tensor_parallel_size, parallel.data_parallel_size, parallel.enable_expert_parallel
    model_cls, _ = ModelRegistry.resolve_model_cls(vllm_config.model_config.architecture)
    with torch.no_grad(), device, as_rank(rank, *layout, device):
        model: Any = model_cls(vllm_config=vllm_config, prefix="")
        specs = model.weight_specs()
        stored = [_shape_only(spec.name, tuple(spec.shape)) for spec in specs if not spec.optional]
        if Path(vllm_config.model_config.model).is_file():
            stored = _of_gguf(Path(vllm_config.model_config.model), model, specs, vllm_config.model_config.dtype)
        if (quantization := vllm_config.model_config.quant_config) is not None:
            stored = [_codes_only(tensor) for tensor in quantization.quantised_in_place(stored, specs)]
        load_weights(model, match_specs(specs, stored, (), "the config"), vllm_config.model_config.dtype)
        mixtures = [module for module in model.modules() if isinstance(module, FusedMoE)]
        caches: dict[str, KVCacheSpec] = {
            module.layer_name: module.get_kv_cache_spec()
            for module in model.modules()
            if hasattr(module, "get_kv_cache_spec")
        }
    block, slot, num_slots, _ = sizes(caches, vllm_config)
    return Share(
        weights=sum(tensor.nbytes for tensor in held_tensors(model)),
        expert_weights=sum(tensor.nbytes for mixture in mixtures for tensor in held_tensors(mixture)),
        experts=mixtures[0].local_experts if mixtures else None,
        block=block,
        state=slot * num_slots,
        step=_step_bytes(model, mixtures, vllm_config),
        block_size=vllm_config.cache_config.block_size,
        max_model_len=vllm_config.model_config.max_model_len,
    )


def _shape_only(name: str, shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(name, shape, lambda dtype: torch.empty(shape, dtype=dtype, device="meta"))


def _of_gguf(path: Path, model: Any, specs: list[WeightSpec], dtype: torch.dtype) -> list[StoredTensor]:
    from vllm.model_executor.model_loader.gguf_loader import gguf_tensors, kept_quantised

    rename = getattr(model, "checkpoint_name", lambda name: name)
    found = [dataclasses.replace(tensor, name=rename(tensor.name)) for tensor in gguf_tensors(path)]
    wanted = {spec.name for spec in specs}
    shapes = [dataclasses.replace(t, read=_shape_only(t.name, t.shape).read) for t in found if t.name in wanted]
    return [_codes_only(tensor) for tensor in kept_quantised(shapes, specs, dtype)]


def _codes_only(tensor: StoredTensor) -> StoredTensor:
    """The same with a quantised matrix whose codes are shapes, and float32 scales, float16 ones of a GGUF file."""
    if tensor.codes is None:
        return tensor
    held, (N, K) = tensor.codes, tensor.shape
    unit, groups = FORMATS[held.format], cdiv(K, held.group_size)

    def read(dtype: torch.dtype, rows: slice | torch.Tensor | None) -> QuantizedWeight:
        n = N if rows is None else len(rows) if isinstance(rows, torch.Tensor) else len(range(*rows.indices(N)))
        codes = torch.empty(n, cdiv(K, unit.columns) * unit.bytes, dtype=torch.uint8, device="meta")
        kind = torch.float16 if tensor.stored_as else torch.float32
        scales = torch.empty(n, groups, dtype=kind, device="meta") if unit.scaled else None
        return QuantizedWeight(held.format, n, K, held.group_size, dtype, codes, scales)

    return dataclasses.replace(tensor, codes=dataclasses.replace(held, read=read))


def _step_bytes(model: nn.Module, mixtures: Sequence[FusedMoE], vllm_config: VllmConfig) -> int:
    """An estimate: layer outputs, which all layers share; the residual stream, its norm and the gathered rows; one
    layer's experts with all rows of all DP ranks; logits, and what the sampler makes of them where all its options are
    in use. An engine measures at its start."""
    scheduler, config = vllm_config.scheduler_config, vllm_config.model_config.hf_config
    rows, width = scheduler.max_num_batched_tokens, vllm_config.model_config.dtype.itemsize
    columns = {m.output_key: m.output_size_per_partition for m in model.modules() if isinstance(m, LinearBase)}
    columns |= {key: key[1] for m in model.modules() for key in getattr(m, "buffer_keys", ())}
    total = rows * width * (sum(columns.values()) + 6 * config.hidden_size)
    if mixtures:
        one, parallel = mixtures[0], vllm_config.parallel_config
        gathered = rows * (parallel.data_parallel_size if parallel.enable_expert_parallel else 1)
        slots = gathered * one.router.top_k
        total += gathered * one.hidden_size * 2 * width
        total += slots * (3 * one.local_intermediate * width + 4 * one.hidden_size)
    seen = min(vllm_config.model_config.max_model_len, config.vocab_size)
    return total + scheduler.max_num_seqs * (_PER_LOGIT * config.vocab_size + _PER_SEEN_TOKEN * seen)


def report(vllm_config: VllmConfig, memory: float, utilization: float) -> tuple[str, bool]:
    """The text, and whether the model fits every rank with a cache for at least one token."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tp, dp, ep = parallel.tensor_parallel_size, parallel.data_parallel_size, parallel.enable_expert_parallel
    usable = int(memory * utilization * GiB)
    layout = f"TP {tp} x DP {dp}{', expert parallel' if ep else ''}"
    scheduler = vllm_config.scheduler_config
    lines = [
        f"{model.architecture} as {str(model.dtype).removeprefix('torch.')} on {tp * dp} device(s), {layout}; of "
        f"{memory:g} GiB each {usable / GiB:.1f} are used (gpu_memory_utilization {utilization:g})",
        f"a step of {scheduler.max_num_batched_tokens} tokens and {scheduler.max_num_seqs} requests; GiB a rank:",
        f"{'rank':>4} {'experts':>10} {'weights':>8} {'a step':>7} {'states':>7} {'left':>7} {'bytes/token':>12} "
        f"{'longest context':>16}",
    ]
    shares = [share_of(vllm_config, rank) for rank in range(tp * dp)]
    for rank, share in enumerate(shares):
        held = "-" if share.experts is None else runs(share.experts)
        left = usable - share.weights - share.step - share.state
        lines.append(
            f"{rank:>4} {held:>10} {share.weights / GiB:>8.2f} {share.step / GiB:>7.2f} {share.state / GiB:>7.2f} "
            f"{left / GiB:>7.2f} {share.block // share.block_size:>12} {share.longest_context(usable):>16}"
        )
    longest = min(share.longest_context(usable) for share in shares)
    fullest = max(shares, key=lambda share: share.least)
    if longest >= model.max_model_len:
        lines.append(f"It fits, with a request of all {model.max_model_len} tokens that the model knows.")
    elif longest > 0:
        lines.append(f"It fits with --max-model-len {longest} or less (the model knows {model.max_model_len}).")
    else:
        lines.append(
            f"It does not fit: a rank needs {fullest.least / GiB:.2f} GiB at least, {usable / GiB:.2f} are there."
        )
    if longest < model.max_model_len:
        lines += [f"- {remedy}" for remedy in _remedies(vllm_config, fullest)]
    return "\n".join(lines), longest > 0


def _remedies(vllm_config: VllmConfig, fullest: Share) -> list[str]:
    """What would make room, the largest first."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    found: list[tuple[int, str]] = []
    if vllm_config.model_config.dtype.itemsize > 2:
        found.append((fullest.weights // 2, "--dtype bfloat16 halves weights and cache"))
    if vllm_config.model_config.quant_config is None and not Path(vllm_config.model_config.model).is_file():
        found.append(
            (fullest.weights // 2, "8-bit weights take half as much, 4-bit ones a quarter: --quantization fp8")
        )
    if not vllm_config.cache_config.is_fp8 and fullest.block:
        saved = fullest.block // 2 * cdiv(vllm_config.model_config.max_model_len, fullest.block_size)
        found.append((saved, "--kv-cache-dtype fp8: twice the context or more from the same memory"))
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if fullest.experts and not parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
        saved = fullest.expert_weights * (parallel.data_parallel_size - 1) // parallel.data_parallel_size
        found.append((saved, f"--ep spreads the experts over all {ranks} ranks: {saved / GiB:.2f} GiB less a rank"))
    lower = max(scheduler.max_num_batched_tokens // 4, 1)
    saved = fullest.step * 3 // 4
    found.append((saved, f"--max-num-batched-tokens {lower}: about {saved / GiB:.2f} GiB less a step"))
    if fullest.state:
        few = max(scheduler.max_num_seqs // 4, 1)
        saved = fullest.state * (scheduler.max_num_seqs - few) // (scheduler.max_num_seqs + 1)
        found.append((saved, f"--max-num-seqs {few}: {saved / GiB:.2f} GiB less of recurrent states"))
    if parallel.data_parallel_size > 1:
        shared = fullest.weights - (fullest.expert_weights if parallel.enable_expert_parallel else 0)
        wider = parallel.tensor_parallel_size * 2
        if parallel.data_parallel_size % 2 == 0:
            text = f"--tp {wider} --dp {parallel.data_parallel_size // 2}: up to {shared / 2 / GiB:.2f} GiB less a rank"
            found.append((shared // 2, text))
    return [text for _, text in sorted(found, reverse=True)]


def _arguments() -> argparse.ArgumentParser:
    parser = Parser("vllm doctor", "Say what each rank of a layout would hold of a model, and whether it fits.")
    parser.add_argument("--fit", required=True, metavar="MODEL", help="a folder, its config.json, or a GGUF file")
    parser.add_argument("--tp", "-tp", "--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--dp", "-dp", "--data-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--ep", "-ep", "--enable-expert-parallel", action="store_true")
    parser.add_argument("--device-memory", type=float, required=True, metavar="GIB", help="of one device")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE")
    parser.add_argument(
        "--quantization",
        default=argparse.SUPPRESS,
        help="as of LLM, or int4: as if 4-bit codes in groups of 128 were stored",
    )
    for name in ("dtype", "kv-cache-dtype", "max-model-len", "max-num-batched-tokens", "max-num-seqs", "block-size"):
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit code 0: the model fits; 1: it does not; 2: it cannot be said."""
    given = vars(_arguments().parse_args(list(argv)))
    path, memory = Path(given.pop("fit")).expanduser(), given.pop("device_memory")
    tp, dp, ep = given.pop("tp"), given.pop("dp"), given.pop("ep")
    utilization = given.pop("gpu_memory_utilization")
    try:
        if min(tp, dp) < 1 or memory <= 0 or not 0 < utilization <= 1:
            raise ValueError(
                f"tp={tp}, dp={dp}, device-memory={memory:g}, gpu-memory-utilization={utilization:g}: give sizes of 1 "
                "or more, memory above 0 and a share up to 1"
            )
        folder = path.parent if path.name == "config.json" else path
        if "block_size" in given:
            given["block_size"] = int(given["block_size"])
        if given.get("quantization") == "int4":
            given["hf_overrides"] = {"quantization_config": INT4}
            del given["quantization"]
        args = EngineArgs(model=str(folder), tensor_parallel_size=tp, enable_expert_parallel=ep, **given)
        config = args.create_engine_config()
        parallel = dataclasses.replace(config.parallel_config, data_parallel_size=dp)
        text, fits = report(dataclasses.replace(config, parallel_config=parallel), memory, utilization)
    except (ValueError, NotImplementedError, FileNotFoundError) as error:
        print(f"vllm doctor: {error}", file=sys.stderr)
        return 2
    print(text)
    return int(not fits)
