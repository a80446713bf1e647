# SPDX-License-Identifier: Apache-2.0
from vllm.inputs import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
