# SPDX-License-Identifier: Apache-2.0
"""The dense architectures beside Llama and Qwen3: transformers' tokens in fp32, in one process and over ranks, with
uninitialised memory NaN, and their own ways with weights and rotary embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import poison
import pytest
import tiny_dense as dense
import tiny_models as tiny
import torch
import transformers
from layout_checks import check
from safetensors.torch import load_file, save_file
from test_config_variants import assert_equals, edited, reference_of, transformers_table
from test_step import runner_of

from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.rotary_embedding import get_rope

SHORT = [name for name in dense.NAMES if name != "phi3-long"]  # whose angles are the same at every length
LENGTHS = (1, 17, 64, 30, 150, 25)
NUM_TOKENS = 24


@pytest.mark.parametrize("name", SHORT)
def test_greedy_tokens_and_logprobs(name: str, pattern: int) -> None:
    """Whole prompts under the one pattern of NaN; ragged chunks in padded steps under the other."""
    tiny.check_greedy(name, LENGTHS, NUM_TOKENS, pattern != poison.CANONICAL, 5e-5)


@pytest.mark.parametrize("name", SHORT)
def test_the_tiny_models_say_different_things(name: str) -> None:
    distinct = [len(set(tiny.greedy(name, tiny.prompt(length), NUM_TOKENS))) for length in LENGTHS]
    assert sum(distinct) / len(distinct) >= 9, distinct


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SHORT)
def test_tp_2_dp_2(name: str) -> None:
    """Expert parallelism has nothing to divide here and changes nothing."""
    check(tiny, name, 2, 2, True, "cpu", ["b60", "one-long", "idle-rank"], 0.001)


# --- rotary embeddings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_model_len", "lengths"), [(128, (5, 90)), (320, (129, 200))])
def test_longrope_by_max_model_len(
    max_model_len: int, lengths: tuple[int, ...], nan_poison: None, log: pytest.LogCaptureFixture
) -> None:
    """transformers takes the factors by a request's length: the short ones up to 128 tokens, here."""
    prompts = [tiny.prompt(length) for length in lengths]
    llm = tiny.make_llm("phi3-long", max_model_len=max_model_len)
    outputs = tiny.generate(llm, prompts, NUM_TOKENS)
    llm.shutdown()
    assert tiny.tokens(outputs) == [tiny.greedy("phi3-long", prompt, NUM_TOKENS) for prompt in prompts]
    assert ("longrope's long factors" in log.text) == (max_model_len > 128)


def test_the_length_that_longrope_gets_by_itself(log: pytest.LogCaptureFixture) -> None:
    folder = tiny.checkpoint("phi3-long")
    assert EngineArgs(folder).create_model_config().max_model_len == 128
    assert "max_model_len is 128, that of longrope's short factors; the model knows 512" in log.text
    assert EngineArgs(folder, max_model_len=512).create_model_config().max_model_len == 512
    with pytest.raises(ValueError, match="max_model_len=513 exceeds the 512 positions"):
        EngineArgs(folder, max_model_len=513).create_model_config()


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
OWN = dense.DENSE["gemma3"][1]["rope_parameters"]
OVERRIDES: dict[str, tuple[Any, dict[str, dict[str, Any]]]] = {
    "scaling": ({"rope_scaling": YARN}, {"full_attention": {**YARN, "rope_theta": 5000.0}}),
    "parameters": ({"rope_parameters": {**YARN, "rope_theta": 9.0}}, {"full_attention": {**YARN, "rope_theta": 9.0}}),
    "theta": ({"rope_theta": 9.0}, {"full_attention": {**OWN["full_attention"], "rope_theta": 9.0}}),
    "one kind": (
        {"rope_parameters": {"sliding_attention": {"rope_theta": 9.0}}},
        {"sliding_attention": {"rope_type": "default", "rope_theta": 9.0}},
    ),
    "function": (
        lambda config: (setattr(config, "rope_scaling", dict(YARN)), config)[1],
        {"full_attention": {**YARN, "rope_theta": 5000.0}},
    ),
    "function of theta": (
        lambda config: (setattr(config, "rope_theta", 9.0), config)[1],
        {"full_attention": {**OWN["full_attention"], "rope_theta": 9.0}},
    ),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_rope_overrides_where_layers_differ(case: str) -> None:
    """What names no kind of layer is of full attention; the other kind stays as it is."""
    overrides, changed = OVERRIDES[case]
    config = EngineArgs(tiny.checkpoint("gemma3"), hf_overrides=overrides).create_model_config().hf_config
    assert config.rope_parameters == {**OWN, **changed}


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_the_table_of_each_kind_of_layer(kind: str) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny.checkpoint("gemma3"))
    module = transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding(config)
    cos, sin = module(torch.zeros(1), torch.arange(100)[None], kind)
    expected = torch.cat([half[0, :, : half.shape[-1] // 2] for half in (cos, sin)], dim=-1)
    torch.testing.assert_close(get_rope(config, 100, layer_type=kind).cos_sin_cache, expected, atol=1e-6, rtol=1e-6)


def test_partial_rotation_of_phi() -> None:
    config = transformers.AutoConfig.from_pretrained(tiny.checkpoint("phi3"))
    table = get_rope(config, 100, partial=True).cos_sin_cache
    assert table.shape == (100, 12)
    torch.testing.assert_close(table, transformers_table(config, 100), atol=1e-6, rtol=1e-6)


# --- weights and configs ---------------------------------------------------------------------------------------------


def test_embeddings_are_scaled_as_transformers_rounds_it() -> None:
    """Bit for bit: the root of 48 is 6.9375 in bfloat16."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.checkpoint("gemma3"), dtype=torch.bfloat16)
    ids = torch.arange(tiny.VOCAB)
    llm = tiny.make_llm("gemma3", dtype="bfloat16")
    with torch.inference_mode():
        ours = runner_of(llm).model.model.embed(ids)
        assert torch.equal(ours, model.model.embed_tokens(ids))
    llm.shutdown()


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3"])
def test_bfloat16_is_no_worse_than_transformers(name: str) -> None:
    folder = tiny.checkpoint(name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().eval()
    prompts = [tiny.prompt(100, seed) for seed in range(4)]
    llm = tiny.make_llm(name, dtype="bfloat16")
    outputs = tiny.generate(llm, prompts, 1, prompt_logprobs=0)
    llm.shutdown()
    errors = []
    for prompt, output in zip(prompts, outputs, strict=True):
        target = torch.tensor(prompt[1:])[:, None]
        with torch.inference_mode():
            right, their = (
                model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)[:-1].gather(1, target)[:, 0]
                for model in (exact, theirs)
            )
        ours = torch.tensor([given[prompt[i]].logprob for i, given in enumerate(output.prompt_logprobs) if given])
        errors.append(((ours - right).abs().mean(), (their - right).abs().mean()))
    our_error, their_error = torch.tensor(errors).mean(0)
    assert our_error <= 1.1 * their_error


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral without a window": ("mistral", {"sliding_window": None}),
    "biases in Mistral": ("mistral", {"attention_bias": True, "mlp_bias": True}),
    "layer types in Mistral": ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}),
    "Ministral": (
        "mistral",
        {
            "architectures": ["MinistralForCausalLM"],
            "model_type": "ministral",
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "biases in Qwen2": ("qwen2", {"attention_bias": False, "mlp_bias": True}),
    "window that is off in Qwen2": ("qwen2", {"use_sliding_window": False, "layer_types": ...}),
    "window in Phi-3": ("phi3", {"sliding_window": 20, "attention_bias": True}),
    "window that is off in SmolLM3": ("smollm3", {"use_sliding_window": False, "layer_types": ...}),
    "rotation by number in SmolLM3": ("smollm3", {"no_rope_layers": [0, 1, 1]}),
    "caps in Gemma 3": ("gemma3", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": None}),
    "no caps in Gemma 2": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "old keys in Gemma 3": (
        "gemma3",
        {
            "rope_parameters": ...,
            "rope_theta": 700.0,
            "rope_local_base_freq": 50.0,
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
            "layer_types": ...,
            "sliding_window_pattern": 2,
        },
    ),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_configs_as_transformers_reads_them(case: str, tmp_path: Path) -> None:
    name, changes = VARIANTS[case]
    folder = edited(tiny.checkpoint(name), tmp_path / "model", changes)
    assert_equals(reference_of(folder), folder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_act='gelu' is not supported"),
        ("mistral", {"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = edited(tiny.checkpoint(name), tmp_path / "model", changes)
    with pytest.raises(ValueError, match=message):
        assert_equals(None, folder)


def test_llama_with_the_activation_of_gemma(tmp_path: Path) -> None:
    folder = edited(tiny.checkpoint("llama"), tmp_path / "model", {"hidden_act": "gelu_pytorch_tanh"})
    assert_equals(reference_of(folder), folder)


@pytest.mark.parametrize("name", ["phi3", "gemma3"])
def test_new_weights_in_the_place_of_the_old(name: str) -> None:
    """Fused and zero-centred ones as well; a trainer has them whole, under the checkpoint's names."""
    prompt = tiny.prompt(30)
    assert tiny.greedy(name, prompt, 8) != tiny.greedy(name, prompt, 8, seed=1)
    llm = tiny.make_llm(name)
    runner_of(llm).model.load_weights(load_file(f"{tiny.checkpoint(name, 1)}/model.safetensors").items())
    outputs = tiny.generate(llm, [prompt], 8)
    llm.shutdown()
    assert tiny.tokens(outputs) == [tiny.greedy(name, prompt, 8, seed=1)]


TEXT: dict[str, Any] = {**tiny.COMMON, "pad_token_id": 0}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "text_config": {**TEXT, **dense.DENSE["gemma3"][1], "final_logit_softcapping": None},
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "Mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**VISION, "model_type": "pixtral"},
        "tie_word_embeddings": False,
    },
}


@pytest.mark.parametrize("stem", MULTIMODAL)
def test_the_text_part_of_a_multimodal_checkpoint(stem: str, tmp_path: Path) -> None:
    """As releases name its weights, and as transformers' own modules do."""
    cls = getattr(transformers, f"{stem}ForConditionalGeneration")
    torch.manual_seed(0)
    model = cls(cls.config_class(**MULTIMODAL[stem]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "released")
    weights = load_file(tmp_path / "released/model.safetensors")
    assert "language_model.model.norm.weight" in weights
    other = {name.replace("language_model.model.", "model.language_model.", 1): t for name, t in weights.items()}
    other = {name.replace("language_model.lm_head.", "lm_head.", 1): t for name, t in other.items()}
    for form, stored in (("released", weights), ("modules", other)):
        folder = edited(tmp_path / "released", tmp_path / f"{form} again", {}, stored)
        assert_equals(model, folder)
    assert json.loads((tmp_path / "released/config.json").read_text())["architectures"] == [cls.__name__]
    save_file({**weights, "language_model.model.layers.0.extra": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 extra: model\.layers\.0\.extra"):
        assert_equals(model, folder)
