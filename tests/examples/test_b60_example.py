# SPDX-License-Identifier: Apache-2.0
"""The demo: SmolLM2 alone, and as a mixture of experts over four ranks, give the dense model's text token for token."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
import tiny_models as tiny
from demo_run import EXAMPLES, MAX_TOKENS, SCRIPT, run_example

# The compiler, tensors over device meshes, other libraries' models: a second or more of each rank's start.
NEEDLESS = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "sympy",
    "triton",
    "gguf",
    "scipy",
    "pandas",
    "accelerate",
    "transformers.activations",
    "transformers.modeling_utils",
)
RANK = """
import sys
sys.path.insert(0, sys.argv[1])
import xpu_arc_b60_dp_ep
folder = str(xpu_arc_b60_dp_ep.ensure_checkpoint("moe"))
llm = xpu_arc_b60_dp_ep.LLM(sys.argv[2], tokenizer=folder, max_model_len=64, num_gpu_blocks_override=9)
xpu_arc_b60_dp_ep.generate(llm, [{"prompt_token_ids": [5, 6, 7]}], xpu_arc_b60_dp_ep.SamplingParams(max_tokens=2))
print("needless", [name for name in sys.argv[3:] if name in sys.modules])
"""


def test_dense_model_alone(dense_folder: str, dense_texts: dict[str, tuple[tuple[int, ...], str]]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        dense_folder, dtype="float32", max_model_len=256, max_num_batched_tokens=256, kv_cache_memory_bytes=1 << 28
    )
    outputs = llm.generate(list(dense_texts), SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    llm.shutdown()
    for output in outputs:
        assert (tuple(output.outputs[0].token_ids), output.outputs[0].text) == dense_texts[output.prompt]


@pytest.mark.multiprocess
def test_b60_example_on_four_ranks(dense_texts: dict[str, tuple[tuple[int, ...], str]]) -> None:
    """TP 2 x DP 2, experts over all four: each prompt once, in order, with the dense model's text."""
    options = ["--dtype", "float32", "--max-tokens", str(MAX_TOKENS), "--max-num-batched-tokens", "256"]
    done = run_example(*options, "--max-model-len", "256", "--kv-cache-memory-bytes", str(1 << 26), ranks=4)
    assert done.returncode == 0, done.stderr[-4000:]
    (begun,) = re.findall(r"\[ARC B60\] DP rank 0 begins: (.*)", done.stdout)
    found = re.findall(r"\[ARC B60\] DP rank (\d), Prompt: (.*)\n\s+Generated: (.*)", done.stdout)
    expected = [(str(i // 4), repr(prompt), repr(text)) for i, (prompt, (_, text)) in enumerate(dense_texts.items())]
    assert found == expected
    firsts = ast.literal_eval(begun)
    assert [
        text[: len(first)] for first, (_, text) in zip(firsts, list(dense_texts.values())[:4], strict=True)
    ] == firsts
    assert done.stdout.index(begun) < done.stdout.index("Generated")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size 2 does not divide the 1 ranks"),
        (["--max-token", "three"], "three"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_and_mistyped_options_are_refused(
    options: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import xpu_arc_b60_dp_ep

    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    with pytest.raises(SystemExit, match="2"):
        xpu_arc_b60_dp_ep.main()
    assert told in capsys.readouterr().err


def test_a_rank_imports_nothing_that_it_has_no_use_for(dense_folder: str) -> None:
    """From the script's first line to generated text. (Llama's config, in transformers, would load half of these.)"""
    from smollm2 import ensure_checkpoint

    ensure_checkpoint("moe")
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(EXAMPLES), tiny.checkpoint("mixtral"), *NEEDLESS],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "needless []" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
