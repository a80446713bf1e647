# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3 compute what transformers computes, however a prompt comes to the cache; and published checkpoints
are named in full."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_deepseeks as deepseeks
import tiny_models as tiny
import tiny_quantised as quantised
import torch
from layout_checks import LOADS, check
from safetensors.torch import load_file, save_file

from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.mla import KVUpProjection, LatentAttention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.weight_utils import StoredTensor, match_specs, without_extra_layers
from vllm.model_executor.models.registry import ModelRegistry

LENGTHS = (1, 2, 15, 17, 64, 200)


@pytest.mark.parametrize("name", deepseeks.NAMES)
def test_greedy_tokens_and_logprobs(name: str, nan_poison: None) -> None:
    """Prompts of 33 tokens and more are expanded, shorter ones and decodes are absorbed."""
    prompts = [tiny.prompt(length) for length in LENGTHS]
    llm = tiny.make_llm(name)
    outputs = tiny.generate(llm, prompts, 32, logprobs=3)
    llm.shutdown()
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert tuple(completion.token_ids) == tiny.greedy(name, prompt, 32), f"{name}, prompt of {len(prompt)}"
        expected = tiny.logprobs(name, prompt + tuple(completion.token_ids))[len(prompt) - 1 : -1]
        for step, given in enumerate(completion.logprobs):
            for token_id, logprob in given.items():
                assert logprob.logprob == pytest.approx(float(expected[step, token_id]), abs=1e-4)


@pytest.mark.parametrize("name", deepseeks.NAMES)
def test_the_tiny_models_say_different_things(name: str) -> None:
    distinct = [len(set(tiny.greedy(name, tiny.prompt(length), 32))) for length in LENGTHS]
    assert min(distinct) >= 6, distinct


PROMPTS = [tiny.prompt(length, seed=1) for length in (1, 3, 16, 33, 40, 64, 90, 150, 20, 5)]


@pytest.mark.parametrize("name", ["v2-lite", "v3"])
def test_chunks_and_preemption(name: str, nan_poison: None) -> None:
    """Steps of decodes, whole prompts and chunks with a cached context, in both forms; too few blocks for all."""
    llm = tiny.make_llm(name, block_size=8, num_gpu_blocks_override=31, max_model_len=200, max_num_batched_tokens=70)
    scheduler, preempted, original = llm.llm_engine.scheduler, [], llm.llm_engine.scheduler._preempt
    scheduler._preempt = lambda request: (preempted.append(request.request_id), original(request))
    try:
        assert tiny.tokens(tiny.generate(llm, PROMPTS, 24)) == [tiny.greedy(name, prompt, 24) for prompt in PROMPTS]
        scheduler.check_integrity()
    finally:
        llm.shutdown()
    assert preempted, "the cache was large enough: nothing was preempted"


def test_chunks_of_seven_and_padded_rows(nan_poison: None) -> None:
    """Old contexts read by absorbed chunks; rows of padding in every step."""
    sizes = {"cudagraph_capture_sizes": [8]}
    llm = tiny.make_llm("v3", max_num_batched_tokens=7, max_num_seqs=4, compilation_config=sizes)
    got = tiny.tokens(tiny.generate(llm, PROMPTS, 24))
    llm.shutdown()
    assert got == [tiny.greedy("v3", prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["v2-lite", "v3"])
def test_prefix_cache_hits(name: str, nan_poison: None) -> None:
    """What a hit brings back are latents, whole or with a tail of 9 tokens (absorbed) or of 45 (expanded)."""
    base = tiny.prompt(70, seed=2)
    llm = tiny.make_llm(name, block_size=8, enable_prefix_caching=True)
    try:
        tiny.generate(llm, [base], 1)
        for tail in (9, 45):
            prompt = base[: 60 + tail % 8] + tiny.prompt(tail, seed=3)
            outputs = tiny.generate(llm, [prompt], 24) + tiny.generate(llm, [prompt] * 2, 24)
            assert tiny.tokens(outputs) == [tiny.greedy(name, prompt, 24)] * 3
            assert outputs[0].num_cached_tokens >= 56
            assert outputs[1].num_cached_tokens >= (len(prompt) - 1) // 8 * 8
    finally:
        llm.shutdown()


def test_the_cache_is_one_vector_a_token() -> None:
    """Latent and rotated key in one tensor, the same number of bytes on every TP rank."""
    llm = tiny.make_llm("v3", num_gpu_blocks_override=40)
    layers = [m for m in llm.llm_engine.worker.runner.model.modules() if isinstance(m, LatentAttention)]
    for layer in layers:
        keys, values = layer.kv_cache
        assert keys.shape == (40, 1, 16, 32 + 8)
        assert values.data_ptr() == keys.data_ptr()
        assert values.shape == (40, 1, 16, 32)
        assert layer.get_kv_cache_spec().bytes_per_token == 4 * 40
    llm.shutdown()
    assert len(layers) == 3


def test_tokens_of_triton(monkeypatch: pytest.MonkeyPatch, nan_poison: None) -> None:
    """Both forms by the attention of devices, in Triton's interpreter, with rows of padding."""
    pytest.importorskip("triton")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON_ATTN")
    prompts = [tiny.prompt(length, seed=3) for length in (3, 35)]
    llm = tiny.make_llm("latent", max_num_batched_tokens=40, compilation_config={"cudagraph_capture_sizes": [4, 40]})
    outputs = tiny.generate(llm, prompts, 2)
    llm.shutdown()
    assert tiny.tokens(outputs) == [tiny.greedy("latent", prompt, 2) for prompt in prompts]


# ---------------------------------------------------------------------------------------------------------------------
# Published checkpoints: config.json, and the name and shape of every tensor


YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
        "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 8,
        "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "hidden_act": "silu", "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "DeepSeek-V2": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400,
        "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 2, "n_routed_experts": 160,
        "routed_scaling_factor": 16.0, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "group_limited_greedy", "n_group": 8,
        "topk_group": 3, "num_experts_per_tok": 6, "moe_layer_freq": 1, "first_k_dense_replace": 1,
        "norm_topk_prob": False, "scoring_func": "softmax", "hidden_act": "silu", "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400,
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
        "routed_scaling_factor": 1.0, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 6, "moe_layer_freq": 1, "first_k_dense_replace": 1, "norm_topk_prob": False,
        "scoring_func": "softmax", "hidden_act": "silu", "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
}  # fmt: skip


def layer_tensors(c: dict[str, Any], i: int) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank, q_rank = (c[k] for k in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank"))
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    of = {
        "self_attn.kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + v), rank),
        "self_attn.o_proj.weight": (hidden, heads * v),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if q_rank is None:
        of["self_attn.q_proj.weight"] = (heads * (nope + rope), hidden)
    else:
        of |= {
            "self_attn.q_a_proj.weight": (q_rank, hidden),
            "self_attn.q_a_layernorm.weight": (q_rank,),
            "self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
        }
    inner = {"mlp": c["intermediate_size"]}
    if i >= c["first_k_dense_replace"]:
        inner = {f"mlp.experts.{e}": c["moe_intermediate_size"] for e in range(c["n_routed_experts"])}
        inner["mlp.shared_experts"] = c["moe_intermediate_size"] * c["n_shared_experts"]
        of["mlp.gate.weight"] = (c["n_routed_experts"], hidden)
        if c["model_type"] == "deepseek_v3":
            of["mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
    for name, size in inner.items():
        of |= {f"{name}.{part}_proj.weight": (size, hidden) for part in ("gate", "up")}
        of[f"{name}.down_proj.weight"] = (hidden, size)
    return {f"model.layers.{i}.{name}": shape for name, shape in of.items()}


def tensors_of(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    vocab, hidden, last = c["vocab_size"], c["hidden_size"], c["num_hidden_layers"]
    found = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    found["model.norm.weight"] = (hidden,)
    for i in range(last):
        found |= layer_tensors(c, i)
    for i in range(last, last + c.get("num_nextn_predict_layers", 0)):
        found |= layer_tensors(c, i)
        found |= {f"model.layers.{i}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
        found |= {f"model.layers.{i}.{name}.weight": (vocab, hidden) for name in ("embed_tokens", "shared_head.head")}
        found[f"model.layers.{i}.eh_proj.weight"] = (hidden, 2 * hidden)
    return found


UNQUANTISED = re.compile(r"embed_tokens|norm|mlp\.gate\.|lm_head|head\.weight|eh_proj")


def stored_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
    return StoredTensor(name, shape, lambda dtype: torch.empty(shape, dtype=dtype), dtype=dtype)


def in_fp8_blocks(tensors: list[StoredTensor]) -> list[StoredTensor]:
    """As DeepSeek publishes V3: a scale for 128 x 128, ragged at the edges, in the places that are quantised."""
    found = []
    for tensor in tensors:
        if len(tensor.shape) < 2 or UNQUANTISED.search(tensor.name):
            found.append(tensor)
            continue
        blocks = tuple(-(-n // 128) for n in tensor.shape)
        found += [
            stored_tensor(tensor.name, tensor.shape, torch.float8_e4m3fn),
            stored_tensor(f"{tensor.name}_scale_inv", blocks, torch.float32),
        ]
    return found


@pytest.mark.parametrize(
    ("name", "fp8", "count", "read"),
    [
        ("DeepSeek-V3", True, 91991, 45395),  # 61 layers, and one that predicts further tokens
        pytest.param("DeepSeek-V2", False, 29102, 29102, marks=pytest.mark.slow),
        ("DeepSeek-V2-Lite", False, 5291, 5291),
    ],
)
def test_published_checkpoints_by_name_and_shape(name, fp8, count, read, tmp_path, log) -> None:
    """Every tensor is wanted as it is, but those of the extra layer, which are left unread without a warning."""
    published = dict(PUBLISHED[name])
    stored = [stored_tensor(tensor, shape, torch.bfloat16) for tensor, shape in tensors_of(published).items()]
    if fp8:
        stored = in_fp8_blocks(stored)
        of_blocks = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
        published["quantization_config"] = {"quant_method": "fp8", **of_blocks}
    assert len(stored) == count
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = EngineArgs(str(tmp_path), skip_tokenizer_init=True, load_format="dummy").create_engine_config()
    llm = tiny.make_llm("latent", num_gpu_blocks_override=40)
    try:
        with torch.device("meta"):
            model_cls, _ = ModelRegistry.resolve_model_cls(config.model_config.architecture)
            model = model_cls(vllm_config=config)
            specs = model.weight_specs()
            log.clear()
            if fp8:
                stored = config.model_config.quant_config.adapt(stored, specs)
            kept = without_extra_layers(stored, specs, model.ignored_weights, "the checkpoint")
            pairs = match_specs(specs, kept, model.ignored_weights, "the checkpoint")
    finally:
        llm.shutdown()
    assert len(pairs) == len(specs) == read
    assert not log.records
    of_layer_5 = {spec.name.split(".", 3)[3] for spec, tensor in pairs if tensor.codes and ".layers.5." in spec.name}
    assert len(of_layer_5) == (5 + 3 * 257 if fp8 else 0)
    assert config.model_config.head_dim == 576
    assert config.model_config.max_model_len == 163840
    layers = [m for m in model.modules() if isinstance(m, LatentAttention)]
    m = {"DeepSeek-V3": 1.0, "DeepSeek-V2": 0.707, "DeepSeek-V2-Lite": 0.707}[name]
    assert layers[0].scale == pytest.approx(192**-0.5 * (0.1 * m * math.log(40) + 1) ** 2)
    bytes_per_token = sum(layer.get_kv_cache_spec().bytes_per_token for layer in layers)
    assert bytes_per_token == {"DeepSeek-V3": 70272, "DeepSeek-V2": 69120, "DeepSeek-V2-Lite": 31104}[name]


def test_fp8_blocks(nan_poison: None) -> None:
    """As transformers with the matrices dequantised; W_UK and W_UV are taken from the dequantised kv_b, and 40 rows of
    latents are no whole number of blocks."""
    llm = quantised.make_llm("fp8-block:v3")
    prompts = [tiny.prompt(n, seed=3) for n in (5, 40, 1)]
    got = tiny.tokens(tiny.generate(llm, prompts, 12))
    model = llm.llm_engine.worker.runner.model
    up = [m for m in model.modules() if isinstance(m, KVUpProjection)]
    linears = [m for m in model.modules() if isinstance(m, LinearBase) and m.is_quantized]
    llm.shutdown()
    assert got == [quantised.greedy("fp8-block:v3", prompt, 12) for prompt in prompts]
    assert all(m.weight.dtype is torch.float32 and not m.is_quantized for m in up)
    assert len(linears) == 3 * 3 + 2 + 2 * 2  # q_a with kv_a, q_b, o; the dense layer's two; two of each shared expert


def test_dummy_weights_load_and_the_extra_layer_is_skipped(tmp_path) -> None:
    """A checkpoint with the layer that predicts further tokens loads as one without, and dummies reach every tensor."""
    folder = Path(shutil.copytree(tiny.checkpoint("v3"), tmp_path / "v3"))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    extra = {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if "layers.2." in n}
    extra["model.layers.3.eh_proj.weight"] = torch.randn(64, 128)
    save_file(tensors | extra, file, metadata={"format": "pt"})
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 20}
    prompt = tiny.prompt(17)
    for load_format in ("auto", "dummy"):
        llm = LLM(str(folder), load_format=load_format, **settings)
        model, (output,) = llm.llm_engine.worker.runner.model, tiny.generate(llm, [prompt], 8)
        unloaded = [m for m in model.modules() if getattr(m, "weight_attributes", ()) and not _holds_weights(m)]
        llm.shutdown()
        assert not unloaded
        if load_format == "auto":
            assert tiny.tokens([output])[0] == tiny.greedy("v3", prompt, 8)


def _holds_weights(module: Any) -> bool:
    return any(getattr(module, name, None) is not None for name in module.weight_attributes)


# ---------------------------------------------------------------------------------------------------------------------
# Layouts


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "policies"), [("v3", "xpu"), ("v2-lite", "cpu")])
def test_layout(name: str, policies: str) -> None:
    """TP 2 x DP 2, experts over four: ragged, idle and far-apart ranks, poisoned. Heads are split, latents repeated,
    shared experts counted once."""
    check(deepseeks, name, 2, 2, True, policies, list(LOADS), 0.001)


@pytest.mark.multiprocess
def test_groups_of_experts_without_expert_parallelism() -> None:
    check(deepseeks, "v2-groups", 2, 1, False, "cpu", ["b60", "one-long"], 0.001)


@pytest.mark.multiprocess
def test_heads_of_quantised_weights() -> None:
    """TP cuts kv_b in the middle of a block's rows."""
    check(quantised, "fp8-block:v3", 2, 1, False, "cpu", ["b60", "one-long"], 0.001)
