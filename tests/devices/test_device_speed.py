# SPDX-License-Identifier: Apache-2.0
"""What each kernel and a whole model achieve, beside what the card's own copy and matrix rates, measured in the same
run, would allow. Nothing here fails for being slow: the report tells."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import device_suite as suite
import pytest
import torch
from device_suite import Sizes
from padding_slots import slots
from torch import Tensor

from vllm.kernels import checks, reference, table, weights
from vllm.kernels.quantized import FORMATS, QuantizedWeight
from vllm.kernels.weights import GDNWeights

pytestmark = pytest.mark.device

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Work:
    """Arguments of a call, the bytes that it has to move and the operations that it has to do."""

    args: tuple[Any, ...]
    bytes: float
    flops: float = 0.0


def randn(*shape: int, dtype: torch.dtype = DTYPE, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, dtype=torch.float32, device=suite.device_type()) * scale).to(dtype)


def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.as_tensor(values).to(device=suite.device_type(), dtype=dtype)


def rms_norm(s: Sizes, packer: Any) -> Work:
    x = randn(s.prefill_tokens, s.hidden)
    return Work((x, randn(s.hidden), 1e-6, torch.empty_like(x)), 2 * x.nbytes)


def fused_add_rms_norm(s: Sizes, packer: Any) -> Work:
    x = randn(s.prefill_tokens, s.hidden)
    return Work((x, torch.zeros_like(x), randn(s.hidden), 1e-6, torch.empty_like(x)), 4 * x.nbytes)


def silu_and_mul(s: Sizes, packer: Any) -> Work:
    x = randn(s.prefill_tokens, 2 * s.hidden)
    return Work((x,), 1.5 * x.nbytes)


def rotary_embedding(s: Sizes, packer: Any) -> Work:
    D = s.head_dims[1]
    fused = randn(s.prefill_tokens, s.heads + s.kv_heads, D)
    positions = torch.arange(s.prefill_tokens, device=suite.device_type())
    table_of = torch.rand(s.prefill_tokens, D, device=suite.device_type())
    return Work((positions, fused[:, : s.heads], fused[:, s.heads :], table_of), 2 * fused.nbytes + table_of.nbytes)


def caches(s: Sizes, tokens: int) -> list[Tensor]:
    return [randn(tokens // 16 + 2, s.kv_heads, 16, s.head_dims[1], scale=0.3) for _ in range(2)]


def reshape_and_cache(s: Sizes, packer: Any) -> Work:
    k, v = (randn(s.prefill_tokens, s.kv_heads, s.head_dims[1]) for _ in range(2))
    slots = torch.arange(s.prefill_tokens, device=suite.device_type()) + 16
    return Work((k, v, *caches(s, s.prefill_tokens), slots), 4 * k.nbytes)


def attention(s: Sizes, requests: int, new: int, context: int) -> Work:
    D, T, blocks = s.head_dims[1], requests * new, -(-context // 16)
    order = torch.randperm(requests * blocks, generator=torch.Generator("cpu").manual_seed(1)) + 1
    q = randn(T, s.heads, D)
    args = (
        q, *caches(s, requests * blocks * 16), ints(order.view(requests, blocks)),
        ints([r * new for r in range(requests + 1)]), ints([context] * requests), D**-0.5, torch.empty_like(q), 0, None,
    )  # fmt: skip
    seen = new * (context - (new - 1) / 2)  # pairs of a query and a key of one head
    kv_bytes = 2 * requests * context * s.kv_heads * D * DTYPE.itemsize
    return Work(args, kv_bytes + 2 * q.nbytes, 4 * requests * seen * s.heads * D)


def experts(s: Sizes, packer: Any, rows: int) -> Work:
    w13 = packer.pack_expert_weights(randn(s.experts, 2 * s.expert_inner, s.hidden, scale=s.hidden**-0.5), True)
    w2 = packer.pack_expert_weights(randn(s.experts, s.hidden, s.expert_inner, scale=s.expert_inner**-0.5))
    generator = torch.Generator("cpu").manual_seed(2)
    ids = torch.stack([torch.randperm(s.experts, generator=generator)[: s.top_k] for _ in range(rows)])
    x, of_one = randn(rows, s.hidden), 3 * s.hidden * s.expert_inner
    shares = torch.full((rows, s.top_k), 1 / s.top_k, device=suite.device_type())
    return Work(
        (x, w13, w2, ints(ids), shares, torch.empty_like(x)),
        len(ids.unique()) * of_one * DTYPE.itemsize + 2 * x.nbytes,
        2.0 * rows * s.top_k * of_one,
    )


def linear(s: Sizes, packer: Any, rows: int) -> Work:
    N = 2 * s.hidden
    x, weight = randn(rows, s.hidden), packer.pack_linear_weight(randn(N, s.hidden, scale=s.hidden**-0.5))
    moved = (N * s.hidden + rows * (N + s.hidden)) * DTYPE.itemsize
    return Work((x, weight), moved, 2.0 * rows * N * s.hidden)


def quantized(format: str, group: int, *shape: int, **fields: Any) -> QuantizedWeight:
    """Codes of any bits but those of NaN; the bytes that a product reads are those of codes and scales."""
    group = min(group, shape[-1])
    codes = torch.randint(0, 120, (*shape[:-1], shape[-1] // FORMATS[format].columns), device=suite.device_type())
    scales = torch.full((*shape[:-1], shape[-1] // group), 2.0**-9, device=suite.device_type())
    scales = scales.to(DTYPE if format == "int4" else torch.float32)
    return QuantizedWeight(format, shape[-2], shape[-1], group, DTYPE, codes.to(torch.uint8), scales, None, **fields)


def bytes_of(weight: QuantizedWeight) -> int:
    assert weight.scales is not None
    return weight.codes.nbytes + weight.scales.nbytes


def quantized_linear(s: Sizes, rows: int, format: str, group: int, **fields: Any) -> Work:
    N = 2 * s.hidden
    x, weight = randn(rows, s.hidden), quantized(format, group, N, s.hidden, **fields)
    moved = bytes_of(weight) + rows * (N + s.hidden) * DTYPE.itemsize
    return Work((x, weight), moved, 2.0 * rows * N * s.hidden)


def quantized_experts(s: Sizes, packer: Any, rows: int, format: str, group: int) -> Work:
    """As ``experts``, whose bytes count those of the experts that are wanted."""
    like = experts(s, packer, rows)
    w13 = quantized(format, group, s.experts, 2 * s.expert_inner, s.hidden, gated=True)
    w2 = quantized(format, group, s.experts, s.hidden, s.expert_inner)
    x, _, _, ids, *rest = like.args
    wanted = len(ids.unique()) / s.experts
    return Work((x, w13, w2, ids, *rest), wanted * (bytes_of(w13) + bytes_of(w2)) + 2 * x.nbytes, like.flops)


def embedding(s: Sizes, packer: Any) -> Work:
    ids = torch.arange(s.prefill_tokens, device=suite.device_type()) * 7919 % s.vocab
    weight = packer.pack_linear_weight(randn(s.vocab, s.hidden))
    return Work((ids, weight), 2 * s.prefill_tokens * s.hidden * DTYPE.itemsize)


def topk_softmax(s: Sizes, packer: Any) -> Work:
    logits = randn(s.prefill_tokens, s.experts, dtype=torch.float32)
    return Work(
        (logits, s.top_k, True, slots(len(logits), len(logits), logits.device)),
        logits.nbytes + s.prefill_tokens * s.top_k * 8,
    )


def delta_net(s: Sizes, requests: int, new: int) -> Work:
    """Operations as the definition has them: two products with the state and one update of it, a token."""
    G, H, D, K = s.gdn_k_heads, s.gdn_v_heads, s.gdn_dim, 4
    C, small = 2 * G * D + H * D, torch.float32
    of = GDNWeights(
        randn(K, C, dtype=small), randn(H, dtype=small, scale=0.5).exp(), randn(H, dtype=small), randn(D, dtype=small),
        1e-6, G, D,
    )  # fmt: skip
    starts = torch.arange(requests + 1, dtype=torch.int32) * new
    conv, state = randn(requests + 1, K - 1, C), randn(requests + 1, H, D, D, dtype=small, scale=0.1)
    x = randn(requests * new, C + H * D + 2 * H)
    args = (x, of, conv, state, ints(starts), ints(range(1, requests + 1)), starts)
    moved = 2.0 * (conv.nbytes + state.nbytes) + x.nbytes + requests * new * H * D * DTYPE.itemsize
    return Work(args, moved, 6.0 * requests * new * H * D * D)


def logits(s: Sizes) -> Tensor:
    return randn(s.decode_requests, s.model_vocab, scale=3.0)


def sampled(s: Sizes, top_k: int = 0, top_p: float = 1.0) -> Work:
    """A read of the logits would do."""
    x = logits(s)
    rows = torch.arange(len(x), device=x.device)
    ones = torch.ones(len(x), device=x.device)
    limits = (torch.full_like(rows, top_k) if top_k else None, ones * top_p if top_p < 1 else None)
    return Work((x, *reference.row_max(x), ones, rows, rows, *limits), x.nbytes)


def scored(s: Sizes) -> Work:
    x = logits(s)
    return Work((x, 5, torch.arange(len(x), device=x.device)), x.nbytes)


# Format, columns of a scale, activations.
FORMS: dict[str, tuple[str, int, str | None]] = {
    "W4A16": ("int4", 128, None),
    "W8A16": ("fp8", 128, None),
    "W8A8 int8": ("int8", 1 << 20, "int8"),
    "W8A8 fp8": ("fp8", 128, "fp8"),
}
CASES: dict[str, tuple[str, Callable[[Sizes, Any], Work]]] = {
    "rms_norm": ("rms_norm", rms_norm),
    "fused_add_rms_norm": ("fused_add_rms_norm", fused_add_rms_norm),
    "silu_and_mul": ("silu_and_mul", silu_and_mul),
    "gelu_tanh_and_mul": ("gelu_tanh_and_mul", silu_and_mul),
    "rotary_embedding": ("rotary_embedding", rotary_embedding),
    "reshape_and_cache": ("reshape_and_cache", reshape_and_cache),
    "topk_softmax": ("topk_softmax", topk_softmax),
    "embedding": ("embedding", embedding),
    "linear, decode rows": ("linear", lambda s, packer: linear(s, packer, s.decode_requests)),
    "linear, prefill rows": ("linear", lambda s, packer: linear(s, packer, s.prefill_tokens)),
    **{
        f"linear, {name}, {kind} rows": (
            "quantized_linear",
            lambda s, _, kind=kind, of=of: quantized_linear(
                s, s.decode_requests if kind == "decode" else s.prefill_tokens, *of[:2], activations=of[2]
            ),
        )
        for name, of in FORMS.items()
        for kind in ("decode", "prefill")
    },
    **{
        f"experts, {name}, {kind} rows": (
            "quantized_experts",
            lambda s, packer, kind=kind, of=of: quantized_experts(
                s, packer, s.decode_requests if kind == "decode" else s.prefill_tokens, *of[:2]
            ),
        )
        for name, of in FORMS.items()
        for kind in ("decode", "prefill")
        if of[2] is None
    },
    "attention, decode": ("paged_attention", lambda s, _: attention(s, s.decode_requests, 1, s.decode_context)),
    "attention, decode of one": ("paged_attention", lambda s, _: attention(s, 1, 1, s.decode_context)),
    "attention, prefill": ("paged_attention", lambda s, _: attention(s, 1, s.prefill_tokens, s.prefill_tokens)),
    "experts, decode rows": ("fused_experts", lambda s, packer: experts(s, packer, s.decode_requests)),
    "experts, one row": ("fused_experts", lambda s, packer: experts(s, packer, 1)),
    "experts, prefill rows": ("fused_experts", lambda s, packer: experts(s, packer, s.prefill_tokens)),
    "delta net, decode": ("gated_delta_net", lambda s, _: delta_net(s, s.decode_requests, 1)),
    "delta net, prefill": ("gated_delta_net", lambda s, _: delta_net(s, 1, s.prefill_tokens)),
    "likeliest tokens": ("row_max", lambda s, _: Work((x := logits(s),), x.nbytes)),
    "tokens, no limits": ("sample", lambda s, _: sampled(s)),
    "tokens, top-k": ("sample", lambda s, _: sampled(s, top_k=50)),
    "tokens, top-p": ("sample", lambda s, _: sampled(s, top_p=0.9)),
    "log-probabilities": ("log_probabilities", lambda s, _: scored(s)),
}
OPERATORS = {name: operator for name, (operator, _) in CASES.items()}


def test_kernel(implementation_of: tuple[str, str], device: str) -> None:
    name, implementation = implementation_of
    operator, build = CASES[name]
    if (missing := suite.needs(operator, implementation)) is not None:
        pytest.skip(missing)
    module = table._module(implementation)
    work = build(suite.sizes(), module if hasattr(module, "pack_linear_weight") else weights)
    with torch.device(device):
        args = checks.in_order_of(module, work.args)
    function, card = getattr(module, operator), suite.card()
    try:
        took = suite.seconds(lambda: function(*args))
    except NotImplementedError as refusal:
        pytest.skip(f"{implementation} refuses: {refusal}")
    suite.measured(
        "kernel",
        **{
            "case": name,
            "by": implementation,
            "chosen": suite.chosen(operator) == implementation,
            "ms": took * 1e3,
            "GB/s": work.bytes / took / 1e9,
            "share of copy": work.bytes / took / card.bytes_per_s,
            "TFLOP/s": work.flops / took / 1e12,
            "share of matrix": work.flops / took / card.flops_per_s,
        },
    )
    assert took > 0


# --- a model of Qwen3-30B-A3B's shape --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Qwen3-30B-A3B but for the number of layers; a tiny one where the sizes are small."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_inner: int
    vocab: int
    layers: int

    @staticmethod
    def of(s: Sizes, memory: float) -> Shape:
        """As many layers as half of ``memory`` holds, no more than load in a minute."""
        if s is not suite.REAL:
            return Shape(64, 4, 2, 16, s.model_experts, 2, 32, s.model_vocab, s.layers)
        whole = Shape(2048, 32, 4, 128, s.model_experts, 8, 768, s.model_vocab, s.layers)
        left = memory / 2 - 2 * whole.vocab * whole.hidden * DTYPE.itemsize
        fits = int(left / ((whole.attention + whole.experts * whole.of_expert) * DTYPE.itemsize))
        return dataclasses.replace(whole, layers=min(s.layers, fits))

    @property
    def attention(self) -> int:
        """Weights of a layer but for its experts."""
        return self.hidden * (2 * (self.heads + self.kv_heads) * self.head_dim + self.experts)

    @property
    def of_expert(self) -> int:
        return 3 * self.hidden * self.expert_inner

    def bytes_of_step(self, requests: int, context: float) -> float:
        """That a decode step has to read: weights, each expert that is likely to be wanted, and the cache."""
        wanted = self.experts * (1 - (1 - self.top_k / self.experts) ** requests)
        cache = requests * context * 2 * self.kv_heads * self.head_dim
        layer = self.attention + wanted * self.of_expert + cache
        return (self.layers * layer + self.vocab * self.hidden) * DTYPE.itemsize

    def flops_of_prompt(self, tokens: int) -> float:
        layer = 2 * tokens * (self.attention + self.top_k * self.of_expert)
        return self.layers * (layer + 2 * tokens**2 * self.heads * self.head_dim) + 2 * self.vocab * self.hidden

    def save(self, folder: Path) -> None:
        from transformers import Qwen3MoeConfig

        Qwen3MoeConfig(
            hidden_size=self.hidden, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim, num_experts=self.experts, num_experts_per_tok=self.top_k,
            moe_intermediate_size=self.expert_inner, intermediate_size=self.expert_inner, vocab_size=self.vocab,
            num_hidden_layers=self.layers, norm_topk_prob=True, tie_word_embeddings=False,
            max_position_embeddings=8192, architectures=["Qwen3MoeForCausalLM"],
        ).save_pretrained(folder)  # fmt: skip


def test_model(device: str, tmp_path: Path) -> None:
    """Tokens a second of random weights, as a share of what the bytes of a decode step and the operations of a prompt
    allow at the card's own rates. The host's time counts: a small share beside good kernels is the engine's."""
    from vllm import LLM
    from vllm.platforms import current_platform

    s = suite.sizes()
    _, memory = current_platform.memory_info(torch.device(device, 0) if device != "cpu" else torch.device("cpu"))
    shape = Shape.of(s, memory)
    if shape.layers < 1:
        pytest.skip(f"one layer and the embeddings need more than half of this card's {memory / 2**30:.1f} GiB")
    shape.save(tmp_path)
    prompt_len, many = s.prefill_tokens // 4, s.decode_requests
    llm = LLM(
        str(tmp_path), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", enable_prefix_caching=False,
        max_model_len=prompt_len + s.generated + 1, max_num_seqs=many, max_num_batched_tokens=s.prefill_tokens,
        num_gpu_blocks_override=(many + 1) * (128 + prompt_len) // 16, disable_log_stats=True,
    )  # fmt: skip
    card = suite.card()
    for requests in (1, many):
        short = min(128, prompt_len)
        one = wall(llm, requests, short, 1)
        all_ = wall(llm, requests, short, s.generated)
        step = max(all_ - one, 1e-9) / (s.generated - 1)
        allowed = shape.bytes_of_step(requests, short + s.generated / 2) / card.bytes_per_s
        report(shape, f"decode, {requests} requests", requests / step, step, allowed)
    prompts = 4
    took = wall(llm, prompts, prompt_len, 1)
    allowed = prompts * shape.flops_of_prompt(prompt_len) / card.flops_per_s
    report(shape, f"prefill, {prompts} prompts of {prompt_len}", prompts * prompt_len / took, took, allowed)
    llm.shutdown()


def wall(llm: Any, requests: int, length: int, num_tokens: int) -> float:
    """Seconds of a ``generate`` call, the median of three after one for warming."""
    from vllm import SamplingParams

    vocab = llm.llm_engine.vllm_config.model_config.vocab_size
    prompts = [
        {"prompt_token_ids": [(7 * i + 13 * r) % (vocab - 3) + 3 for i in range(length)]} for r in range(requests)
    ]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    times = []
    for _ in range(4 if suite.sizes() is suite.REAL else 2):
        suite.synchronize()
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        suite.synchronize()
        times.append(time.perf_counter() - begin)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return statistics.median(times[1:])


def report(shape: Shape, what: str, rate: float, took: float, allowed: float) -> None:
    suite.measured(
        f"Model of Qwen3-30B-A3B's shape, {shape.layers} of 48 layers: {what}",
        **{"tokens/s": rate, "ms of a step or call": took * 1e3, "allowed ms": allowed * 1e3, "share": allowed / took},
    )
