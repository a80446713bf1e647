# SPDX-License-Identifier: Apache-2.0
"""Small random checkpoints, and what transformers computes with them: the reference of the model tests."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

VOCAB = 160
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# name → (transformers' class stem, what differs from COMMON)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3-window": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**MOE, "norm_topk_prob": False, "num_hidden_layers": 3, "mlp_only_layers": [1], "num_key_value_heads": 1},
    ),
}
NAMES = tuple(CHECKPOINTS)  # without those that other files add

# A process that a test starts finds what the test has made: making it anew takes seconds of transformers' imports.
if "TINY_MODELS" not in os.environ:
    _folders = tempfile.TemporaryDirectory(prefix="vllm-tiny-")
    os.environ["TINY_MODELS"] = _folders.name


@functools.cache
def checkpoint(name: str, seed: int = 0) -> str:
    """The folder of checkpoint ``name``.

    Its layers outweigh the embedding in the residual stream: a model that mostly repeats its last token, as small
    random ones do, cannot tell a right decode step from a wrong one. Weights are wide enough that near-ties are rare.
    """
    folder = Path(os.environ["TINY_MODELS"], f"{name}-{seed}")
    if folder.exists():
        return str(folder)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    stem, changes = CHECKPOINTS[name]
    cls = getattr(transformers, f"{stem}ForCausalLM")
    config = cls.config_class(**{**COMMON, **changes})
    torch.manual_seed(seed)
    model = cls(config)
    with torch.no_grad():
        for name_of, parameter in model.named_parameters():
            if name_of.endswith(("sinks", "proj_bias")):
                parameter.normal_()
            elif parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(0.5 if "embed_tokens" in name_of else 8)
        for name_of, buffer in model.named_buffers():
            if name_of.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
        if stem.startswith("Gemma"):  # whose weights of norms are what is added to 1
            model.model.norm.weight.add_(15)
            for name_of, parameter in model.named_parameters():
                if name_of.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.add_(1.5)
        elif config.tie_word_embeddings:
            model.model.norm.weight.mul_(8)
    model.save_pretrained(folder)
    return str(folder)


@functools.cache
def reference_model(name: str, seed: int = 0) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint(name, seed), dtype=torch.float32).eval()
    # Generation runs through end tokens, as with ignore_eos; min_new_tokens would forbid them instead.
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist())


@functools.cache
def greedy(name: str, prompt_ids: tuple[int, ...], num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """transformers' greedy continuation in fp32."""
    model = reference_model(name, seed)
    ids = torch.tensor([prompt_ids])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(out[0, len(prompt_ids) :].tolist())


def logprobs(name: str, token_ids: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """transformers' log-probabilities [len, vocab] fp32: row i is the distribution of token i + 1."""
    with torch.inference_mode():
        return reference_model(name, seed)(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def make_llm(name: str, seed: int = 0, **kwargs: Any) -> Any:
    """Our engine on checkpoint ``name`` in fp32, small limits unless ``kwargs`` say otherwise."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 320,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 400,
        "enable_prefix_caching": False,
    }
    return LLM(checkpoint(name, seed), **{**settings, **kwargs})


def generate(llm: Any, prompts: list[tuple[int, ...]], num_tokens: int, **sampling: Any) -> list[Any]:
    """Greedy completions of exactly ``num_tokens`` tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, **sampling)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    assert [tuple(o.prompt_token_ids) for o in outputs] == list(prompts)
    return outputs


def tokens(outputs: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def check_greedy(name: str, lengths: tuple[int, ...], num_tokens: int, ragged: bool, tolerance: float) -> None:
    """Our tokens are transformers', and the log-probabilities of two at each place, within ``tolerance``. ``ragged``:
    prompts in chunks of their own lengths, in padded steps; else whole prompts."""
    chunks = {"max_num_batched_tokens": 24, "compilation_config": {"cudagraph_capture_sizes": [4, 16, 24]}}
    prompts = [prompt(length) for length in lengths]
    llm = make_llm(name, **({**chunks, "max_num_seqs": 4} if ragged else {}))
    outputs = generate(llm, prompts, num_tokens, logprobs=2)
    llm.llm_engine.scheduler.check_integrity()
    llm.shutdown()
    assert tokens(outputs) == [greedy(name, ids, num_tokens) for ids in prompts]
    for ids, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        expected = logprobs(name, ids + tuple(completion.token_ids))[len(ids) - 1 : -1]
        for step, given in enumerate(completion.logprobs):
            for token_id, logprob in given.items():
                error = abs(logprob.logprob - float(expected[step, token_id]))
                assert error <= tolerance, f"{name}, prompt of {len(ids)}, place {step}, token {token_id}: {error}"
