# SPDX-License-Identifier: Apache-2.0
"""The engine's arguments: which there are, which of upstream's there are not, and the configuration they make."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, get_args, get_type_hints

import torch

from vllm import envs, launchers
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    CUDAGraphMode,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.kernels.ops import preferred_block_size
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization import declared_quantization, resolve_quantization
from vllm.model_executor.model_loader import check_load_format
from vllm.model_executor.model_loader.weight_utils import resolve_model_path
from vllm.platforms import current_platform
from vllm.transformers_utils import config as hf
from vllm.utils.suggestions import nearest

logger = init_logger(__name__)


@functools.cache
def warn_of_unread() -> None:
    """Log, once in a process, the ``VLLM_*`` variables that nothing reads; under torchrun the first rank does."""
    unread = envs.unread()
    if unread and launchers.rank_label() in (None, "0"):
        logger.warning("no part of this engine reads %s", ", ".join(unread))


# Upstream's arguments (release 0.33, and two older ones that scripts still pass) that this engine does not have, each
# with the values that ask for nothing it lacks.
_OFF = (False, None)
_NOTHING: tuple[Any, ...] = (None, "", 0, {}, [], set())
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "swap_space": (0, 4, None),
    "device": ("auto", None),
    "disable_custom_all_reduce": (False, True),
    "disable_cascade_attn": (None, False, True),
    "use_tqdm_on_load": (True, False),
    "language_model_only": (False, True),
    "config_format": ("auto", "hf"),
    "model_impl": ("auto", "vllm"),
    "moe_backend": ("auto",),
    "linear_backend": ("auto",),
    "sparse_indexer_topk_backend": ("auto",),
    "attention_backend": (None, "auto"),
    "all2all_backend": ("allgather_reducescatter", None),
    "data_parallel_backend": ("mp",),
    "expert_placement_strategy": ("linear",),
    "offload_backend": ("auto",),
    "scheduling_policy": ("fcfs",),
    "prefix_caching_hash_algo": ("sha256", "builtin"),
    "worker_cls": ("auto",),
    "mamba_cache_dtype": ("auto",),
    "mamba_ssm_cache_dtype": ("auto",),
    "mamba_cache_mode": ("none",),
    "jit_monitor_mode": ("warn",),
    "sleep_mode_backend": ("cumem", None),
    "per_request_spec_decode_metrics": ("none",),
    "performance_mode": ("balanced",),
    "optimization_level": (None, 2),
    "kv_offloading_backend": ("native",),
    "lora_dtype": ("auto",),
    "mm_processor_device": ("auto",),
    "mm_processor_cache_gb": (4, 0),
    "mm_processor_cache_type": ("lru", None),
    "mm_hasher_algorithm": ("blake3",),
    "mm_shm_cache_max_object_size_mb": (128,),
    "mm_encoder_tp_mode": ("weights",),
    "mm_encoder_fp8_scale_save_margin": (1.5,),
    "mm_tensor_ipc": ("direct_rpc",),
    "mm_device_do_normalize": (True, None),
    "video_pruning_method": ("evs",),
    "renderer_num_workers": (1,),
    "pipeline_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "dcp_kv_cache_interleave_size": (1,),
    "nnodes": (1,),
    "node_rank": (0,),
    "master_addr": ("127.0.0.1",),
    "master_port": (29501,),
    "dbo_decode_token_threshold": (32,),
    "dbo_prefill_token_threshold": (512,),
    "dp_sync_interval": (16,),
    "_api_process_count": (1,),
    "_api_process_rank": (0,),
    "safetensors_prefetch_num_threads": (8,),
    "safetensors_prefetch_block_size": (16777216,),
    "offload_num_in_group": (1,),
    "offload_prefetch_step": (1,),
    "max_loras": (1,),
    "max_lora_rank": (16,),
    "ignore_patterns": (["original/**/*"], None),
    "scheduler_reserve_full_isl": (True,),
    "prefill_schedule_interval": (1,),
    "kv_cache_metrics_sample": (0.01,),
    "replayssm_buffer_len": (16,),
    "mamba_cache_philox_rounds": (0,),
    "pt_load_map_location": ("cpu",),
    "stream_interval": (1,),
    "watermark": (0.0, 0, None),
    "swa_bounded_replay": (True,),
    "mamba_backend": ("triton", None),
    # Nothing has to be prepared for LLM.sleep.
    "enable_sleep_mode": (False, None, True),
    # Of older releases.
    "task": ("auto", "generate", None),
    "max_seq_len_to_capture": (8192, None),
    "num_scheduler_steps": (1, None),
    "use_v2_block_manager": (True, False, None),
    "disable_async_output_proc": (False, True, None),
    "guided_decoding_backend": ("auto", "xgrammar", "outlines", None),
    "worker_use_ray": (False, None),
    "calculate_kv_scales": (False, None),
    "preemption_mode": ("recompute", None),
    "tokenizer_pool_size": (0, None),
    **dict.fromkeys(
        """enable_return_routed_experts return_sampling_mask enable_prompt_embeds numa_bind data_parallel_hybrid_lb
        data_parallel_external_lb data_parallel_multi_port_external_lb enable_hc_sp enable_batch_sharded_sampling
        enable_ep_weight_filter enable_elastic_ep enable_dbo disable_sliding_window
        long_prefill_token_threshold_adaptive use_fp64_gumbel enable_trace_replay aggregate_engine_logging
        allow_deprecated_quantization enable_shm_tensor_arena enable_mm_embeds interleave_mm_strings mm_encoder_only
        skip_mm_profiling enable_lora fully_sharded_loras enable_tower_connector_lora specialize_active_lora
        enable_mixed_moe_lora_format enable_moe_shared_loras ray_workers_use_nsight disable_chunked_mm_input
        disable_hybrid_kv_cache_manager kv_cache_metrics cudagraph_metrics enable_layerwise_nvtx_tracing
        enable_mfu_metrics enable_logging_iteration_details jit_monitor_verbose enable_mm_processor_stats
        enable_flashinfer_autotune sleep_mode_offload_cudagraph enable_cumem_allocator
        enable_nccl_comm_suspend enable_mamba_shared_prefix_checkpoint use_replayssm
        enable_mamba_cache_stochastic_rounding kv_sharing_fast_prefill enable_fault_tolerance tokens_only
        fail_on_environ_validation monokernel""".split(),  # noqa: SIM905
        _OFF,
    ),
    **dict.fromkeys(
        """model_weights hf_config_path allowed_local_media_path allowed_media_domains download_dir
        safetensors_load_strategy max_cudagraph_capture_size ir_op_priority distributed_timeout_seconds
        cpu_distributed_timeout_seconds numa_bind_nodes numa_bind_cpus device_ids dcp_comm_backend dcp_q_replicate
        cp_kv_cache_interleave_size data_parallel_rank data_parallel_start_rank data_parallel_size_local
        data_parallel_address data_parallel_rpc_port elastic_ep_max_dp_size ubatch_size
        disable_nccl_for_dp_synchronization max_parallel_loading_workers prefix_cache_retention_interval
        cpu_offload_gb cpu_offload_params offload_group_size offload_params max_num_scheduled_tokens
        long_prefill_token_threshold max_num_active_seqs max_num_queued_reqs max_num_queued_tokens code_revision
        hf_token model_class_overrides quantization_config limit_mm_per_prompt media_io_kwargs mm_processor_kwargs
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
        io_processor_plugin video_pruning_rate mm_ipc_gpu_memory_gb default_mm_loras max_cpu_loras lora_target_modules
        max_lora_cls_labels model_loader_extra_config structured_outputs_config aux_output_config
        reasoning_parser reasoning_parser_plugin speculative_config spec_method spec_model spec_tokens watermark_config
        diffusion_config show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
        custom_histogram_buckets scheduler_cls pooler_config attention_config engram_config mamba_config kernel_config
        worker_extension_cls profiler_config logging_config log_level log_config_file kv_transfer_config
        kv_events_config ec_transfer_config ec_manager_config reasoning_config sleep_preserve_parameter_names
        kv_cache_dtype_skip_layers mamba_block_size prefix_match_unit mamba_ssu_algorithm additional_config
        logits_processors fault_tolerance_config kv_offloading_size shutdown_timeout weight_transfer_config
        gdn_prefill_backend kda_prefill_backend kda_decode_backend watchdog_config""".split(),  # noqa: SIM905
        _NOTHING,
    ),
}


def check_arguments(owner: str, known: list[str], given: Mapping[str, Any]) -> None:
    """Raise for each argument of ``given`` that is not ``known``, unless its value asks for nothing.

    ``NotImplementedError`` for upstream's, ``TypeError`` with the nearest known name for any other.
    """
    for name, value in given.items():
        if name in known:
            continue
        if name not in UNSUPPORTED:
            raise TypeError(f"{owner} has no argument {name!r}{nearest(name, known)}")
        if not any(type(value) is type(harmless) and value == harmless for harmless in UNSUPPORTED[name]) and not (
            UNSUPPORTED[name] is _NOTHING and _all_nothing(value)
        ):
            raise NotImplementedError(f"{owner}({name}={value!r}) is not supported by this engine; leave {name} out")


def _all_nothing(value: Any) -> bool:
    """A dict whose values all ask for nothing: ``{"image": 0}``."""
    return isinstance(value, Mapping) and all(v in _NOTHING or _all_nothing(v) for v in value.values())


@dataclass(init=False)
class EngineArgs:
    """The arguments of an engine, with upstream's names.

    - ``model``: a Hugging Face folder, a GGUF file or a hub id.
    - ``served_model_name``: what clients call it; by default what ``model`` says.
    - ``tokenizer``: folder or hub id of the tokenizer; by default the model's.
    - ``skip_tokenizer_init``: have no tokenizer: prompts and outputs are token ids.
    - ``tokenizer_mode``: ``auto``, or ``slow`` for transformers' own in Python.
    - ``trust_remote_code``: run code that the model's folder brings.
    - ``load_format``: ``auto``, or ``dummy`` for random weights.
    - ``dtype``: ``auto`` keeps fp16 and bf16 checkpoints and runs others in bf16; or float16, bfloat16, float32.
    - ``kv_cache_dtype``: ``auto``, the model's dtype, or ``fp8``, e4m3 with the checkpoint's scales, without such 1.0.
    - ``seed``: of the random draws of requests without a seed of their own.
    - ``max_model_len``: most tokens of one request, prompt and output; by default what the model's config allows, with
      ``auto`` or −1 as much of that as the KV cache holds. Counts may be text: ``32k`` is 32,000, ``32K`` 32,768; so
      with m, g, t and M, G, T.
    - ``cudagraph_capture_sizes``: numbers of rows that steps are padded to.
    - ``distributed_executor_backend``: ``external_launcher`` where several engines share a launcher; ``ray`` to serve
      with ranks that Ray places on its machines.
    - ``tensor_parallel_size``: ranks that share each layer.
    - ``data_parallel_size``: groups of such ranks, each with requests of its own.
    - ``enable_expert_parallel``: each rank holds whole experts, a share of them.
    - ``eplb_config``: ``step_interval`` is the number of steps between two balancings of experts.
    - ``enable_eplb``: move experts between ranks so that their loads are even.
    - ``block_size``: tokens of a KV cache block.
    - ``enable_prefix_caching``: reuse what was computed of prompts that begin alike; on where the model allows it.
    - ``gpu_memory_utilization``: share of the device's memory that may be used.
    - ``kv_cache_memory_bytes``: size of a rank's KV cache, in place of that share.
    - ``max_num_batched_tokens``: most tokens of one step.
    - ``max_num_seqs``: most requests of one step.
    - ``max_logprobs``: most log-probabilities that a request may ask for at a position; −1 is no limit.
    - ``logprobs_mode``: ``raw_logprobs``, of the model's own logits; ``processed_logprobs``, of those that the sampler
      draws from (after bias, penalties, temperature and filters); ``raw_logits``, ``processed_logits``: these logits
      themselves. Those of prompt tokens are ``raw_logprobs`` always.
    - ``disable_log_stats``: count and log nothing.
    - ``revision``: branch, tag or commit of the model on the hub.
    - ``hf_overrides``: values for the model's config, or a function from config to config; ``rope_scaling`` and
      ``rope_theta``, arguments of older releases, are such values.
    - ``tokenizer_revision``: branch, tag or commit of the tokenizer on the hub.
    - ``quantization``: how the weights are quantised; by default what the checkpoint says.
    - ``enforce_eager``: replay no captured steps.
    - ``num_gpu_blocks_override``: number of KV cache blocks, whatever the memory.
    - ``enable_chunked_prefill``: long prompts may take several steps; on by default.
    - ``compilation_config``: ``cudagraph_mode`` and ``cudagraph_capture_sizes``.
    - ``generation_config``: ``auto`` (the model's sampling defaults), ``vllm`` (neutral ones) or a folder.
    - ``override_generation_config``: sampling defaults over those.
    - ``async_scheduling``: schedule and launch a step while the one before still runs; on on CUDA, and on XPU unless DP
      ranks exchange tokens.

    Raises ``TypeError`` for unknown arguments, naming the nearest, and ``NotImplementedError`` for those of upstream's
    that this engine does not have.
    """

    model: str
    served_model_name: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    tokenizer_mode: str = "auto"
    trust_remote_code: bool = False
    load_format: str = "auto"
    dtype: str | torch.dtype = "auto"
    kv_cache_dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    cudagraph_capture_sizes: list[int] | None = None
    distributed_executor_backend: str | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    eplb_config: dict[str, Any] | None = None
    enable_eplb: bool = False
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    gpu_memory_utilization: float = CacheConfig.gpu_memory_utilization
    kv_cache_memory_bytes: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_logprobs: int = ModelConfig.max_logprobs
    logprobs_mode: str = ModelConfig.logprobs_mode
    disable_log_stats: bool = False
    revision: str | None = None
    hf_overrides: dict[str, Any] | Any = None
    tokenizer_revision: str | None = None
    quantization: str | None = None
    enforce_eager: bool = False
    num_gpu_blocks_override: int | None = None
    enable_chunked_prefill: bool | None = None
    compilation_config: int | dict[str, Any] | CompilationConfig | None = None
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    async_scheduling: bool | None = None

    def __init__(self, model: str, **kwargs: Any) -> None:
        fields = dataclasses.fields(self)
        rope = {name: kwargs.pop(name, None) for name in ("rope_scaling", "rope_theta")}
        rope = {name: value for name, value in rope.items() if value is not None}
        if rope:
            overrides = kwargs.get("hf_overrides") or {}
            if not isinstance(overrides, Mapping):
                raise ValueError(f"{rope} beside hf_overrides={overrides!r}: let that set them on the config")
            kwargs["hf_overrides"] = {**overrides, **rope}
        check_arguments("EngineArgs", [f.name for f in fields], kwargs)
        self.model = os.fspath(model)
        for f in fields[1:]:
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            value = kwargs.get(f.name, default)
            setattr(self, f.name, _count(f.name, value) if f.name in _COUNTS else value)

    def create_model_config(self) -> ModelConfig:
        """The model, resolved: reads its config, not its weights."""
        load_format = check_load_format(self.load_format)
        hf.parse_dtype(self.dtype)
        path = resolve_model_path(self.model, self.revision)
        is_gguf = path.is_file()
        if is_gguf and self.quantization not in (None, "gguf"):
            raise ValueError(f"quantization={self.quantization!r}, but {path} is a GGUF file; leave quantization out")
        config = hf.get_config(path, self.trust_remote_code, self.hf_overrides)
        declared = None if is_gguf else declared_quantization(config, path)
        quant_config = None if is_gguf else resolve_quantization(self.quantization, declared)
        return ModelConfig(
            model=str(path),
            tokenizer=self.tokenizer or str(path),
            hf_config=hf.get_hf_text_config(config),
            architecture=hf.get_architecture(config),
            dtype=hf.resolve_dtype(self.dtype, config),
            max_model_len=hf.resolve_max_model_len(self.max_model_len, config),
            fit_max_model_len=self.max_model_len == -1,
            quantization=None if quant_config is None else quant_config.method,
            quant_config=quant_config,
            seed=0 if self.seed is None else self.seed,
            trust_remote_code=self.trust_remote_code,
            skip_tokenizer_init=self.skip_tokenizer_init,
            tokenizer_mode=self.tokenizer_mode,
            revision=self.revision,
            tokenizer_revision=self.tokenizer_revision,
            load_format=load_format,
            max_logprobs=self.max_logprobs,
            logprobs_mode=self.logprobs_mode,
            served_model_name=self.served_model_name or self.model,
        )

    def _block_size(self, model_config: ModelConfig) -> int:
        if self.block_size is not None:
            return self.block_size
        return preferred_block_size(current_platform.device_type, model_config.head_dim, CacheConfig.block_size)

    def create_engine_config(self) -> VllmConfig:
        """Everything resolved and checked, nothing allocated. Raises ``ValueError`` with the values and the remedy."""
        warn_of_unread()
        model_config = self.create_model_config()
        dp_size = launchers.data_parallel_size(self.data_parallel_size, self.tensor_parallel_size)
        return VllmConfig(
            model_config=model_config,
            cache_config=CacheConfig(
                block_size=self._block_size(model_config),
                gpu_memory_utilization=self.gpu_memory_utilization,
                kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                num_gpu_blocks_override=self.num_gpu_blocks_override,
                enable_prefix_caching=self._prefix_caching(model_config),
                cache_dtype=self.kv_cache_dtype,
            ),
            parallel_config=ParallelConfig(
                tensor_parallel_size=self.tensor_parallel_size,
                data_parallel_size=dp_size,
                enable_expert_parallel=self.enable_expert_parallel,
                distributed_executor_backend=self.distributed_executor_backend,
                eplb_step_interval=self._eplb_step_interval(),
            ),
            scheduler_config=self._scheduler_config(model_config.max_model_len, dp_size),
            compilation_config=self._compilation_config(),
            disable_log_stats=self.disable_log_stats,
        )

    def get_generation_config(self, model_config: ModelConfig) -> dict[str, Any]:
        """End tokens and sampling defaults; see ``vllm.transformers_utils.config.get_generation_config``."""
        path = resolve_model_path(model_config.model, self.revision)
        return hf.get_generation_config(
            path, self.generation_config, self.override_generation_config, model_config.hf_config
        )

    def _eplb_step_interval(self) -> int | None:
        """Loads count since the last balancing, whatever upstream's ``window_size`` says; no expert is held twice."""
        given = {"step_interval": 3000, **(self.eplb_config or {})}
        harmless: dict[str, tuple[Any, ...]] = {
            "num_redundant_experts": (0,),
            "window_size": (given.get("window_size"),),
            "log_balancedness": (True, False),
            "use_async": (False,),
        }
        for key, value in given.items():
            if key != "step_interval" and value not in harmless.get(key, ()):
                raise NotImplementedError(f"eplb_config has {key}={value!r}, which is not supported; leave it out")
        interval = given["step_interval"]
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f"eplb_config: step_interval={interval!r}: give a number of steps, 1 or more")
        return interval if self.enable_eplb else None

    def _prefix_caching(self, model_config: ModelConfig) -> bool:
        if model_config.is_hybrid and self.enable_prefix_caching is not False:
            level = logging.WARNING if self.enable_prefix_caching else logging.INFO
            logger.log(
                level, "prefix caching is off: cached blocks cannot bring back the recurrent state of this model"
            )
            return False
        return self.enable_prefix_caching is not False

    def _async_scheduling(self, dp_size: int) -> bool:
        policies, wanted = current_platform.policies, self.async_scheduling
        over_dp_ep = dp_size > 1 and self.enable_expert_parallel
        if wanted is None and policies.async_scheduling and over_dp_ep and not policies.async_over_dp_ep:
            logger.info("async scheduling is off where DP ranks exchange tokens; async_scheduling=True sets it on")
            wanted = False
        wanted = policies.async_scheduling if wanted is None else wanted
        if wanted and envs.VLLM_DEBUG_NAN.strip() not in ("", "0"):
            logger.info("async scheduling is off: VLLM_DEBUG_NAN=%s checks one step at a time", envs.VLLM_DEBUG_NAN)
            wanted = False
        return wanted

    def _scheduler_config(self, max_model_len: int, dp_size: int) -> SchedulerConfig:
        """A limit that was not given gives way to one that was."""
        chunked = self.enable_chunked_prefill is not False
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if tokens is None:
            tokens = max(SchedulerConfig.max_num_batched_tokens, seqs or 0, 0 if chunked else max_model_len)
        if seqs is None:
            seqs = min(SchedulerConfig.max_num_seqs, tokens)
        return SchedulerConfig(
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            enable_chunked_prefill=chunked,
            async_scheduling=self._async_scheduling(dp_size),
        )

    def _compilation_config(self) -> CompilationConfig:
        given = self.compilation_config
        if isinstance(given, CompilationConfig):
            config = given
        else:
            if given is None or (isinstance(given, int) and given == 0):
                given = {}
            if not isinstance(given, Mapping):
                raise NotImplementedError(f"compilation_config={given!r}: models are not compiled; leave it out")
            supported = [f.name for f in dataclasses.fields(CompilationConfig)]
            for key in given:
                if key in _COMPILED.split():
                    raise NotImplementedError(f"compilation_config has {key!r}: models are not compiled; leave it out")
                if key not in supported:
                    raise ValueError(
                        f"compilation_config has {key!r}, which is unknown{nearest(key, supported)}; known: "
                        f"{', '.join(supported)}"
                    )
            config = CompilationConfig(
                _graph_mode(given.get("cudagraph_mode")), _capture_sizes(given.get("cudagraph_capture_sizes"))
            )
        if sizes := _capture_sizes(self.cudagraph_capture_sizes):
            if config.cudagraph_capture_sizes not in ((), sizes):
                raise ValueError(
                    f"cudagraph_capture_sizes={list(sizes)}, but {list(config.cudagraph_capture_sizes)} in "
                    "compilation_config: give one of them"
                )
            config = dataclasses.replace(config, cudagraph_capture_sizes=sizes)
        if self.enforce_eager:
            config = dataclasses.replace(config, cudagraph_mode=CUDAGraphMode.NONE)
        return config

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """An option for each argument that a command line can carry; the model may also be a positional one."""
        group = parser.add_argument_group("engine")
        hints, texts = get_type_hints(cls), help_texts(cls)
        for f in dataclasses.fields(cls):
            option = "--" + f.name.replace("_", "-")
            kinds = [kind for kind in (get_args(hints[f.name]) or (hints[f.name],)) if kind is not type(None)]
            default = argparse.SUPPRESS
            names = [option, *_SHORT.get(f.name, ())]
            if f.name == "model":
                group.add_argument("model_tag", nargs="?", default=None, metavar="MODEL", help=texts[f.name])
                group.add_argument(option, default=None, help="the same")
                continue
            how: dict[str, Any] = {"type": json.loads, "metavar": "JSON"}
            if bool in kinds:
                how = {"action": argparse.BooleanOptionalAction}
            elif f.name in _COUNTS:
                how = {"metavar": "COUNT"}
            elif f.name == "cudagraph_capture_sizes":
                how = {"type": json.loads, "metavar": "ROWS", "nargs": "+"}
            elif (kinds[0] in (int, float, str) and len(kinds) == 1) or f.name == "dtype":
                how = {"type": kinds[0], "metavar": kinds[0].__name__}
            group.add_argument(*names, default=default, help=texts.get(f.name), **how)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        given = dict(vars(args))
        models = {name for name in (given.get("model_tag"), given.get("model")) if name is not None}
        if len(models) != 1:
            given_models = " and ".join(sorted(models)) or "none"
            raise ValueError(f"one model is required, {given_models} given: name it first, or with --model")
        given["model"] = models.pop()
        return cls(**{f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given})


AsyncEngineArgs = EngineArgs


def help_texts(cls: type) -> dict[str, str]:
    """What the docstring says of each argument."""
    found = re.findall(r"^ *- ``(\w+)``: (.*?)(?=^ *- |^ *$)", cls.__doc__ or "", re.DOTALL | re.MULTILINE)
    return {name: " ".join(text.split()).replace("``", "").replace("%", "%%") for name, text in found}


_COUNTS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_cache_memory_bytes")
_SUFFIXES = {
    suffix: base**power
    for base, letters in ((1000, "kmgt"), (1024, "KMGT"))
    for power, suffix in enumerate(letters, start=1)
}


def _count(name: str, value: Any) -> int | None:
    """The number that ``value`` says: an int, or text such as ``512``, ``32k`` (32,000), ``1.5k``, ``1K`` (1,024)."""
    if value is None:
        return None
    if name == "max_model_len" and isinstance(value, str) and value.strip().lower() == "auto":
        return -1
    if isinstance(value, str) and (found := re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", value.strip())):
        number = Fraction(found[1]) * _SUFFIXES.get(found[2], 1)
        if number.denominator == 1:
            return int(number)
    elif hasattr(value, "__index__") and not isinstance(value, bool):
        return operator.index(value)
    auto = ", or 'auto'" if name == "max_model_len" else ""
    raise ValueError(f"{name}={value!r} is no count: give a whole number, or text such as '32k' or '1K'{auto}")


_SHORT = {
    "tensor_parallel_size": ("-tp",),
    "data_parallel_size": ("-dp",),
    "enable_expert_parallel": ("-ep",),
    "quantization": ("-q",),
}


# Keys of upstream's compilation_config that have to do with its compiler and its passes.
_COMPILED = """mode level backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder cudagraph_mm_encoder
    compile_sizes compile_ranges_split_points compile_ranges_endpoints inductor_compile_config inductor_passes
    use_inductor use_inductor_graph_partition cudagraph_num_of_warmups cudagraph_copy_inputs use_cudagraph
    cudagraph_specialize_lora full_cuda_graph max_cudagraph_capture_size pass_config cache_dir debug_dump_path
    compile_cache_save_format dynamic_shapes_config fast_moe_cold_start"""


def _capture_sizes(given: Any) -> tuple[int, ...]:
    if given is None:
        return ()
    if isinstance(given, (list, tuple)) and len(given) == 1 and isinstance(given[0], list):
        given = given[0]  # one word of JSON on the command line
    is_list = isinstance(given, (list, tuple, range))
    if not is_list or any(isinstance(size, bool) or not hasattr(size, "__index__") for size in given):
        raise ValueError(f"cudagraph_capture_sizes={given!r}: give a list of whole numbers of rows, such as [1, 2, 4]")
    return tuple(operator.index(size) for size in given)


def _graph_mode(mode: Any) -> CUDAGraphMode | None:
    if mode is None:
        return None
    name = mode.upper() if isinstance(mode, str) else getattr(mode, "name", str(mode))
    if name not in CUDAGraphMode.__members__:
        known = ", ".join(CUDAGraphMode.__members__)
        raise ValueError(
            f"cudagraph_mode={mode!r} is unknown{nearest(name, CUDAGraphMode.__members__)}; known: {known}"
        )
    return CUDAGraphMode[name]
