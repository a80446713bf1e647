# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the parts that tests of the front end do not need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig
from vllm.v1.metrics.stats import StepCounts
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _tokenizer(vocab: list[str], special: list[str], begin: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(vocab)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    if begin:
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=CHAT_TEMPLATE
    )


def byte_tokenizer() -> Any:
    """One token for each byte (ids 0 to 255 in the order of the byte-level alphabet), and four special tokens."""
    from tokenizers import pre_tokenizers

    return _tokenizer(
        sorted(pre_tokenizers.ByteLevel.alphabet()), ["<s>", "</s>", "<|user|>", "<|assistant|>"], begin=True
    )


def char_tokenizer() -> Any:
    """One token for each printable character below 127 and for the line break, <s> and </s>; <s> begins no text."""
    return _tokenizer([chr(c) for c in range(33, 127)] + ["\u0120", "\u010a"], ["<s>", "</s>"], begin=False)


def save_char_llama(folder: Path, num_positions: int) -> None:
    """A Llama of random weights over printable characters, fp32, so that whatever it writes is text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = char_tokenizer()
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=num_positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_byte_llama(folder: Path, **more: Any) -> None:
    """fp32, the vocabulary of ``byte_tokenizer``, 512 positions; ``more``: of its config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        **more,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


class FakeWorker:
    """Samples last token + 1, below 256. ``before_step(worker, scheduler_output)`` runs first in each step; the other
    DP ranks have work for ``steps_of_other_ranks`` steps."""

    before_step: Callable[[FakeWorker, SchedulerOutput], None] = staticmethod(lambda worker, output: None)
    steps_of_other_ranks = 0

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.any_unfinished_across_dp = False
        self.num_steps = 0
        self.counts = StepCounts()
        self.finished: set[str] = set()

    def init_device(self) -> None: ...

    def check_settings(self, generation_config: Mapping[str, Any]) -> None: ...

    def step(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def cause_of(self, error: BaseException) -> BaseException:
        return error

    def load_model(self) -> None: ...

    def take_stale_caches(self) -> bool:
        return False

    def shutdown(self) -> None: ...

    def wait_for_device(self) -> None: ...

    def determine_available_memory(self) -> int:
        return 2**22

    def get_kv_cache_specs(self) -> dict[str, AttentionSpec]:
        return {"layer": AttentionSpec(num_kv_heads=2, head_size=16, dtype=torch.float32)}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        self.kv_cache_config = kv_cache_config

    def execute_model(self, output: SchedulerOutput, has_unfinished: bool) -> ModelRunnerOutput:
        return self.finish(self.launch(output, has_unfinished))

    def launch(self, output: SchedulerOutput, has_unfinished: bool) -> SimpleNamespace:
        type(self).before_step(self, output)
        self.num_steps += 1
        self.finished |= output.finished_req_ids
        self.any_unfinished_across_dp = has_unfinished or self.num_steps <= self.steps_of_other_ranks
        return SimpleNamespace(inputs=output if output.requests or self.any_unfinished_across_dp else None)

    def finish(self, launched: SimpleNamespace) -> ModelRunnerOutput:
        """By now the step before is taken in, and with it the token that this one went on from."""
        output, result = launched.inputs, ModelRunnerOutput()
        if output is None:
            return result
        for request, start, done in zip(output.requests, output.num_computed_tokens, output.samples, strict=True):
            result.sampled_token_ids.append([(request.all_token_ids[-1] + 1) % 256] if done else [])
            if request.sampling_params.prompt_logprobs is not None and start == 0:
                rows = request.prompt_token_ids[1:]
                result.prompt_logprobs[request.request_id] = LogprobsLists(
                    [[t, 0] for t in rows], [[-0.5, -0.5] for _ in rows], [1 for _ in rows]
                )
        return result
