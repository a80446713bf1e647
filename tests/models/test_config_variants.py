# SPDX-License-Identifier: Apache-2.0
"""Config files as people have them: keys that another model left, tied heads by halves, rotary overrides.

Right is what transformers computes from the same folder, fed with our tokens at once: its cache cuts keys off by a
leftover window that its attention does not have.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_hybrids
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.rotary_embedding import get_rope

PROMPT = list(tiny.prompt(60))


def edited(source: str | Path, target: Path, changes: dict[str, Any], weights: dict | None = None) -> Path:
    """A copy of ``source`` with ``changes`` in its config.json, and other ``weights``; ``...`` drops a key."""
    target.mkdir()
    config = {**json.loads((Path(source) / "config.json").read_text()), **changes}
    (target / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    if weights is None:
        shutil.copy(Path(source) / "model.safetensors", target)
    else:
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def assert_equals(reference: Any, folder: Path, **kwargs: Any) -> SimpleNamespace:
    """Our engine on ``folder`` gives the log-probabilities of the transformers model ``reference``, and its tokens."""
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 2}
    llm = LLM(str(folder), **{**settings, "num_gpu_blocks_override": 40, **kwargs})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    served = SimpleNamespace(model_config=llm.model_config, lm_head=llm.llm_engine.worker.runner.model.lm_head)
    llm.shutdown()
    token_ids = PROMPT + list(output.outputs[0].token_ids)
    with torch.inference_mode():
        logits = reference.eval()(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    expected = logits.log_softmax(-1)
    ours = torch.tensor(
        [given[token].logprob for token, given in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)]
    )
    theirs = expected[: len(PROMPT) - 1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert token_ids[len(PROMPT) :] == expected[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    return served


def reference_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


LEFTOVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "window in Llama": ("llama", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}),
    "window by layer in Llama": ("llama", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}),
    "partial rotation in Llama": ("llama", {"partial_rotary_factor": 0.5}),
    "experts in Llama": ("llama", {"num_experts": 8, "num_local_experts": 8, "mlp_only_layers": [0]}),
    "other lengths in Llama": ("llama", {"seq_length": 16, "n_positions": 16, "max_sequence_length": 16}),
    "window that is off in Qwen3": ("qwen3", {"sliding_window": 8, "max_window_layers": 0}),
    "feed-forward bias in Qwen3": ("qwen3", {"mlp_bias": True, "partial_rotary_factor": 0.5}),
    "window from a layer on in Qwen3": (
        "qwen3",
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "layer_types": ...},
    ),
    "attention bias in Mixtral": ("mixtral", {"attention_bias": True, "mlp_bias": True, "norm_topk_prob": False}),
    "window that another would switch off in Mixtral": ("mixtral-window", {"use_sliding_window": False}),
    "window of no layer in Mixtral": ("mixtral-window", {"layer_types": ["full_attention"] * 2}),
    "window in Qwen3-MoE": (
        "qwen3-moe",
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 5, "mlp_bias": True},
    ),
    "window that is off in Qwen3-MoE": ("qwen3-moe", {"sliding_window": 8, "use_sliding_window": False}),
    "window in Qwen3-Next": ("qwen3-next", {"sliding_window": 8, "use_sliding_window": True, "mlp_bias": True}),
    "experts in Qwen3.5": ("qwen3.5", {"num_experts": 8, "norm_topk_prob": False, "moe_intermediate_size": 32}),
    "routing of another in Qwen3.5-MoE": (
        "qwen3.5-moe",
        {"norm_topk_prob": False, "mlp_only_layers": [0], "decoder_sparse_step": 2},
    ),
}


@pytest.mark.parametrize("case", LEFTOVERS)
def test_keys_of_other_architectures_mean_nothing(case: str, tmp_path: Path) -> None:
    base, changes = LEFTOVERS[case]
    source = (tiny_hybrids if base in tiny_hybrids.CHECKPOINTS else tiny).checkpoint(base)
    folder = edited(source, tmp_path / "model", changes)
    assert_equals(reference_of(folder), folder)
    if case == "other lengths in Llama":
        assert EngineArgs(str(folder)).create_model_config().max_model_len == 512


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 with its vision part, as transformers saves it, not tied."""
    text = {**tiny_hybrids.COMMON, "num_hidden_layers": 4}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    tiny_hybrids.randomise(model, 0)
    folder = tmp_path_factory.mktemp("multimodal") / "model"
    model.save_pretrained(folder)
    return folder


def is_tied(served: SimpleNamespace) -> bool:
    return served.lm_head.weight is None and served.lm_head.packed is None


@pytest.mark.parametrize("stored", ["another head", "the same head", "head alone", "embedding alone"])
def test_tied_flag_and_what_is_stored(stored: str, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    source = tiny.checkpoint("llama")
    weights = load_file(f"{source}/model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    if stored == "head alone":
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    elif stored != "embedding alone":
        weights["lm_head.weight"] = embedding.flip(0).contiguous() if stored == "another head" else embedding.clone()
    folder = edited(source, tmp_path / "model", {}, weights)
    served = assert_equals(reference_of(folder), folder)
    assert is_tied(served) == (stored != "another head")
    told = [record for record in log.records if "lm_head differs" in record.getMessage()]
    assert len(told) == (stored == "another head")


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("where", ["outer", "inner", "both"])
def test_tied_flag_of_a_multimodal_checkpoint(where: str, has_head: bool, multimodal: Path, tmp_path: Path) -> None:
    """A stored head is used, wherever the flag is; without one, a flag anywhere ties, as both of transformers' do."""
    text = json.loads((multimodal / "config.json").read_text())["text_config"]
    weights = load_file(multimodal / "model.safetensors")
    if not has_head:
        del weights["lm_head.weight"]

    def folder(name: str, outer: bool, inner: bool) -> Path:
        changes = {"tie_word_embeddings": outer, "text_config": {**text, "tie_word_embeddings": inner}}
        return edited(multimodal, tmp_path / name, changes, weights)

    given = folder("given", where != "inner", where != "outer")
    # transformers ties this class by the outer flag; the inner one is for the text model alone.
    right = given if has_head else folder("right", True, True)
    reference = Qwen3_5ForConditionalGeneration.from_pretrained(right, dtype=torch.float32)
    assert is_tied(assert_equals(reference, given)) == (not has_head)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ROPE: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": YARN,
    "yarn tuned": {**YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False},
    "yarn of DeepSeek": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [2.0] * 8,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
THETA = 5000.0
# How a config.json has its theta, and an override its description.
STYLES = {"new": {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}, "old": {"rope_theta": THETA}}
WAYS: dict[str, Any] = {
    "rope_parameters": lambda rope: {"rope_parameters": {**rope, "rope_theta": THETA}},
    "without theta": lambda rope: {"rope_parameters": rope},
    "rope_scaling": lambda rope: {"rope_scaling": rope},
    "type": lambda rope: {
        "rope_scaling": {**{k: v for k, v in rope.items() if k != "rope_type"}, "type": rope["rope_type"]}
    },
    "function": lambda rope: lambda config: (setattr(config, "rope_parameters", dict(rope)), config)[1],
    "function that sets rope_scaling": lambda rope: (
        lambda config: (setattr(config, "rope_scaling", dict(rope)), config)[1]
    ),
}


def transformers_table(config: Any, length: int) -> torch.Tensor:
    """cos | sin [length, rotary dim] of transformers' own embedding."""
    module = __import__(type(config).__module__.replace("configuration_", "modeling_"), fromlist=["x"])
    name = type(config).__name__.removesuffix("Config").removesuffix("Text")
    cls = getattr(module, f"{name}TextRotaryEmbedding", None) or getattr(module, f"{name}RotaryEmbedding")
    cos, sin = cls(config)(torch.zeros(1), torch.arange(length)[None])
    return torch.cat([half[0, :, : half.shape[-1] // 2] for half in (cos, sin)], dim=-1)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", ROPE)
def test_rope_overrides_of_a_flat_config(kind: str, style: str, tmp_path: Path) -> None:
    source = tiny.checkpoint("llama")
    given = edited(source, tmp_path / "given", {"rope_parameters": ..., **STYLES[style]})
    right = edited(source, tmp_path / "right", {"rope_parameters": {**ROPE[kind], "rope_theta": THETA}})
    expected = transformers_table(AutoConfig.from_pretrained(right), 128)
    for way, make in WAYS.items():
        overrides = make(ROPE[kind])
        before = copy.deepcopy(overrides)
        model = EngineArgs(str(given), hf_overrides=overrides).create_model_config()
        table = get_rope(model.hf_config, min(model.max_model_len, 128)).cos_sin_cache
        torch.testing.assert_close(table, expected, atol=1e-6, rtol=1e-6, msg=lambda text, way=way: f"{way}: {text}")
        assert callable(overrides) or overrides == before, f"{way}: the caller's dict has changed"
        assert model.max_model_len == {"linear": 3 * 512, "longrope": 128}.get(kind, 512)


@pytest.mark.parametrize("where", ["flat", "nested", "both"])
@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
def test_rope_overrides_of_a_nested_config(kind: str, where: str, multimodal: Path, tmp_path: Path) -> None:
    """The model's own theta, rotated share and sections stay."""
    text = json.loads((multimodal / "config.json").read_text())["text_config"]
    own = {"rope_theta": THETA, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    given = edited(
        multimodal, tmp_path / "given", {"text_config": {**text, "rope_parameters": {**own, "rope_type": "default"}}}
    )
    right = edited(multimodal, tmp_path / "right", {"text_config": {**text, "rope_parameters": {**own, **ROPE[kind]}}})
    flat, nested = {"rope_scaling": ROPE[kind]}, {"text_config": {"rope_parameters": ROPE[kind]}}
    overrides = {
        "flat": flat,
        "nested": nested,
        "both": {"rope_theta": 9.0, "text_config": {"rope_theta": THETA, **flat}},
    }[where]
    model = EngineArgs(str(given), hf_overrides=overrides).create_model_config()
    table = get_rope(model.hf_config, 100, partial=True).cos_sin_cache
    expected = transformers_table(AutoConfig.from_pretrained(right).text_config, 100)
    torch.testing.assert_close(table, expected, atol=1e-6, rtol=1e-6)
    assert model.architecture == "Qwen3_5ForConditionalGeneration"
    if where == "flat":
        assert_equals(
            Qwen3_5ForConditionalGeneration.from_pretrained(right, dtype=torch.float32), given, hf_overrides=overrides
        )


@pytest.mark.parametrize("stored", [None, ROPE["llama3"], {**YARN, "beta_fast": 16}])
def test_rope_overrides_replace_a_scaling_and_change_a_part_of_it(stored: dict | None, tmp_path: Path) -> None:
    base = {"rope_type": "default", **(stored or {}), "rope_theta": THETA}
    given = edited(tiny.checkpoint("llama"), tmp_path / "given", {"rope_parameters": base})

    def rope(**overrides: Any) -> dict[str, Any]:
        return dict(EngineArgs(str(given), hf_overrides=overrides).create_model_config().hf_config.rope_parameters)

    assert rope(rope_scaling=ROPE["linear"]) == {**ROPE["linear"], "rope_theta": THETA}
    assert rope(rope_scaling=None) == rope(rope_parameters=None) == {"rope_type": "default", "rope_theta": THETA}
    assert rope(rope_theta=7.0) == rope(rope_parameters={"rope_theta": 7.0}) == {**base, "rope_theta": 7.0}
    function = EngineArgs(str(given), hf_overrides=lambda config: (setattr(config, "rope_theta", 7.0), config)[1])
    assert function.create_model_config().hf_config.rope_parameters == {**base, "rope_theta": 7.0}
    if stored:
        assert rope(rope_scaling={"factor": 2.0}) == {**base, "factor": 2.0}


def test_yarn_as_model_cards_tell(tmp_path: Path) -> None:
    """factor x original is the length, and a prompt beyond the config's own runs as in transformers."""
    given = edited(tiny.checkpoint("qwen3"), tmp_path / "given", {"max_position_embeddings": 40})
    card = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    rope = json.loads((given / "config.json").read_text())["rope_parameters"]
    right = edited(given, tmp_path / "right", {"rope_parameters": {**rope, **card}})
    served = assert_equals(reference_of(right), given, hf_overrides={"rope_scaling": card}, max_model_len=128)
    assert served.model_config.max_model_len == 128
    with pytest.raises(ValueError, match="max_model_len=129 exceeds the 128 positions"):
        EngineArgs(str(given), hf_overrides={"rope_scaling": card}, max_model_len=129).create_model_config()


def test_the_remedies_for_a_long_max_model_len_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(edited(tiny.checkpoint("llama"), tmp_path / "given", {}))
    with pytest.raises(ValueError, match="max_model_len=1200 exceeds the 512 positions") as raised:
        EngineArgs(folder, max_model_len=1200).create_model_config()
    recipe = eval(str(raised.value).partition("hf_overrides=")[2])
    model = EngineArgs(folder, max_model_len=1200, hf_overrides=recipe).create_model_config()
    assert (model.max_model_len, model.hf_config.rope_parameters["factor"]) == (1200, 3.0)
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1" in str(raised.value)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert EngineArgs(folder, max_model_len=1200).create_model_config().max_model_len == 1200
    assert_equals(reference_of(Path(folder)), Path(folder), max_model_len=1200, num_gpu_blocks_override=80)


def test_angles_that_depend_on_the_length_are_refused(monkeypatch) -> None:
    longest, args = 512, {"hf_overrides": {"rope_scaling": ROPE["dynamic"]}}
    folder = tiny.checkpoint("llama")
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    with pytest.raises(ValueError, match=f"max_model_len={longest + 1}.*give {longest} or less"):
        EngineArgs(folder, max_model_len=longest + 1, **args).create_model_config()
    model = EngineArgs(folder, max_model_len=longest, **args).create_model_config()
    with pytest.raises(ValueError, match=f"max_model_len={longest}"):
        get_rope(model.hf_config, longest + 1)


def test_overrides_of_other_keys(multimodal: Path, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """Flat keys reach the text model, the list of layers follows their number, a mistyped key is told."""

    def config(folder: Path | str, **overrides: Any) -> Any:
        given = copy.deepcopy(overrides)
        model = EngineArgs(str(folder), hf_overrides=overrides).create_model_config()
        assert overrides == given
        return model

    model = config(multimodal, num_hidden_layers=2, vocab_size=99, max_position_embeddings=77, dtype="float16")
    assert (model.num_hidden_layers, model.vocab_size, model.max_model_len) == (2, 99, 77)
    assert model.dtype == torch.float16
    assert config(multimodal, text_config={"vocab_size": 98}, vocab_size=99).vocab_size == 98
    assert config(multimodal, torch_dtype="bfloat16").dtype == torch.bfloat16
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "layer_types": None}
    model = config(tiny.checkpoint("qwen3"), **window)
    assert (model.hf_config.sliding_window, model.hf_config.layer_types[1]) == (9, "sliding_attention")
    assert not log.records
    config(multimodal, max_postion_embeddings=77)
    assert "did you mean 'max_position_embeddings'" in log.text
    with pytest.raises(ValueError, match=r"(?s)hf_overrides=.*does not fit.*layer_types"):
        config(multimodal, num_hidden_layers=9)
    with pytest.raises(ValueError, match="has to return the config"):
        EngineArgs(str(multimodal), hf_overrides=lambda config: None).create_model_config()
    with pytest.raises(ValueError, match="give a dict or a function"):
        EngineArgs(str(multimodal), hf_overrides='{"vocab_size": 3}').create_model_config()
    broken = edited(tiny.checkpoint("llama"), tmp_path / "broken", {"model_type": "llama-of-mine"})
    assert config(broken, model_type="llama").architecture == "LlamaForCausalLM"
