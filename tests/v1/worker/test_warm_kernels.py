# SPDX-License-Identifier: Apache-2.0
"""No form of a Triton kernel is left to be compiled in service: what an engine launches after its start, it has
launched before.

Kernels are compiled anew for each set of constants and options, and for what Triton makes of the other arguments: their
types, and of numbers whether they are 1 or a multiple of 16. Here launches are recorded, and plain torch computes.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launcher
import pytest
import rank_checks
import tiny_hybrids as hybrids
import tiny_models as tiny
import tiny_quantised as quantised_models
import torch

pytest.importorskip("triton", reason="triton is not installed")
import triton
from triton.runtime.interpreter import InterpretedFunction

from vllm import SamplingParams
from vllm.kernels import reference, table
from vllm.kernels import triton as operators
from vllm.kernels.triton import attention, experts, quantized
from vllm.v1.worker import step_memory

# Of 16 experts, two to a token, each kind of tile is of other steps.
tiny.CHECKPOINTS["mixtral-16"] = ("Mixtral", {"num_local_experts": 16, "num_experts_per_tok": 2})
MODELS = {"qwen3": tiny, "mixtral-16": tiny, "qwen3.5-moe": hybrids}


def specialised(value: Any, by_value: bool) -> Any:
    """What the compiler knows of an argument that is no constant."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value)
    wide = not -(2**31) <= value < 2**31
    return (wide, value == 1, value % 16 == 0) if by_value else wide


def form(kernel: InterpretedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    parameters = inspect.signature(kernel.fn).parameters
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    fixed = kernel.kwargs["do_not_specialize"] or ()
    key: dict[str, Any] = {}
    for name, value in given.items():
        is_constant = name not in parameters or "constexpr" in str(parameters[name].annotation)
        key[name] = value if is_constant else specialised(value, name not in fixed)
    return kernel.__name__, *sorted(key.items(), key=str)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    return record(monkeypatch)


def record(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """The forms that are launched from now on by engines, which take Triton's operators as a card's would."""
    seen: set[tuple[Any, ...]] = set()

    def note(kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        seen.add(form(kernel, args, kwargs))

    def both(operator: str) -> Callable[..., Any]:
        launch, compute = getattr(operators, operator), getattr(reference, operator)

        def call(*args: Any) -> Any:
            launch(*args)
            return compute(*args)

        return call

    monkeypatch.setenv("VLLM_KERNELS", "triton")
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    for operator in table.TABLE:
        if hasattr(operators, operator):
            monkeypatch.setattr(operators, operator, both(operator))
    monkeypatch.setattr(InterpretedFunction, "run", note)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(table, "why_not", lambda name, device: None if name in ("triton", "reference") else "not here")
    monkeypatch.setattr(step_memory, "is_host", lambda device: False)
    return seen


LOADS = ([3], [1096], [17] * 8, [1], [255, 1, 640, 9, 33], [2, 2], [511, 300], [60, 1050, 5])


def serve(llm: Any, loads: Any = LOADS) -> None:
    """Steps of one and of many requests, short and at the end of what they may hold, prompts whole and in chunks."""
    for lengths in loads:
        tiny.generate(llm, [tiny.prompt(n, seed=i) for i, n in enumerate(lengths)], 3)


# With these there are 16 slots for states, a number that the compiler would make use of.
SIZES = {"max_num_batched_tokens": 384, "max_num_seqs": 15, "max_model_len": 1100}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_new_is_launched_in_service(name: str, launched: set[tuple[Any, ...]]) -> None:
    llm = MODELS[name].make_llm(name, dtype="bfloat16", **SIZES)
    warm = set(launched)
    serve(llm)
    llm.shutdown()
    kernels = {key[0] for key in warm}
    assert {"_attend", "_merge", "_norm_kernel", "_write_kernel", "_rotary_kernel"} <= kernels
    assert launched - warm == set()


@pytest.mark.parametrize("format", ["gptq-order", "fp8-block"])
def test_nothing_new_is_launched_where_weights_are_quantised(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: set[tuple[Any, ...]]
) -> None:
    """Linear layers and experts, in groups that the kernels take."""
    quantised_models.in_groups_of(monkeypatch, 32, (32, 32))
    quantised_models.write(Path(tiny.checkpoint("mixtral-16")), tmp_path / format, format)
    llm = quantised_models.make_llm(
        "", model=str(tmp_path / format), dtype="bfloat16", **SIZES, num_gpu_blocks_override=400
    )
    warm = set(launched)
    serve(llm, (*LOADS[:5], [20]))
    llm.shutdown()
    products = [dict(key[1:]) for key in warm if key[0] == "_product"]
    assert {product["GROUPED"] for product in products} == {False, True}
    assert {product["FORMAT"] for product in products} == {"fp8" if format == "fp8-block" else "int4"}
    assert launched - warm == set()


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"seed": 3, "prompt_logprobs": 1, "logprobs": 0},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "frequency_penalty": 0.5},
    {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 3},
]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_nothing_new_is_launched_whatever_is_sampled(mode: str, launched: set[tuple[Any, ...]]) -> None:
    """Of rows alone and together, as the model's logits are and as penalties leave them."""
    llm = tiny.make_llm("qwen3", dtype="bfloat16", logprobs_mode=mode, **SIZES)
    warm = set(launched)
    params = [SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False, **kwargs) for kwargs in SAMPLED]
    for chosen in (*([each] for each in params), params[:2], params):
        prompts = [{"prompt_token_ids": list(tiny.prompt(5 + i))} for i in range(len(chosen))]
        llm.generate(prompts, chosen, use_tqdm=False)
    llm.shutdown()
    kernels = {"_row_max_kernel", "_sample_kernel", "_penalties_kernel", "_logprobs_kernel"}
    assert kernels <= {key[0] for key in warm}
    assert launched - warm == set()


def of_rank(name: str, dp: int) -> tuple[int, set[Any]]:
    """DP rank 1 has fewer requests, and none for single ones: its experts get the rows of rank 0's alone."""
    from test_step import make_llm

    with pytest.MonkeyPatch.context() as monkeypatch:
        launched = record(monkeypatch)
        sizes = {"max_num_batched_tokens": 96, "max_num_seqs": 8, "max_model_len": 300, "num_gpu_blocks_override": 100}
        llm = make_llm(MODELS[name].checkpoint(name), 1, dp, dtype="bfloat16", **sizes)
        warm = set(launched)
        loads = ([3], [17] * 8, [255, 1, 290, 9, 33], [2, 2])
        serve(llm, [lengths[rank_checks.own_rank() :] for lengths in loads])
        llm.shutdown()
    return len(warm), launched - warm


@pytest.mark.multiprocess
def test_nothing_new_where_experts_are_shared() -> None:
    found = launcher.run_ranks(of_rank, 2, "mixtral-16", 2, deadline_s=240)
    for warm, new in found:
        assert warm > 10
        assert new == set()


@pytest.mark.parametrize("heads", [(1, 1, 64), (4, 4, 64), (32, 8, 128), (40, 1, 128), (64, 1, 576), (12, 4, 96)])
@pytest.mark.parametrize("window", [0, 1000])
def test_forms_of_attention_are_all_that_there_are(heads: tuple[int, int, int], window: int) -> None:
    (H, J, D), dtype, num_tokens, num_reqs, longest = heads, torch.bfloat16, 70, 9, 20000

    def forms(T: int, R: int, context: int) -> set[Any]:
        context = -(-context // 16) * 16
        few = attention._plan_few(R, H // J, J, D, D, dtype, min(context, window or context), False)
        many = attention._plan_many(D, D, dtype, False)
        return {(cut.plan, cut.search, cut.heads, cut.queries) for cut in attention._cuts(T, R, H // J, J, few, many)}

    # Profiling's own largest steps, and what it adds to them.
    steps = [(num_tokens, 1, longest), *attention.paged_attention_forms(num_tokens, num_reqs, longest)]
    assert all(T >= R for T, R, _ in steps)
    warm = set().union(*itertools.starmap(forms, steps))
    contexts = (1, 255, 256, 500, 513, 1023, 1025, 3000, 4100, 9000, 16384, 17000, longest)
    for R in range(1, num_reqs + 1):
        for T, context in itertools.product(range(R, num_tokens + 1), contexts):
            assert forms(T, R, context) <= warm, (T, R, context)


def test_forms_of_experts() -> None:
    """Of 64 experts, 8 to a token: at most 8 rows of each in the mean, 40, and more; 4096 pairs in all, and more."""
    assert experts.fused_experts_forms(5000, 8, 64, torch.bfloat16) == [1, 513]  # the interpreter has one tile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", False)
        assert experts.fused_experts_forms(5000, 8, 64, torch.bfloat16) == [1, 65, 321, 513]
        assert experts.fused_experts_forms(64, 8, 64, torch.bfloat16) == [1]
        assert experts.fused_experts_forms(5000, 8, 64, torch.float32) == [1, 513]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forms_of_quantised_products(dtype: torch.dtype) -> None:
    """Experts of such weights take tiles of others by the same means as those of plain ones."""
    weight: Any = SimpleNamespace(format="int8", dtype=dtype, group_size=128, K=256)

    def tiles(T: int, few: int = 16) -> Any:
        return quantized._tiles(weight, T, few, False)

    for most in (1, 16, 17, 40, 41, 500):
        forms = quantized.quantized_linear_forms(most)
        assert {tiles(T) for T in range(1, most + 1)} == {tiles(T) for T in forms}
        assert max(forms) <= most
    of_plain = [experts._tiles(T, 1, 1, dtype, False) for T in range(1, 99)]
    changes = {n for n, (x, y) in enumerate(itertools.pairwise(of_plain)) if x != y}
    assert {n for n in range(97) if tiles(n + 1, 8) != tiles(n + 2, 8)} == changes


def test_the_start_tells_of_it(launched: set[Any], log: pytest.LogCaptureFixture) -> None:
    tiny.make_llm("qwen3", **SIZES).shutdown()
    (told,) = [record.message for record in log.records if "kinds of steps" in record.message]
    assert "ran once in" in told
    assert "Triton compiled 0 kernels" in told, "those of the interpreter are not compiled"
