# SPDX-License-Identifier: Apache-2.0
"""Upstream's engine with two DP ranks and expert parallelism, on CPU, without and with the patches.

Upstream's CPU build lacks two parts for this; ``on_upstream/cpu_parts.py`` supplies them and says which.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import upstream_env

from patches.__main__ import main

pytestmark = [pytest.mark.upstream, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of two layers and eight experts with random weights, in float32."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=127,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


def supplied(view: Path) -> Path:
    """The view with the harness's parts, which upstream finds as a plugin."""
    about = view / "cpu_parts-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-parts\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\ncpu_parts = cpu_parts:supply\n")
    return view


def generate(view: Path, model: Path, dp: int) -> tuple[list[list[int]] | None, str]:
    """Tokens of every prompt, or None, and the log. Nothing of the run is left."""
    # One process a rank: upstream would start an engine core and a worker beside each, with the same code in them.
    _, log = upstream_env.run(view, "engine.py", str(model), str(dp), timeout=700, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    found = [line for line in log.splitlines() if line.startswith("TOKENS ")]
    return (json.loads(found[0][7:]) if found else None), log


def by_transformers(model: Path) -> list[list[int]]:
    import transformers
    from on_upstream.engine import REQUESTS

    twin = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = []
    for prompt, count in REQUESTS:
        ids = torch.tensor([prompt])
        for _ in range(count):
            ids = torch.cat([ids, twin(ids).logits[:, -1:].argmax(-1)], dim=1)
        tokens.append(ids[0, len(prompt) :].tolist())
    return tokens


def test_dp2_ep(model: Path, tmp_path: Path):
    if reason := upstream_env.missing():
        pytest.skip(reason)
    plain = upstream_env.make_view(tmp_path / "plain")
    alone, log = generate(plain, model, dp=1)
    assert alone is not None, log[-3000:]
    assert alone == by_transformers(model)

    tokens, log = generate(supplied(plain), model, dp=2)
    assert tokens is None
    assert "ProcessGroupGloo::allgather: invalid" in log

    patched = upstream_env.make_view(tmp_path / "patched")
    assert main(["apply", str(patched)]) == 0
    tokens, log = generate(supplied(patched), model, dp=2)
    assert tokens == alone, log[-3000:]
