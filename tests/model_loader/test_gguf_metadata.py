# SPDX-License-Identifier: Apache-2.0
"""What converters may write into a GGUF file: read like transformers' model of the same weights, or refused by name.

The files are exported here from transformers' tiny models, as llama.cpp's converter lays them out.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models as tiny
import torch
from test_gguf_loader import LAYER, interleave, write_gguf
from toy_checkpoint import toy_config

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.gguf_loader import gguf_config, gguf_tensors

PROMPT = tiny.prompt(150)  # past the original length of the scaled checkpoint, 128
EXPERT_PARTS = {"ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"}


def put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Metadata by its Python type; ``tensor:NAME`` is a tensor."""
    if key.startswith("tensor:"):
        writer.add_tensor(key.removeprefix("tensor:"), value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, value)


def export(path: Path, name: str, lone_experts: bool = False, drop: str = "$^", **extra: Any) -> Path:
    """The tiny Llama or Mixtral ``name`` as a GGUF file, without tensors that match ``drop``, with ``extra``."""
    model = tiny.reference_model(name)
    config, state = model.config, {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    writer = gguf.GGUFWriter(path, "llama")
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    for key, value in ({f"llama.{key}": value for key, value in metadata.items()} | extra).items():
        put(writer, key, value)
    if hasattr(config, "num_local_experts"):
        put(writer, "llama.expert_count", config.num_local_experts)
        put(writer, "llama.expert_used_count", config.num_experts_per_tok)
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        tensors["output.weight"] = state["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        for stem, hf in LAYER.items():
            for suffix in ("weight", "bias"):
                array = state.get(f"model.layers.{i}.{hf}.{suffix}")
                if array is not None:
                    array = (
                        interleave(array.reshape(len(array), -1), heads[stem]).reshape(array.shape)
                        if stem in heads
                        else array
                    )
                    tensors[f"blk.{i}.{stem}.{suffix}"] = array
        both = state.get(f"model.layers.{i}.mlp.experts.gate_up_proj")
        if both is not None:
            gate, up = np.split(both, 2, axis=1)
            parts = {"gate": gate, "up": up, "down": state[f"model.layers.{i}.mlp.experts.down_proj"]}
            tensors[f"blk.{i}.ffn_gate_inp.weight"] = state[f"model.layers.{i}.mlp.gate.weight"]
            for stem, part in EXPERT_PARTS.items():
                if lone_experts:
                    tensors |= {f"blk.{i}.{stem}.{e}.weight": one for e, one in enumerate(parts[part])}
                else:
                    tensors[f"blk.{i}.{stem}_exps.weight"] = parts[part]
    for tensor_name, array in tensors.items():
        if not re.search(drop, tensor_name):
            writer.add_tensor(tensor_name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def completion(path: Path, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Any:
    settings = {"max_model_len": 256, "num_gpu_blocks_override": 40, "dtype": "float32", "skip_tokenizer_init": True}
    llm = LLM(str(path), **settings)
    params = SamplingParams(temperature=0, detokenize=False, **{"max_tokens": 12, **sampling})
    (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
    llm.shutdown()
    return output.outputs[0]


def tokens(path: Path) -> tuple[int, ...]:
    return tuple(completion(path, ignore_eos=True).token_ids)


def logprob(path: Path, token_id: int) -> float:
    return completion(path, max_tokens=1, logprobs=20).logprobs[0][token_id].logprob


def rope_freqs(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """Divisors of Llama 3.1's frequencies (Grattafiori et al. 2024): 1 for short waves, ``factor`` for long ones."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    divisors = []
    for i in range(head_dim // 2):
        turns = original / (2 * math.pi * rope["rope_theta"] ** (2 * i / head_dim))
        smooth = min(max((turns - low) / (high - low), 0), 1)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_rope_freqs_are_llama_3_scaling(tmp_path: Path) -> None:
    config = tiny.reference_model("llama-rope").config
    divisors = rope_freqs(config.rope_parameters, config.head_dim)
    assert divisors.min() == 1
    assert divisors.max() == 4
    assert len(set(divisors.tolist())) > 2
    path = export(tmp_path / "m.gguf", "llama-rope", **{"tensor:rope_freqs.weight": divisors})
    ours, theirs = get_rope(gguf_config(path), 512).cos_sin_cache, get_rope(config, 512).cos_sin_cache
    assert torch.allclose(ours, theirs, atol=5e-5)
    expected = tiny.greedy("llama-rope", PROMPT, 12)
    assert tokens(path) == expected
    wanted = tiny.logprobs("llama-rope", PROMPT)[-1][expected[0]].item()
    assert logprob(path, expected[0]) == pytest.approx(wanted, abs=1e-4)
    assert tokens(export(tmp_path / "without.gguf", "llama-rope")) != expected


@pytest.mark.parametrize(
    "fault", [{"tensor:rope_freqs.weight": np.ones(7, np.float32)}, {"llama.rope.scaling.factor": 2.0}]
)
def test_rope_freqs_that_do_not_fit(tmp_path: Path, fault: dict[str, Any]) -> None:
    path = export(tmp_path / "m.gguf", "llama", **{"tensor:rope_freqs.weight": np.ones(8, np.float32), **fault})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight \([78],\) F32 with rotary scaling"):
        gguf_config(path)


def test_biases(tmp_path: Path) -> None:
    path = export(tmp_path / "m.gguf", "llama-bias")
    config = gguf_config(path)
    assert config.attention_bias
    assert config.mlp_bias
    assert tokens(path) == tiny.greedy("llama-bias", PROMPT, 12)


def test_biases_of_q_k_v_alone(tmp_path: Path) -> None:
    path = export(tmp_path / "m.gguf", "llama-bias", drop=r"attn_output\.bias")
    model = tiny.reference_model("llama-bias", 0)
    kept = [layer.self_attn.o_proj.bias.clone() for layer in model.model.layers]
    try:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.bias.zero_()
        assert tokens(path) == tiny.greedy.__wrapped__("llama-bias", PROMPT, 12)
    finally:
        with torch.no_grad():
            for layer, bias in zip(model.model.layers, kept, strict=True):
                layer.self_attn.o_proj.bias.copy_(bias)


def test_experts_one_by_one(tmp_path: Path) -> None:
    path = export(tmp_path / "m.gguf", "mixtral", lone_experts=True)
    assert tokens(path) == tokens(export(tmp_path / "n.gguf", "mixtral")) == tiny.greedy("mixtral", PROMPT, 12)


def test_tensors_that_are_not_read(tmp_path: Path) -> None:
    unread = {"tensor:blk.0.attn_rot_embd.weight": np.full(8, np.nan, np.float32)}
    assert tokens(export(tmp_path / "m.gguf", "llama", **unread)) == tiny.greedy("llama", PROMPT, 12)
    write_gguf(tmp_path / "n.gguf", "llama", extra={"tensor:blk.0.ffn_gate.scale": np.ones(1, np.float32)})
    scaled = r"mlp\.gate_proj\.scale"
    modules = {"all": {t.name: t.shape for t in gguf_tensors(tmp_path / "n.gguf") if not re.search(scaled, t.name)}}
    with pytest.raises(ValueError, match=f"1 extra: .*{scaled}"):
        get_model(toy_config(tmp_path / "n.gguf", modules))


VOCABULARY = [
    "<unk>",
    "<s>",
    "</s>",
    "a",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|fim_pad|>",
    "<｜end▁of▁sentence｜>",
]
CONTROL, NORMAL = 3, 1


def vocabulary(*control: int) -> dict[str, Any]:
    kinds = [CONTROL if i in control else NORMAL for i in range(len(VOCABULARY))]
    return {"tokenizer.ggml.tokens": VOCABULARY, "tokenizer.ggml.token_type": kinds}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, 2),
        ({"eos": 5}, 5),
        ({"eos": 2, "eot": 2}, 2),
        ({"eos": 2, "eot": 4}, [2, 4]),
        ({"eos": 2, "eot": 4, "eom": 5}, [2, 4, 5]),
        ({"eom": 5, "eot": 4}, [4, 5]),
        ({"eos": 2, "fim_pad": 7}, 2),
        (vocabulary(1, 2) | {"eos": 2}, 2),
        (vocabulary(1, 2, 4, 5, 6, 7, 8) | {"eos": 2}, [2, 4, 5, 6, 8]),
        (vocabulary(1, 2, 4) | {"eos": 2, "eot": 6}, [2, 6, 4]),
    ],
)
def test_end_tokens(tmp_path: Path, metadata: dict[str, Any], expected: int | list[int]) -> None:
    keys = {k if k.startswith("tok") else f"tokenizer.ggml.{k}_token_id": v for k, v in metadata.items()}
    path = export(tmp_path / "m.gguf", "llama", **keys)
    assert gguf_config(path).eos_token_id == expected
    args = EngineArgs(str(path))
    assert args.get_generation_config(args.create_model_config()) == {"eos_token_id": expected}


def test_an_end_of_turn_ends_the_output(tmp_path: Path) -> None:
    expected = tiny.greedy("mixtral", PROMPT, 12)
    stop = next(i for i, token in enumerate(expected) if i and token not in expected[:i])
    for key in ("eos", "eot", "eom"):
        path = export(tmp_path / f"{key}.gguf", "mixtral", **{f"tokenizer.ggml.{key}_token_id": expected[stop]})
        found = completion(path)
        assert tuple(found.token_ids) == expected[: stop + 1]
        assert found.finish_reason == "stop"
        assert tuple(completion(path, ignore_eos=True).token_ids) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.scale", 0.5),
        ("attention.clamp_kqv", 8.0),
        ("attention.causal", False),
        ("attention.value_length", 32),
        ("rope.dimension_count", 8),
        ("rope.scaling.attn_factor", 1.5),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.25),
        ("expert_weights_scale", 2.5),
        ("expert_gating_func", 2),
        ("expert_shared_count", 1),
        ("expert_weights_norm", False),
        ("expert_feed_forward_length", 7),
        ("leading_dense_block_count", 1),
        ("rope.dimension_sections", [4, 2, 2, 0]),
    ],
)
def test_metadata_that_changes_the_function_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = export(tmp_path / "m.gguf", "mixtral", **{f"other.{key}": value, f"llama.{key}": value})
    with pytest.raises(ValueError, match=rf"llama\.{re.escape(key)}="):
        gguf_config(path)


@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0])
def test_metadata_that_changes_nothing(tmp_path: Path, value: float) -> None:
    neutral = ("expert_weights_scale", "logit_scale", "rope.scaling.attn_factor", "expert_gating_func")
    path = export(
        tmp_path / "m.gguf", "mixtral", **{f"llama.{key}": value for key in neutral}, **{"llama.pooling_type": 3}
    )
    assert gguf_config(path).num_local_experts == 8


def test_unknown_metadata_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "vllm"):
        gguf_config(export(tmp_path / "m.gguf", "llama", **{"llama.brand_new": 3, "llama.unset": 0}))
    assert [r.getMessage().split(": ", 1)[1] for r in caplog.records] == [
        "unknown metadata, taken as without effect: brand_new"
    ]


def test_one_value_for_all_layers(tmp_path: Path) -> None:
    path = export(tmp_path / "m.gguf", "llama", **{"llama.attention.head_count_kv": [2, 2]})
    assert gguf_config(path).num_key_value_heads == 2


def test_rotary_scaling(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for extra, expected in (
        ({"rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear"}, {"rope_type": "default"}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
                "rope.scaling.yarn_ext_factor": 1.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0},
        ),
    ):
        write_gguf(path, "qwen3", extra=extra)
        found = gguf_config(path).rope_parameters
        assert {key: found.get(key) for key in expected} == expected
        assert ("factor" in found) == ("factor" in expected)


def test_routing_weights_that_are_not_renormalised(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3moe", extra={"expert_weights_norm": 0})
    assert gguf_config(tmp_path / "m.gguf").norm_topk_prob is False


def test_a_part_of_a_split_file_is_named(tmp_path: Path) -> None:
    path = export(tmp_path / "m-00001-of-00003.gguf", "llama", **{"split.no": 0, "split.count": 3})
    for read in (gguf_config, gguf_tensors):
        with pytest.raises(ValueError, match=r"is part 1 of 3; join them: llama-gguf-split --merge"):
            read(path)
