# SPDX-License-Identifier: Apache-2.0
"""The ``vllm`` command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli import benchmark, collect_env
from vllm.entrypoints.cli.main import COMMANDS, main
from vllm.v1.engine.llm_engine import EngineStats

SMALL = ["--dtype", "float32", "--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", "1000000"]


def test_version_without_loading_torch():
    code = "import sys; from vllm.entrypoints.cli.main import main; main(['--version']); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == [vllm.__version__, "False"]


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give a command"),
        (["colect-env"], "'colect-env'; the nearest is 'collect-env'"),
        (["bench", "latencyy"], "'bench latencyy'; the nearest is 'bench latency'"),
        (["collect-env", "--jsn"], "'--jsn'; the nearest is '--json'"),
        (["bench", "throughput", "--model", "x", "--inputlen", "3"], "'--inputlen'; the nearest is '--input-len'"),
        (["bench", "latency", "--model", "x", "--max-modellen=3"], "'--max-modellen=3'; the nearest is '--max-model"),
        (["bench", "latency", "--model", "x", "--batch-size", "0"], "0 is not 1 or more"),
        (["bench", "latency"], "model is required, none given"),
        (["bench", "latency", "--model", "./no/such"], "no such file or folder"),
        (["bench", "latency", "--model", "./no/such", "--quantization", "fp8"], "no such file or folder"),
    ],
)
def test_mistakes_end_with_code_2(argv, message, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_commands_of_other_packages_get_their_arguments(monkeypatch: pytest.MonkeyPatch):
    for name, module in (("patches", "patches.__main__"), ("doctor", "vllm.v1.debug.doctor")):
        seen = []
        stub = types.ModuleType(module)
        stub.main = lambda argv, seen=seen: seen.append(argv) or 7  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module, stub)
        assert main([name, "a", "--b"]) == 7
        assert seen == [["a", "--b"]]


def test_collect_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CCL_ATL_TRANSPORT", "ofi")
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.setenv("UNRELATED", "x")
    assert main(["collect-env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["software"]["vllm"] == vllm.__version__
    assert re.match(r"\d+\.\d+", found["software"]["torch"])
    assert found["processor"]["cores usable"] >= 1
    assert "gloo" in found["communication"]["torch backends"]
    assert found["variables"]["CCL_ATL_TRANSPORT"] == "ofi"
    assert found["variables"]["VLLM_API_KEY"] == "(hidden)"
    assert "UNRELATED" not in found["variables"]
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    assert "hush" not in text
    assert re.search(r"CCL_ATL_TRANSPORT +ofi", text)
    assert set(collect_env.collect()) == set(found)


def test_options_cover_the_engine_arguments():
    parser = benchmark._parser("throughput", "")
    EngineArgs.from_cli_args(parser.parse_args(["--model", "m"]))
    argv = ["--model", "m", "--max-model-len", "9", "--no-enable-prefix-caching", "--enforce-eager"]
    argv += ["--gpu-memory-utilization", "0.5", "--dtype", "float16"]
    argv += ["--hf-overrides", '{"vocab_size": 3}', "--compilation-config", "0"]
    args = EngineArgs.from_cli_args(parser.parse_args(argv))
    assert (args.model, args.max_model_len, args.enable_prefix_caching, args.enforce_eager) == ("m", 9, False, True)
    assert (args.gpu_memory_utilization, args.dtype, args.hf_overrides) == (0.5, "float16", {"vocab_size": 3})
    assert args.compilation_config == 0
    assert args.block_size is None


def cost_of_tiny_llama(folder: Path) -> tuple[int, int]:
    """(weights outside embedding and head, weights of the head), counted by transformers."""
    from transformers import AutoModelForCausalLM

    sizes = {name: p.numel() for name, p in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}
    head = sizes.pop("lm_head.weight")
    del sizes["model.embed_tokens.weight"]
    return sum(sizes.values()), head


def test_bench_throughput(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "result.json"
    argv = ["bench", "throughput", "--model", str(tiny_llama), "--num-prompts", "3", "--input-len", "5"]
    assert main([*argv, "--output-len", "4", "--json", str(file), *SMALL]) == 0
    table = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert re.search(r"output_tokens_per_s +\d", table)
    assert (result["num_prompts"], result["steps"], result["tokens_per_step"]) == (3, 4, (15 + 9) / 4)
    assert result["output_tokens_per_s"] == pytest.approx(12 / result["elapsed_s"])
    assert result["total_tokens_per_s"] == pytest.approx(27 / result["elapsed_s"])
    body, head = cost_of_tiny_llama(tiny_llama)
    flop = 2 * (body * 24 + head * 12)
    assert result["teraflop_per_s"] == pytest.approx(flop / result["elapsed_s"] / 1e12)
    # Keys and values: 2 layers x 2 x 2 heads x 16 x 4 bytes for each of 3 x (5 + 6 + 7 + 8) tokens of context.
    read = 4 * (body + head) * 4 + 512 * 3 * 26
    assert result["gigabytes_per_s"] == pytest.approx(read / result["elapsed_s"] / 1e9)


def test_bench_latency(tiny_llama: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["bench", "latency", "--model", str(tiny_llama), "--batch-size", "2", "--input-len", "20"]
    assert main([*argv, "--num-iters", "3", "--num-iters-warmup", "1", "--output-len", "2", "--json", "-", *SMALL]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["batch_size"], result["num_iters"]) == (2, 3)
    assert 0 < result["latency_p10_s"] <= result["latency_p50_s"] <= result["latency_p99_s"]
    assert result["output_tokens_per_s"] == pytest.approx(4 / result["latency_mean_s"])
    body, head = cost_of_tiny_llama(tiny_llama)
    # Each run prefills anew: 2 x 20 tokens, then 2.
    assert result["teraflop_per_s"] == pytest.approx(2 * (42 * body + 4 * head) / result["latency_mean_s"] / 1e12)


def test_cost_of_experts():
    cost = benchmark.ModelCost(body=100, head=10, experts=800, num_experts=8, top_k=2, itemsize=2, kv_bytes_per_token=3)
    stats = EngineStats(steps=2, tokens=6, context_tokens=50, output_tokens=2)
    assert cost.flop(stats) == 2 * (6 * (100 + 200) + 2 * 10)
    touched = 1 - (3 / 4) ** 3
    assert cost.bytes_read(stats) == pytest.approx(2 * 2 * (110 + 800 * touched) + 150)
    assert cost.bytes_read(EngineStats()) == 0
