# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels on the device by the comparisons that they pass in the interpreter (``tests/kernels``): real sizes,
every option, every type; ragged, padded, among NaN. On a CPU with ``TRITON_INTERPRET=1`` at small sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import device_suite as suite
import pytest
import torch

from vllm.kernels import table

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("nan_memory")]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
T_ = TypeVar("T_")


@pytest.fixture
def card(device: str) -> str:
    if (missing := table.why_not("triton", device)) is not None:
        pytest.skip(missing)
    return device


def sized(real: T_, small: T_) -> T_:
    return real if suite.sizes() is suite.REAL else small


def of(module: str) -> Any:
    """Where the comparison is written."""
    return importlib.import_module(module)


def activation(T: int, dtype: torch.dtype, card: str) -> None:
    for D in sized((768, 2880, 6144), (48,)):
        for in_x in (True, False):
            of("test_activation").check(T, D, dtype, in_x, card)


def cache_write(T: int, dtype: torch.dtype, card: str) -> None:
    for J, D, block_size in sized(((8, 128, 16), (8, 128, 64), (1, 576, 64)), ((2, 16, 16),)):
        of("test_cache_write").check(T, J, D, block_size, dtype, 0.2, card, blocks=64)


def embedding(T: int, dtype: torch.dtype, card: str) -> None:
    for vocab, parts, K in sized(((32003, 4, 2048), (1000, 3, 2880)), ((11, 2, 40),)):
        of("test_embedding").check(vocab, parts, K, T, dtype, card)


def norms(T: int, dtype: torch.dtype, card: str) -> None:
    written, H, D = of("test_norms"), *sized((40, 128), (2, 16))
    for wide_weight in (False, True):
        for width in sized((2048, 2880, 7168), (48,)):
            written.check_rms_norm(T, 0, width, dtype, wide_weight, "beside", card)
            written.check_fused_add(T, width, dtype, wide_weight, True, card)
        written.check_rms_norm(T, H, D, dtype, wide_weight, "x", card)
    written.check_gated(T, H, D, torch.float32, dtype, "beside", card)


def rotary(T: int, dtype: torch.dtype, card: str) -> None:
    real = ((32, 8, 128, 128), (16, 2, 256, 64), (128, 1, 64, 64))
    for interleaved in (False, True):
        for heads in sized(real, ((2, 1, 16, 8),)):
            of("test_rotary").check(T, *heads, interleaved, dtype, card, P=sized(40960, 9))


def routing(T: int, dtype: torch.dtype, card: str) -> None:
    for E, K in sized(((8, 2), (64, 6), (128, 8), (256, 8)), ((8, 2),)):
        for scoring in ("softmax", "sigmoid", "sigmoid with bias"):
            of("test_topk").check((T - T // 8, T // 8), E, K, scoring, True, dtype, card)
    of("test_topk").check((0, T), 8, 2, "softmax", True, dtype, card)


def sampling(T: int, dtype: torch.dtype, card: str) -> None:
    """Greedy rows and rows of all limits; fewer rows, as the law is looked up token by token."""
    written, R, V, off = of("test_sampling"), min(T, 64), sized(151_936, 150), 10**9
    limits = [
        (1.0, off, 1.0, 0.0),
        (0.7, 50, 0.9, 0.01),
        (1.5, off, 0.95, 0.0),
        (0.0, off, 1.0, 0.0),
        (1.0, 9, 1.0, 0.2),
    ]
    written.check(2 * written.randn(R, V).to(dtype), (limits * R)[:R], card)
    written.check_logprobs(R, V, sized(20, 5), dtype, True, card)
    written.check_penalties([0, sized(5000, 60), 64, 1], V, card)


ROW_WISE: dict[str, Callable[[int, torch.dtype, str], None]] = {
    function.__name__: function for function in (activation, cache_write, embedding, norms, rotary, routing, sampling)
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 26, 777])
@pytest.mark.parametrize("family", ROW_WISE)
def test_row_wise(family: str, T: int, dtype: str, card: str) -> None:
    ROW_WISE[family](sized(T, min(T, 9)), DTYPES[dtype], card)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 64, 300, 2048])
def test_experts(T: int, dtype: str, card: str) -> None:
    """The sizes of Qwen3-30B-A3B's layers, half its experts; each kind of tile."""
    E, inner, D, S = sized((64, 768, 2048, 8), (3, 24, 32, 2))
    of("test_experts").check(card, DTYPES[dtype], sized(T, min(T, 20)), E, inner, D, S)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "num_pads"),
    [([1] * 26, 4), ([7, 5, 11, 7], 2), ([1, 129, 0, 600, 3], 5)],
    ids=["decode", "mixed", "prompts"],
)
def test_gated_delta_net(lengths: list[int], num_pads: int, dtype: str, card: str) -> None:
    from vllm.kernels.triton import gdn

    lengths = sized(lengths, [min(n, 3) for n in lengths[:4]])
    slots = [0 if n == 0 else len(lengths) - r for r, n in enumerate(lengths)]
    shape = sized((16, 32, 128, 128, 4), (1, 2, 16, 16, 4))
    of("gdn_cases").check(
        of("gdn_cases").make_case(shape, DTYPES[dtype], lengths, slots, num_pads), gdn.gated_delta_net, card
    )


SHAPES: dict[str, dict[str, Any]] = {
    "decode": {"lens": [4096, 1, 17, 3000, 513, 64, 128, 2047], "queries": [1] * 8, "pad_rows": 3},
    "chunks among decodes": {"lens": [1500, 900, 64, 3000, 20], "queries": [500, 1, 64, 1, 3], "pad_rows": 7},
    "no answers": {"lens": [500, 0, 77, 0], "queries": [1, 3, 40, 0], "pad_rows": 2},
    "a long context": {"lens": [30000], "queries": [1]},
    "prefill": {"lens": [700, 129, 1], "queries": [700, 129, 1], "pad_rows": 5},
    "26 of 30": {"lens": [97 * i + 1 for i in range(26)], "queries": [1] * 26, "pad_rows": 4},
    "a prompt of 26 of 30": {"lens": [97 * i + 7 for i in range(20)], "queries": [1] * 19 + [7], "pad_rows": 4},
}
KINDS: dict[str, dict[str, Any]] = {
    "head 128": {"H": 32, "J": 8, "D": 128},
    "latent": {"H": 32, "J": 1, "D": 576, "DV": 512, "latent": True},
    "head 64, sinks, window": {"H": 64, "J": 8, "D": 64, "sinks": True, "window": 128},
    "head 96, pages of 64": {"H": 12, "J": 4, "D": 96, "block_size": 64},
    "head 192 and 128": {"H": 16, "J": 16, "D": 192, "DV": 128},
    "head 256, soft cap": {"H": 16, "J": 2, "D": 256, "soft_cap": 30.0},
    "head 128, fp8 cache": {"H": 32, "J": 8, "D": 128, "scales": (0.7, 0.3)},
    "latent, fp8 cache": {"H": 32, "J": 1, "D": 576, "DV": 512, "latent": True, "scales": (0.7, 0.7)},
}
# Every kind in three shapes, every shape for the first kind; the other types for two kinds in two shapes.
ATTENTION = [
    (shape, kind, dtype)
    for s, shape in enumerate(SHAPES)
    for k, kind in enumerate(KINDS)
    for dtype in DTYPES
    if (dtype == "bf16" and (s < 3 or k == 0)) or (s < 2 and k < 2)
]


@pytest.mark.parametrize(("shape", "kind", "dtype"), ATTENTION, ids=["-".join(names) for names in ATTENTION])
def test_attention(shape: str, kind: str, dtype: str, card: str) -> None:
    """Twice the same bits, too."""
    lens, queries, pad_rows = (SHAPES[shape].get(name, 0) for name in ("lens", "queries", "pad_rows"))
    of_kind = dict(KINDS[kind])
    if suite.sizes() is not suite.REAL:
        queries = [min(n, 3) for n in queries[:3]]
        lens = [min(n, 20) and max(min(n, 20), q) for n, q in zip(lens[:3], queries, strict=True)]
        of_kind |= {"H": 2, "J": 1, "D": 16, "DV": 8}
    case = of("test_attention").Case(lens, queries, **of_kind, pad_rows=pad_rows, dtype=DTYPES[dtype], device=card)
    assert torch.equal(case.check().nan_to_num(7.0), case.run().nan_to_num(7.0))


@pytest.mark.parametrize("T", [1, 40, 600])
@pytest.mark.parametrize("activations", [None, "int8", "fp8"], ids=["as they are", "by int8", "by fp8"])
@pytest.mark.parametrize("form", ["int4", "int4 zeros", "int8", "int8 zeros", "fp8", "mxfp4"])
def test_quantised(form: str, activations: str | None, T: int, card: str) -> None:
    if suite.sizes() is not suite.REAL:
        pytest.skip("at small sizes in tests/kernels")
    of("test_quantized").check_real_sizes(card, form, T, activations)


@pytest.mark.parametrize("T", [1, 40, 600])
@pytest.mark.parametrize("format", ["q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"])
def test_blocks(format: str, T: int, card: str) -> None:
    if suite.sizes() is not suite.REAL:
        pytest.skip("at small sizes in tests/kernels")
    of("test_blocks").check_real_sizes(card, format, T)
