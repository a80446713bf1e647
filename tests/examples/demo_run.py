# SPDX-License-Identifier: Apache-2.0
"""Runs the B60 example as its users do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples" / "offline_inference"
MAX_TOKENS = 16
SCRIPT = EXAMPLES / "xpu_arc_b60_dp_ep.py"


def torchrun(ranks: int) -> list[str]:
    return [str(Path(sys.executable).with_name("torchrun")), "--standalone", f"--nproc-per-node={ranks}"]


def run_example(*options: str, ranks: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*torchrun(ranks), str(SCRIPT), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def greedy_texts(folder: str, num_tokens: int, **config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each of the demo's prompts, and transformers' greedy tokens after it in fp32; ``config`` changes the model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from xpu_arc_b60_dp_ep import PROMPTS

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **config).eval()
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        yield prompt, tuple(out[0, ids.shape[1] :].tolist())
