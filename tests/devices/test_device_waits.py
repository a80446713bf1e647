# SPDX-License-Identifier: Apache-2.0
"""A step on the device: how often it waits, what it leaves behind, and what is written while the device lags."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import device_models
import device_suite as suite
import pytest
import tiny_models as tiny
import torch
from device_cases import CASES, Place

from vllm.kernels import checks, table, weights

pytestmark = pytest.mark.device

NAMES = ["llama-wide", "qwen3-moe-wide", "qwen3.5-moe-wide"]
NOT_COUNTED = "torch can tell of waits for the device on CUDA only (torch.cuda.set_sync_debug_mode)"


@contextmanager
def waits_seen() -> Iterator[list[str]]:
    """The lines of Python that made the host wait for the device, one for each time; always none but on CUDA."""
    lines: list[str] = []
    if suite.device_type() != "cuda":
        yield lines
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield lines
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines += [f"{w.filename}:{w.lineno}" for w in seen if "called a synchronizing" in str(w.message)]


@contextmanager
def waits_forbidden() -> Iterator[None]:
    if suite.device_type() != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def started(
    name: str, prompts: list[tuple[int, ...]], num_tokens: int, sampling: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """An engine with these requests queued, greedy by default."""
    from vllm import SamplingParams

    llm = device_models.module_of(name).make_llm(name, **kwargs)
    sampling = sampling or {"temperature": 0}
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False, **sampling)
    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
    return llm


ALL_LIMITS = {"seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.4, "logprobs": 2}


@pytest.mark.parametrize(
    ("name", "sampling"),
    [*((name, {"temperature": 0}) for name in NAMES), (NAMES[1], ALL_LIMITS)],
    ids=[*NAMES, "sampled"],
)
def test_a_decode_step_waits_once(name: str, sampling: dict[str, Any], device: str) -> None:
    """For the sampled tokens, by an event or one copy."""
    llm = started(name, [tiny.prompt(n) for n in (5, 9, 3)], 12, sampling)
    engine = llm.llm_engine
    for _ in range(4):
        engine.step()
    for _ in range(4):
        with waits_seen() as waits:
            engine.step()
        assert len(waits) <= 1, f"{len(waits)} waits in a step: {waits}"
    llm.shutdown()
    if device == "xpu":
        pytest.skip(NOT_COUNTED)


@pytest.mark.parametrize("name", {operator: name for name, (operator, _) in reversed(CASES.items())}.values())
def test_an_operator_does_not_wait(name: str, device: str) -> None:
    operator, build = CASES[name]
    module: Any = table.choose(device)[operator].module
    args = build(
        Place(suite.sizes(), device, torch.bfloat16, module if hasattr(module, "pack_linear_weight") else weights)
    )
    with torch.device(device):
        args = checks.in_order_of(module, args)
    function = getattr(module, operator)
    function(*args)  # compiles
    if suite.chosen(operator) == "reference" and operator not in ("linear", "embedding"):
        pytest.skip("plain torch runs this operator here, and asks the device for counts")
    with waits_forbidden():
        function(*args)
    if device == "xpu":
        pytest.skip(NOT_COUNTED)


@pytest.mark.parametrize("name", NAMES)
def test_steps_keep_no_memory(name: str, device: str) -> None:
    """Case 6: after the first steps nothing on the device lives longer than a step."""
    llm = started(name, [tiny.prompt(n) for n in (5, 9)], 40)
    for _ in range(6):
        llm.llm_engine.step()
    held = []
    for _ in range(20):
        llm.llm_engine.step()
        suite.synchronize()
        held.append(0 if device == "cpu" else getattr(torch, device).memory_allocated())
    llm.shutdown()
    assert max(held) - min(held) < 1 << 16, f"bytes held after each step: {held}"


@pytest.mark.parametrize("name", NAMES)
def test_a_device_that_lags_reads_what_was_meant(name: str, device: str) -> None:
    """Case 4: the device is behind by far more than a step when its inputs are written; prompts come in chunks, whose
    steps sample nothing and so wait for nothing."""
    prompts = [tiny.prompt(n, seed=3) for n in (90, 7, 60)]
    llm = started(name, prompts, 6, max_num_batched_tokens=16, max_num_seqs=8)
    n, times = (16, 1) if device == "cpu" else (4096, 20)
    ones = torch.ones(n, n, dtype=torch.bfloat16, device=device)

    def lag(*_: Any) -> None:
        for _ in range(times):
            torch.mm(ones, ones)

    llm.llm_engine.worker.runner.model.register_forward_pre_hook(lag)
    got: dict[str, tuple[int, ...]] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            got[output.request_id] = tuple(output.outputs[0].token_ids)
    llm.shutdown()
    for i, prompt in enumerate(prompts):
        device_models.assert_transformers_tokens(name, prompt, got[str(i)])


def test_cached_prefixes_give_the_same_tokens(device: str) -> None:
    """Cases 16 and 17: blocks of requests that ended are found again or written anew."""
    name, base = "qwen3-moe-wide", tiny.prompt(50, seed=4)
    llm = tiny.make_llm(name, enable_prefix_caching=True, max_model_len=160, num_gpu_blocks_override=16)
    for prompt in (base, base, base[:40] + tiny.prompt(9, seed=5), tiny.prompt(100, seed=6), base):
        (got,) = tiny.tokens(tiny.generate(llm, [prompt], 8))
        device_models.assert_transformers_tokens(name, prompt, got)
    llm.llm_engine.scheduler.check_integrity()
    llm.shutdown()


def test_nan_of_one_request_stays_its_own(device: str) -> None:
    """A NaN in one request's row ends that request and changes no token of the other's."""
    name, prompts = "qwen3-moe-wide", [tiny.prompt(8, seed=7), tiny.prompt(8, seed=8)]
    llm = tiny.make_llm(name)
    steps = 0

    def spoil(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 3:  # a decode step: a row a request
            out = out.clone()
            out[0] = float("nan")
        return out

    llm.llm_engine.worker.runner.model.model.embed_tokens.register_forward_hook(spoil)
    spoilt, sound = tiny.generate(llm, prompts, 8)
    assert spoilt.outputs[0].finish_reason == "error"
    device_models.assert_transformers_tokens(name, prompts[1], tuple(sound.outputs[0].token_ids))
    llm.shutdown()
