# SPDX-License-Identifier: Apache-2.0
"""``vllm doctor --fit``: what it says that a rank holds is what an engine holds, and what the figures add up to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import tiny_hybrids
import tiny_models
from transformers import Qwen3_5MoeConfig

from vllm import LLM
from vllm.distributed import get_ep_group
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.fit import Share, share_of
from vllm.entrypoints.cli.main import main
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.weight_update import held_tensors

GiB = 2**30


def held(llm: LLM) -> tuple[int, int]:
    """Bytes of the engine's weights, and those that its largest step takes without what CPU kernels and plain torch's
    attention keep for themselves, which outweighs all that so small a model makes."""
    runner: Any = llm.llm_engine.worker.runner  # type: ignore[attr-defined]
    layers = [layer for layer in runner.model.modules() if isinstance(layer, Attention)]
    own = 64 << 20
    own += max(layer.impl.workspace_bytes(runner.max_num_tokens, 512, layer.dtype) for layer in layers)
    return sum(tensor.nbytes for tensor in held_tensors(runner.model)), runner.profile_run() - own


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe-mixed", "qwen3-next", "qwen3.5-moe"])
def test_one_rank_is_what_an_engine_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KERNELS", "reference")  # packed for no kernel, as on a device
    folder = tiny_hybrids.checkpoint(name) if name in tiny_hybrids.CHECKPOINTS else tiny_models.checkpoint(name)
    given: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 256, "max_num_seqs": 8}
    llm = LLM(folder, kv_cache_memory_bytes=1 << 24, skip_tokenizer_init=True, **given)
    weights, step = held(llm)
    del llm
    share = share_of(EngineArgs(model=folder, **given).create_engine_config(), 0)
    assert share.weights == weights
    assert step / 2 < share.step < step * 2


@pytest.mark.parametrize("name", ["q4_k_m:mixtral", "q4_0:llama", "odd:mixtral"])
def test_a_gguf_file_is_what_an_engine_holds(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_KERNELS", "reference")
    file = tiny_gguf.checkpoint(name)
    llm = LLM(file, dtype="bfloat16", kv_cache_memory_bytes=1 << 24, skip_tokenizer_init=True, max_model_len=256)
    weights = sum(t.nbytes for t in held_tensors(llm.llm_engine.worker.runner.model))  # type: ignore[attr-defined]
    llm.shutdown()
    assert share_of(EngineArgs(model=file, dtype="bfloat16").create_engine_config(), 0).weights == weights
    main(["doctor", "--fit", file, "--device-memory", "0.001"])
    assert "--quantization" not in capsys.readouterr().out, "a remedy that a GGUF file refuses"


def config_of_the_b60_case(folder: Path) -> Path:
    config = Qwen3_5MoeConfig()  # transformers' defaults are the figures of Qwen3.5-35B-A3B
    config.architectures, config.dtype = ["Qwen3_5MoeForConditionalGeneration"], "bfloat16"
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    return folder


def test_the_b60_case_by_hand(tmp_path: Path) -> None:
    args = EngineArgs(model=str(config_of_the_b60_case(tmp_path)), tensor_parallel_size=2, enable_expert_parallel=True)
    config = args.create_engine_config()
    object.__setattr__(config.parallel_config, "data_parallel_size", 2)
    shares = [share_of(config, rank) for rank in range(4)]
    experts = 2 * 40 * 256 * 3 * 2048 * 512 // 4
    vocabulary = 2 * 2 * 248320 * 2048 // 2
    full = 10 * (2048 * (2 * 16 + 2 * 2) * 256 + 16 * 256 * 2048)  # q with its gate, k, v; o
    linear = 30 * (2048 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) + 32 * 128 * 2048)
    shared = 40 * 3 * 2048 * 512
    routers = 40 * 2 * 2048 * (256 + 1)  # on every rank
    norms_and_the_like = 40 << 20
    for rank, share in enumerate(shares):
        assert share.experts == list(range(64 * rank, 64 * rank + 64))
        assert share.expert_weights == experts
        matrices = experts + vocabulary + (full + linear + shared) * 2 // 2 + routers
        assert 0 <= share.weights - matrices < norms_and_the_like
        assert share.block == share.block_size * 10 * 2 * 256 * 2  # ten layers, one of two KV heads, bfloat16
        state = 30 * (16 * 128 * 128 * 4 + 3 * (2 * 8 * 128 + 16 * 128) * 2)
        assert share.state == state * (config.scheduler_config.max_num_seqs + 1)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        pytest.param("fp8", 8, marks=pytest.mark.slow),
        pytest.param("int8", 8, marks=pytest.mark.slow),
        ("int4", 4 + 32 / 128),
    ],
)
def test_quantised_weights_by_hand(
    quantization: str, bits: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of_the_b60_case(tmp_path)
    layout = ("--tp", "2", "--dp", "2", "--ep", "--device-memory", "24", "--max-num-seqs", "32")
    code, text = said(capsys, "--fit", str(tmp_path), *layout, "--quantization", quantization)
    assert code == 0, text
    weights = float(text.splitlines()[3].split()[2])
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"| {weights:.2f} |" in readme, "the README has the table of what fits four cards"
    experts = 40 * 64 * 3 * 2048 * 512 * bits / 8 / GiB
    others = 17.30 - 40 * 64 * 3 * 2048 * 512 * 2 / GiB  # at 16 bits, and at the fewest
    assert experts + others / 4 < weights < experts + others + 0.1


def test_uneven_experts_and_ranks_without_any(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    text = json.loads(Path(tiny_models.checkpoint("qwen3-moe"), "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**text, "num_experts": 3, "num_local_experts": 3}))
    config = EngineArgs(model=str(folder), tensor_parallel_size=4, enable_expert_parallel=True).create_engine_config()
    object.__setattr__(config.model_config.hf_config, "num_key_value_heads", 4)
    shares = [share_of(config, rank) for rank in range(4)]
    assert [share.experts for share in shares] == [[0], [1], [2], []]
    assert shares[3].expert_weights == 0 < shares[2].expert_weights


def test_the_longest_context_counts_blocks() -> None:
    share = Share(
        weights=1000, expert_weights=0, experts=None, block=100, state=50, step=200, block_size=16, max_model_len=64
    )
    assert share.longest_context(share.least - 1) == 0
    assert share.longest_context(share.least) == 16  # one block, and the null block
    assert share.longest_context(share.least + 99) == 16
    assert share.longest_context(share.least + 100) == 32
    assert share.longest_context(10**6) == 64


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["doctor", *words])
    out = capsys.readouterr()
    return code, out.out or out.err


def test_the_command_says_what_fits_and_what_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_of_the_b60_case(tmp_path)
    layout = ("--tp", "2", "--dp", "2", "--ep")
    code, text = said(capsys, "--fit", str(tmp_path / "config.json"), *layout, "--device-memory", "24")
    assert code == 1
    assert "128-191" in text
    assert "does not fit" in text
    assert "--max-num-seqs 32" in text
    code, text = said(capsys, "--fit", str(tmp_path), *layout, "--device-memory", "24", "--max-num-seqs", "32")
    assert code == 0
    assert "It fits" in text
    code, text = said(capsys, "--fit", str(tmp_path), "--tp", "2", "--dp", "2", "--device-memory", "24")
    assert code == 1
    assert "--ep spreads the experts over all 4 ranks" in text
    code, text = said(capsys, "--fit", tiny_models.checkpoint("mixtral"), *layout, "--device-memory", "24")
    assert code == 0
    assert "a request of all 512 tokens" in text


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--tp", "0"), "tp=0"),
        (("--device-memory", "-1"), "device-memory=-1"),
        (("--gpu-memory-utilization", "1.5"), "gpu-memory-utilization=1.5"),
        (("--tp", "3"), "cannot be divided over tensor_parallel_size=3"),
        (("--max-model-len", "9999999"), "exceeds the 512 positions"),
    ],
)
def test_bad_input_is_named(words: tuple[str, ...], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "--fit", tiny_models.checkpoint("mixtral"), "--device-memory", "24", *words)
    assert (code, names in text) == (2, True), text


def test_no_model_and_no_engine_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "--fit", str(tmp_path / "none"), "--device-memory", "24")
    assert (code, "no such file or folder" in text) == (2, True), text
    llm = LLM(tiny_models.checkpoint("llama"), kv_cache_memory_bytes=1 << 24, skip_tokenizer_init=True)
    code, text = said(capsys, "--fit", tiny_models.checkpoint("llama"), "--device-memory", "24")
    assert (code, "runs an engine" in text) == (2, True), text
    assert get_ep_group().world_size == 1
    del llm
