# SPDX-License-Identifier: Apache-2.0
"""lm-eval's own ``vllm`` backend, unchanged, gives what its ``hf`` backend gives for the same model and tasks."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fakes import save_char_llama

NUM_DOCS = 16
MAX_NEW_TOKENS = 12
# fp32 over some 30 tokens a document: sums of log-probabilities differ by rounding alone.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights over printable characters, so that whatever it writes is text."""
    folder = tmp_path_factory.mktemp("lm-eval-model")
    save_char_llama(folder, num_positions=128)
    return folder


def greedy_text(folder: Path, prompts: list[str], until: str) -> list[str]:
    """What transformers writes after each prompt, up to ``until``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_NEW_TOKENS, pad_token_id=0
        )
        text = tokenizer.decode(out[0, ids.shape[1] :])
        texts.append(text.split(tokenizer.eos_token)[0].split(until)[0])
    return texts


@pytest.fixture(scope="module")
def tasks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A multiple-choice, a generation and a rolling-likelihood task over one local file of documents.

    Half of the generation targets are what transformers writes, half are wrong, so that the accuracy says something.
    """
    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join("".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 6))) for _ in range(count))

    questions = [words(rng.randint(1, 7)) for _ in range(NUM_DOCS)]
    until = "q"
    written = greedy_text(model, questions, until)
    assert len(set(written)) > NUM_DOCS // 2
    docs = [
        {
            "question": question,
            "choices": [words(1), words(2), words(1)],
            "answer": rng.randrange(3),
            "text": text if i % 2 else text + "!",
        }
        for i, (question, text) in enumerate(zip(questions, written, strict=True))
    ]
    file = tmp_path_factory.mktemp("lm-eval-docs") / "docs.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    return [
        {
            **common,
            "task": "local_choice",
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        {
            **common,
            "task": "local_generate",
            "output_type": "generate_until",
            "doc_to_target": "{{text}}",
            "generation_kwargs": {"until": [until], "max_gen_toks": MAX_NEW_TOKENS, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
        {
            **common,
            "task": "local_rolling",
            "output_type": "loglikelihood_rolling",
            "doc_to_target": "{{question}} {{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    ]


def evaluate(backend: str, model_args: dict[str, Any], tasks: list[dict[str, Any]]) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(
        model=backend,
        model_args=model_args,
        tasks=tasks,
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )


def responses(results: dict[str, Any], task: str) -> list[Any]:
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [response for sample in samples for response in sample["filtered_resps"]]


@pytest.fixture(scope="module")
def both(model: Path, tasks: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(hf, vllm) results."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("HF_DATASETS_OFFLINE", "1")
    hf = evaluate("hf", {"pretrained": str(model), "dtype": "float32", "device": "cpu", "batch_size": 1}, tasks)
    ours = evaluate(
        "vllm",
        {
            "pretrained": str(model),
            "dtype": "float32",
            "batch_size": "auto",
            "max_num_batched_tokens": 48,
            "kv_cache_memory_bytes": 1_000_000,
            "gpu_memory_utilization": 0.5,
            "swap_space": 4,
        },
        tasks,
    )
    patch.undo()
    return hf, ours


def test_accuracy(both):
    hf, ours = both
    for task, metric in (("local_choice", "acc,none"), ("local_choice", "acc_norm,none")):
        assert 0 < hf["results"][task][metric] < 1
        assert ours["results"][task][metric] == hf["results"][task][metric]
    assert hf["results"]["local_generate"]["exact_match,none"] == 0.5
    assert ours["results"]["local_generate"]["exact_match,none"] == 0.5


def test_log_likelihoods_of_each_item(both):
    hf, ours = (responses(results, "local_choice") for results in both)
    assert len(hf) == len(ours) == 3 * NUM_DOCS
    assert [float(r[0]) for r in ours] == pytest.approx([float(r[0]) for r in hf], abs=TOLERANCE)
    assert [r[1] for r in ours] == [r[1] for r in hf], "whether the choice is what the model would write"


def test_generated_texts(both):
    hf, ours = (responses(results, "local_generate") for results in both)
    assert ours == hf


def test_rolling_log_likelihoods(both):
    hf, ours = (responses(results, "local_rolling") for results in both)
    assert [float(r) for r in ours] == pytest.approx([float(r) for r in hf], abs=TOLERANCE)
