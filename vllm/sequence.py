# SPDX-License-Identifier: Apache-2.0
from vllm.logprobs import Logprob, PromptLogprobs, SampleLogprobs

__all__ = ["Logprob", "PromptLogprobs", "SampleLogprobs"]
