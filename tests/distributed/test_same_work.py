# SPDX-License-Identifier: Apache-2.0
"""Ranks that were started or fed differently: an error on every rank that names what differs, never a wrong answer."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import launcher
import pytest
import rank_checks
import tiny_models as tiny
from test_step import make_llm

from vllm.v1.worker.dp_utils import LockstepError

pytestmark = pytest.mark.multiprocess

# --- what TP ranks run ------------------------------------------------------------------------------------------------


def fed_by_rank(folder: str, tp: int, dp: int, how: str) -> str:
    """Every rank takes its own share of the work, as if its number were its DP rank's."""
    llm = make_llm(folder, tp, dp)
    rank = rank_checks.own_rank()
    prompts, more = [tiny.prompt(6), tiny.prompt(9)], {}
    if how == "other prompts":
        prompts = [tiny.prompt(6, seed=rank)]
    elif how == "other counts":
        prompts = prompts[: 1 + rank % 2]
    elif how == "other order":
        prompts = prompts[:: 1 - 2 * (rank % 2)]
    elif how == "other parameters":
        more = {"logprobs": rank}
    elif how == "another cache":
        tiny.generate(llm, prompts, 3)
        if rank == 0:
            llm.reset_prefix_cache()
    with pytest.raises(LockstepError) as caught:
        tiny.generate(llm, prompts, 8, **more)
    return str(caught.value)


@pytest.mark.parametrize("how", ["other prompts", "other counts", "other order", "other parameters"])
@pytest.mark.parametrize(("tp", "dp"), [pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)])
def test_tp_ranks_that_get_different_work_are_named_on_every_rank(tp: int, dp: int, how: str) -> None:
    told = launcher.run_ranks(fed_by_rank, tp * dp, tiny.checkpoint("mixtral"), tp, dp, how)
    for rank, message in enumerate(told):
        first = rank // tp * tp
        start = f"the TP ranks of DP group {rank // tp} were given different work: rank {first} "
        assert message.startswith(start), told
        assert f", rank {first + 1} " in message, told
        assert message.endswith("split prompts by dp_rank (RANK // tensor_parallel_size), not by RANK"), told


def one_group_differs(folder: str) -> str:
    llm = make_llm(folder, 2, 2)
    with pytest.raises(LockstepError) as caught:
        tiny.generate(llm, [tiny.prompt(6, seed=int(rank_checks.own_rank() == 3))], 8)
    return str(caught.value)


def test_the_other_dp_groups_stop_in_the_same_step() -> None:
    told = launcher.run_ranks(one_group_differs, 4, tiny.checkpoint("mixtral"))
    for message in told[:2]:
        assert message.startswith("in step 0 the TP ranks of DP group [1] do not agree"), told
    for message in told[2:]:
        assert message.startswith("the TP ranks of DP group 1 were given different work: rank 2 6 tokens in step 0"), (
            told
        )


def ids_of_their_own(folder: str) -> list[tuple[int, ...]]:
    """Request ids are names: the TP ranks may give different ones."""
    from vllm import SamplingParams

    llm = make_llm(folder, 2, 1)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    engine, outputs = llm.llm_engine, []
    for number, length in enumerate((6, 70, 5)):
        name = f"{number} of {os.getpid()}"
        engine.add_request(name, {"prompt_token_ids": list(tiny.prompt(length))}, params)
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    llm.shutdown()
    return tiny.tokens(sorted(outputs, key=lambda output: output.request_id))


def test_equal_work_under_other_names_is_equal() -> None:
    expected = [tiny.greedy("mixtral", tiny.prompt(length), 4) for length in (6, 70, 5)]
    assert launcher.run_ranks(ids_of_their_own, 2, tiny.checkpoint("mixtral")) == [expected] * 2


# --- how they were started --------------------------------------------------------------------------------------------

# Field → the value that one rank has; every other field of the configuration is in DIFFERENT or OWN.
DIFFERENT: dict[str, Any] = {
    "architecture": "Other", "dtype": "bfloat16", "max_model_len": 100, "fit_max_model_len": True, "seed": 7,
    "trust_remote_code": True, "skip_tokenizer_init": False, "tokenizer_mode": "slow",
    "revision": "r", "tokenizer_revision": "r", "logprobs_mode": "raw_logits",
    "load_format": "safetensors", "max_logprobs": 3, "block_size": 8, "num_gpu_blocks_override": 41,
    "enable_prefix_caching": False, "cache_dtype": "fp8", "tensor_parallel_size": 4, "data_parallel_size": 4,
    "enable_expert_parallel": True, "distributed_executor_backend": "external_launcher", "max_num_batched_tokens": 32,
    "max_num_seqs": 3, "enable_chunked_prefill": False, "async_scheduling": True, "cudagraph_mode": 1,
    "cudagraph_capture_sizes": (8,), "hf_config": "rms_norm_eps", "model": "another", "tokenizer": "org/other",
    "generation_config": {"eos_token_id": [5]}, "VLLM_ATTENTION_BACKEND": "TORCH_PAGED", "eplb_step_interval": 5,
    "quantization": "fp8", "quant_config": "another",
    "VLLM_KERNELS": "rms_norm=reference",
}  # fmt: skip
SHOWN = {
    "hf_config": "hf_config.rms_norm_eps",
    "VLLM_ATTENTION_BACKEND": "kernel of reshape_and_cache",
    "VLLM_KERNELS": "kernel of rms_norm",
}
OWN = {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 1 << 20, "served_model_name": "x"}


def started_differently(folder: str, other_folder: str) -> dict[str, str]:
    """Field → what the comparison says on this rank where rank 1 has another value; empty where it may."""
    from vllm.distributed import get_world_group, init_distributed_environment
    from vllm.distributed.parallel_state import check_same_on_all_ranks
    from vllm.engine.arg_utils import EngineArgs
    from vllm.kernels import table
    from vllm.v1.worker.settings import settings_of

    init_distributed_environment()
    config = EngineArgs(folder, dtype="float32", skip_tokenizer_init=True).create_engine_config()
    object.__setattr__(config.model_config, "tokenizer_mode", "auto")
    parts = [part for part in vars(config).values() if dataclasses.is_dataclass(part)]
    fields = {field.name: part for part in parts for field in dataclasses.fields(part)}
    assert set(fields) <= {*DIFFERENT, *OWN}, "a new field: is it one that ranks must share?"
    told = {}
    for name, value in {**DIFFERENT, **OWN}.items():
        generation, kept = {"eos_token_id": [2]}, os.environ.copy()
        with pytest.MonkeyPatch.context() as patch:
            if name == "tokenizer":
                patch.setitem(vars(config.model_config), "skip_tokenizer_init", False)
                patch.setitem(vars(config.model_config), "tokenizer", folder)
            if rank_checks.own_rank() == 1:
                if name == "generation_config":
                    generation = value
                elif name == "hf_config":
                    patch.setattr(config.model_config.hf_config, value, 0.5)
                elif name.startswith("VLLM_"):
                    os.environ[name] = value
                    table.choose.cache_clear()
                else:
                    value = other_folder if name == "model" else value
                    patch.setitem(vars(fields[name]), name, value)
            try:
                check_same_on_all_ranks(get_world_group(), settings_of(config, generation))
                told[name] = ""
            except ValueError as error:
                told[name] = str(error)
        os.environ.clear()
        os.environ.update(kept)
        table.choose.cache_clear()
    return told


def test_every_field_that_one_rank_has_otherwise_is_named_on_all(tmp_path: Any) -> None:
    other = tiny.checkpoint("mixtral", seed=1)
    for told in launcher.run_ranks(started_differently, 2, tiny.checkpoint("mixtral"), other, deadline_s=120):
        assert {name for name, message in told.items() if not message} == set(OWN)
        for name in DIFFERENT:
            shown = SHOWN.get(name, name)
            shown = shown if name != "generation_config" else "generation_config.eos_token_id"
            assert told[name].startswith(f"{shown} differs between the ranks: ["), told[name]
            assert told[name].endswith(" by rank; start all of them alike")


def engine_started_differently(folder: str, other: str, name: str, values: tuple[Any, Any]) -> str:
    value = values[rank_checks.own_rank() == 1]
    with pytest.raises(ValueError) as caught:
        make_llm(value if name == "model" else folder, 1, 2, **({name: value} if name != "model" else {}))
    return str(caught.value)


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "model", "num_gpu_blocks_override"])
def test_engines_that_differ_end_before_they_load(name: str) -> None:
    folder, other = tiny.checkpoint("mixtral"), tiny.checkpoint("mixtral", seed=1)
    values = {"max_num_batched_tokens": (64, 16), "model": (folder, other), "num_gpu_blocks_override": (40, None)}[name]
    for message in launcher.run_ranks(engine_started_differently, 2, folder, other, name, values):
        assert message.startswith(f"{name} differs between the ranks: ["), message


def moved_checkpoint(folder: str) -> list[tuple[int, ...]]:
    """The same checkpoint lies elsewhere on another host, and one rank has less memory to give."""
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        if rank_checks.own_rank() == 1:
            folder = shutil.copytree(folder, f"{place}/elsewhere")
        sizes = (1 << 24, 1 << 22)
        llm = make_llm(folder, 1, 2, num_gpu_blocks_override=None, kv_cache_memory_bytes=sizes[rank_checks.own_rank()])
        tokens = tiny.tokens(tiny.generate(llm, [tiny.prompt(6)], 4))
        llm.shutdown()
    return tokens


def test_places_and_memory_may_differ() -> None:
    expected = [tiny.greedy("mixtral", tiny.prompt(6), 4)]
    assert launcher.run_ranks(moved_checkpoint, 2, tiny.checkpoint("mixtral")) == [expected] * 2


def profiled_counts(folder: str) -> tuple[list[str], tuple[int, ...]]:
    from test_step import runner_of

    from vllm.v1.worker import gpu_model_runner

    llm, plans = make_llm(folder, 1, 2), []
    make = gpu_model_runner.BatchPlan.make
    gpu_model_runner.BatchPlan.make = staticmethod(lambda *args: plans.append(make(*args)) or plans[-1])
    with rank_checks.observed() as ledger:
        runner_of(llm).max_num_tokens = 5 + rank_checks.own_rank()
        runner_of(llm).profile_run()
    llm.shutdown()
    return [record.op for record in ledger.records][:1], plans[-1].num_tokens_padded_across_dp


def test_the_profiling_run_agrees_on_its_counts() -> None:
    """Also where the ranks would run different ones: the counts in its collectives are those of all ranks."""
    found = launcher.run_ranks(profiled_counts, 2, tiny.checkpoint("mixtral"))
    assert found == [(["coordinate_batch_across_dp"], (5, 6))] * 2
