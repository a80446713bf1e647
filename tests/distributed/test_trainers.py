# SPDX-License-Identifier: Apache-2.0
"""A trainer that owns the ranks: generate, train, weights in place, sleep, wake; log-probabilities are the trainer's.

Once with the calls that trl makes; with the mark ``clients`` by trl itself, its GRPO trainer last and whole.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tiny
import torch
from launcher import run_ranks

TEMPERATURE, TOP_K, NUM_TOKENS = 0.7, 20, 6
PROMPTS = [list(tiny.prompt(12)), list(tiny.prompt(5))]

# (token ids, log-probability of each), for every prompt.
Completions = list[tuple[list[int], list[float]]]


class CallsOfTrl:
    """The engine as trl makes, feeds and drives it, TP ranks with the same prompts."""

    def __init__(self, folder: str, model: Any) -> None:
        from vllm import LLM

        self.model = model
        self.llm = LLM(
            model=folder,
            tensor_parallel_size=2,
            gpu_memory_utilization=0.3,
            max_model_len=64,
            max_num_seqs=4,
            enable_sleep_mode=True,
            model_impl="auto",
            distributed_executor_backend="external_launcher",
            seed=0,
            max_num_batched_tokens=4096,
            logprobs_mode="processed_logprobs",
            quantization=None,
            trust_remote_code=False,
            dtype="float32",
            skip_tokenizer_init=True,
        )
        self.llm.sleep(level=2)

    def generate(self) -> Completions:
        from vllm import SamplingParams

        self.llm.wake_up(tags=["weights"])
        for name, parameter in self.model.named_parameters():
            self.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights([(name, parameter.data)])
        self.llm.reset_prefix_cache()
        self.llm.wake_up(tags=["kv_cache"])
        params = SamplingParams(
            n=1,
            repetition_penalty=1.0,
            temperature=TEMPERATURE,
            top_p=1.0,
            top_k=TOP_K,
            min_p=0.0,
            max_tokens=NUM_TOKENS,
            logprobs=0,
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = [o.outputs[0] for o in self.llm.generate(prompts, sampling_params=params, use_tqdm=False)]
        self.llm.sleep(level=2)
        return [
            (list(o.token_ids), [row[token].logprob for row, token in zip(o.logprobs, o.token_ids, strict=True)])
            for o in outputs
        ]


class Trl:
    """trl's own class; it gathers the prompts of the TP ranks, of which each brings one."""

    def __init__(self, folder: str, model: Any) -> None:
        from accelerate import Accelerator
        from trl.generation import vllm_generation

        vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32", skip_tokenizer_init=True)
        self.accelerator = Accelerator(cpu=True)
        self.generation = vllm_generation.VLLMGeneration(
            model,
            self.accelerator,
            None,
            tensor_parallel_size=2,
            gpu_memory_utilization=0.3,
            max_model_length=64,
            max_num_seqs=4,
            enable_sleep_mode=True,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            max_completion_length=NUM_TOKENS,
            generation_kwargs={"detokenize": False},
        )
        self.llm = self.generation.llm

    def generate(self) -> Completions:
        import torch.distributed as dist

        self.generation.sync_weights()
        own = PROMPTS[self.accelerator.process_index]
        _, ids, logprobs, _ = self.generation.generate([own], None, 1)
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, (ids[0], [row[0] for row in logprobs[0]]))
        return parts


def rounds(make: Callable[[str, Any], Any], folder: str) -> list[tuple[Completions, list[list[float]]]]:
    """On a rank: three rounds of what the engine drew, and the trainer's log-probabilities of it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    trainer = make(folder, model)
    result = []
    for seed in range(3):
        completions = trainer.generate()
        result.append((completions, [own_logprobs(model, p, c[0]) for p, c in zip(PROMPTS, completions, strict=True)]))
        torch.manual_seed(seed)  # the optimiser's step
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * parameter.std().nan_to_num(0) * torch.randn_like(parameter)
    trainer.llm.llm_engine.scheduler.check_integrity()
    trainer.llm.shutdown()
    return result


def own_logprobs(model: Any, prompt: list[int], token_ids: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    kth = logits.topk(TOP_K, dim=-1).values[:, -1:]
    scores = logits.masked_fill(logits < kth, -torch.inf).log_softmax(-1)
    return scores[torch.arange(len(token_ids)), torch.tensor(token_ids)].tolist()


def check(make: Callable[[str, Any], Any]) -> None:
    first, second = run_ranks(rounds, 2, make, tiny.checkpoint("qwen3-moe"), deadline_s=120)
    assert first == second, "the TP ranks draw the same"
    drawn = [[ids for ids, _ in completions] for completions, _ in first]
    assert drawn[0] != drawn[1] != drawn[2], "the weights do not change anything"
    for completions, own in first:
        for (ids, logprobs), expected in zip(completions, own, strict=True):
            assert 0 < len(ids) <= NUM_TOKENS
            assert logprobs == pytest.approx(expected, abs=2e-4)


@pytest.mark.multiprocess
def test_the_calls_of_trl() -> None:
    check(CallsOfTrl)


@pytest.mark.multiprocess
@pytest.mark.clients
def test_trl() -> None:
    check(Trl)


def grpo(folder: str, tp: int, dtype: str, output: str) -> tuple[list[dict[str, float]], list[float]]:
    """On a rank: three steps of GRPO; what each logged, and the sum of each parameter at the end."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=dtype)
    settings = GRPOConfig(
        output_dir=output,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_tensor_parallel_size=tp,
        vllm_max_model_length=64,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        temperature=TEMPERATURE,
        max_steps=3,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        seed=3,
    )
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": [words(tiny.prompt(3 + i)) for i in range(24)]}),
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    sums = [float(parameter.double().sum()) for parameter in trainer.model.parameters()]
    trainer.vllm_generation.llm.shutdown()
    return logged, sums


def words(ids: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in ids)


@pytest.fixture
def folder_with_words(tmp_path: Path) -> str:
    """Token 7 is the word w7."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = shutil.copytree(tiny.checkpoint("qwen3-moe"), tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(tiny.VOCAB)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w1", eos_token="w2", pad_token="w0", unk_token="w3"
    ).save_pretrained(folder)
    return str(folder)


@pytest.mark.multiprocess
@pytest.mark.clients
@pytest.mark.parametrize(
    ("world_size", "tp", "dtype", "tolerance"),
    [
        (1, 1, "float32", 2e-4),
        (1, 1, "auto", 1.0),  # bf16 beside a trainer in fp32
        (2, 1, "float32", 2e-4),
        (2, 2, "float32", 2e-4),
        (4, 2, "float32", 2e-4),
    ],
)
def test_grpo_trainer(
    folder_with_words: str, tmp_path: Path, world_size: int, tp: int, dtype: str, tolerance: float
) -> None:
    (logged, sums), *others = run_ranks(
        grpo, world_size, folder_with_words, tp, dtype, str(tmp_path / "out"), deadline_s=240
    )
    assert len(logged) == 3
    for row in logged:
        assert 0 <= row["sampling/sampling_logp_difference/max"] < tolerance, row
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=8 * tolerance)
        assert math.isfinite(row["loss"])
    assert any(row["grad_norm"] > 0 for row in logged), "the weights stayed as they were"
    assert all(other == sums for _, other in others)
