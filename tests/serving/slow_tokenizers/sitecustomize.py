# SPDX-License-Identifier: Apache-2.0
"""In a rank's process the tokenizer takes seconds: for tests that put this folder on PYTHONPATH."""

import sys
import time

if "vllm.v1.engine.rank_process" in sys.orig_argv:
    import vllm.tokenizers

    load = vllm.tokenizers.tokenizer_of

    def tokenizer_of(config: object) -> object:
        time.sleep(3)
        return load(config)

    vllm.tokenizers.tokenizer_of = tokenizer_of
