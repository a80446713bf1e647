# SPDX-License-Identifier: Apache-2.0
"""Which arguments there are, what becomes of them, and what is said of those that there are not."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import vllm
from vllm import SamplingParams
from vllm.config import CompilationConfig, CUDAGraphMode, SchedulerConfig
from vllm.engine import arg_utils
from vllm.engine.arg_utils import UNSUPPORTED, EngineArgs
from vllm.entrypoints.llm import LLM
from vllm.transformers_utils import config as hf

ROOT = Path(__file__).parents[2]

# Names of upstream's LLM.__init__, release 0.33, in its order, as far as this engine has them.
UPSTREAM_LLM_ORDER = (
    "model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code tensor_parallel_size dtype quantization "
    "revision tokenizer_revision chat_template seed gpu_memory_utilization enforce_eager hf_overrides "
    "kv_cache_memory_bytes compilation_config"
)


def test_import_is_light():
    code = "import sys, vllm; print([m for m in ('torch', 'transformers') if m in sys.modules], vllm.__version__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert out.split() == ["[]", vllm.__version__]


def test_public_names():
    for name in vllm.__all__:
        assert getattr(vllm, name) is not None
    with pytest.raises(AttributeError, match="LLMM"):
        _ = vllm.LLMM


def test_version_is_the_distributions():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{vllm.__version__}"' in text


def test_llm_signature_follows_upstream_and_engine_args():
    parameters = inspect.signature(LLM.__init__).parameters
    names = [name for name in parameters if name not in ("self", "kwargs")]
    assert names[: len(UPSTREAM_LLM_ORDER.split())] == UPSTREAM_LLM_ORDER.split()
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in names[1:])
    defaults = {f.name: f.default for f in dataclasses.fields(EngineArgs)}
    for name in names[1:]:
        if name not in ("chat_template", "disable_log_stats"):
            assert parameters[name].default == defaults[name], name
    assert parameters["disable_log_stats"].default is True


@pytest.mark.parametrize(
    ("name", "near"), [("max_modle_len", "max_model_len"), ("kv_cache_memory", "kv_cache_memory_bytes")]
)
def test_unknown_argument_names_the_nearest(name, near):
    for make in (EngineArgs, LLM):
        with pytest.raises(TypeError, match=f"{name!r}.*nearest is {near!r}"):
            make("nowhere", **{name: 1})


@pytest.mark.parametrize(
    ("name", "harmless", "asks"),
    [
        ("pipeline_parallel_size", 1, 2),
        ("enable_lora", False, True),
        ("max_lora_rank", 16, 32),
        ("speculative_config", None, {"method": "ngram"}),
        ("swap_space", 4, 8),
        ("cpu_offload_gb", 0, 1.5),
        ("limit_mm_per_prompt", {}, {"image": 1}),
        ("runner", "generate", "pooling"),
        ("enable_dbo", False, True),
        ("nnodes", 1, True),
    ],
)
def test_upstream_argument_that_is_not_supported(name, harmless, asks):
    EngineArgs("nowhere", **{name: harmless})
    with pytest.raises(NotImplementedError, match=name):
        EngineArgs("nowhere", **{name: asks})


def test_table_has_each_name_once():
    supported = [f.name for f in dataclasses.fields(EngineArgs)]
    assert not set(supported) & set(UNSUPPORTED)


def test_defaults_resolve(tiny_llama: Path):
    config = EngineArgs(str(tiny_llama)).create_engine_config()
    model = config.model_config
    assert (model.architecture, model.max_model_len, model.vocab_size) == ("LlamaForCausalLM", 512, 260)
    assert model.dtype == torch.bfloat16, "a float32 checkpoint runs in bfloat16 unless float32 is asked for"
    assert config.cache_config.block_size == 16
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config == SchedulerConfig()
    assert config.compilation_config.cudagraph_mode is None, "the platform chooses"


@pytest.mark.parametrize(
    ("given", "stored", "resolved"),
    [
        ("auto", torch.float16, torch.float16),
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", torch.float32, torch.bfloat16),
        ("auto", None, torch.bfloat16),
        ("auto", "float16", torch.float16),
        ("float", torch.bfloat16, torch.float32),
        ("half", torch.float32, torch.float16),
        (torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_dtype(given, stored, resolved):
    from transformers import LlamaConfig

    config = LlamaConfig()
    config.dtype = stored
    assert hf.resolve_dtype(given, config) == resolved


@pytest.mark.parametrize("given", ["int8", torch.int8, 16])
def test_dtype_unknown(given):
    from transformers import LlamaConfig

    with pytest.raises(ValueError, match=r"dtype=.*(int8|16).*bfloat16"):
        hf.resolve_dtype(given, LlamaConfig())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (2048, 128)),
        ({"max_num_seqs": 4096}, (4096, 4096)),
        ({"max_num_batched_tokens": 7}, (7, 7)),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 8}, (64, 8)),
        ({"enable_chunked_prefill": False}, (2048, 128)),
    ],
)
def test_scheduler_limits(tiny_llama: Path, given, expected):
    config = EngineArgs(str(tiny_llama), **given).create_engine_config().scheduler_config
    assert (config.max_num_batched_tokens, config.max_num_seqs) == expected


def test_whole_prefill_raises_the_budget(tiny_llama: Path):
    args = EngineArgs(str(tiny_llama), enable_chunked_prefill=False, hf_overrides={"max_position_embeddings": 5000})
    assert args.create_engine_config().scheduler_config.max_num_batched_tokens == 5000
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=64 is below max_model_len=512"):
        EngineArgs(str(tiny_llama), enable_chunked_prefill=False, max_num_batched_tokens=64).create_engine_config()


def test_max_model_len(tiny_llama: Path):
    assert EngineArgs(str(tiny_llama), max_model_len=100).create_engine_config().model_config.max_model_len == 100
    with pytest.raises(ValueError, match=r"max_model_len=513 exceeds the 512 positions.*hf_overrides"):
        EngineArgs(str(tiny_llama), max_model_len=513).create_engine_config()
    with pytest.raises(ValueError, match="max_model_len=0"):
        EngineArgs(str(tiny_llama), max_model_len=0).create_engine_config()
    further = EngineArgs(str(tiny_llama), max_model_len=513, hf_overrides={"max_position_embeddings": 513})
    assert further.create_engine_config().model_config.max_model_len == 513


def test_hf_overrides_by_function(tiny_llama: Path):
    def halve(config):
        config.num_hidden_layers = 1
        return config

    config = EngineArgs(str(tiny_llama), hf_overrides=halve).create_engine_config()
    assert config.model_config.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"compilation_config": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2]}},
            (CUDAGraphMode.FULL, (1, 2)),
        ),
        ({"compilation_config": {"cudagraph_mode": "full"}, "enforce_eager": True}, (CUDAGraphMode.NONE, ())),
        ({"compilation_config": CompilationConfig(CUDAGraphMode.FULL, (4,))}, (CUDAGraphMode.FULL, (4,))),
        ({"compilation_config": 0, "cudagraph_capture_sizes": [8]}, (None, (8,))),
    ],
)
def test_compilation_config(tiny_llama: Path, given, expected):
    config = EngineArgs(str(tiny_llama), **given).create_engine_config().compilation_config
    assert (config.cudagraph_mode, config.cudagraph_capture_sizes) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"compilation_config": 3},
        {"compilation_config": {"backend": "inductor"}},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"distributed_executor_backend": "mp"},
    ],
)
def test_supported_argument_with_an_unsupported_value(tiny_llama: Path, given):
    with pytest.raises(NotImplementedError):
        EngineArgs(str(tiny_llama), **given).create_engine_config()


SIZES_HINT = r"give distinct ascending numbers of rows from 1 up, such as \[1, 2, 4\]"
LIST_HINT = r"give a list of whole numbers of rows, such as \[1, 2, 4\]"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([0, 1], rf"\[0, 1\]: {SIZES_HINT}"),
        ([-4, 8], rf"\[-4, 8\]: {SIZES_HINT}"),
        ([2, 1], SIZES_HINT),
        ([1, 1], SIZES_HINT),
        ([1.5], rf"\[1\.5\]: {LIST_HINT}"),
        (["8"], LIST_HINT),
        ([True], LIST_HINT),
        (8, rf"=8: {LIST_HINT}"),
        ("1,2", LIST_HINT),
        ([8, 80, 900], r"\[900\]: no step has more rows than max_num_batched_tokens=64; leave them out"),
        ([8, 64, 65, 900], r"\[65, 900\]: no step has more rows than max_num_batched_tokens=64; leave them out"),
    ],
    ids=str,
)
@pytest.mark.parametrize("inside", [True, False], ids=["in compilation_config", "alone"])
def test_capture_sizes_that_cannot_be(tiny_llama: Path, sizes, message: str, inside: bool):
    given = {"cudagraph_capture_sizes": sizes}
    given = {"compilation_config": given} if inside else given
    with pytest.raises(ValueError, match=f"cudagraph_capture_sizes.*{message}"):
        EngineArgs(str(tiny_llama), max_num_batched_tokens=64, max_num_seqs=8, **given).create_engine_config()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cudagraph_mode": "bogus"}, r"cudagraph_mode='bogus' is unknown; known: NONE, PIECEWISE, FULL, FULL_DECODE"),
        ({"cudagraph_mode": "FULL_DECODES"}, r"'FULL_DECODES' is unknown.*FULL_DECODE_ONLY"),
        ({"cudagraph_mode": 1}, "cudagraph_mode=1 is unknown"),
        (
            {"cudagraph_sizes": [1]},
            r"has 'cudagraph_sizes', which is unknown.*known: cudagraph_mode, cudagraph_capture",
        ),
        (
            {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 9]},
            r"\[9\]: no step has more rows than max_num_seqs=8; leave them out, or raise max_num_seqs",
        ),
    ],
    ids=str,
)
def test_compilation_config_that_cannot_be(tiny_llama: Path, given, message: str):
    with pytest.raises(ValueError, match=message):
        EngineArgs(str(tiny_llama), max_num_seqs=8, compilation_config=given).create_engine_config()


def test_capture_sizes_given_twice(tiny_llama: Path):
    given = {"cudagraph_capture_sizes": [1, 2]}
    args = EngineArgs(str(tiny_llama), compilation_config=given, **given)
    assert args.create_engine_config().compilation_config.cudagraph_capture_sizes == (1, 2)
    args = EngineArgs(str(tiny_llama), compilation_config=given, cudagraph_capture_sizes=[4])
    with pytest.raises(
        ValueError, match=r"cudagraph_capture_sizes=\[4\], but \[1, 2\] in compilation_config: give one"
    ):
        args.create_engine_config()


@pytest.mark.parametrize("words", [("[1, 2, 4]",), ("1", "2", "4")], ids=" ".join)
def test_capture_sizes_on_the_command_line(tiny_llama: Path, words: tuple[str, ...]):
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = parser.parse_args([str(tiny_llama), "--cudagraph-capture-sizes", *words])
    config = EngineArgs.from_cli_args(args).create_engine_config().compilation_config
    assert config.cudagraph_capture_sizes == (1, 2, 4)


@pytest.mark.parametrize("words", [("0",), ("-1", "2"), ("1.5",), ("many",), ("4", "4"), ('["a"]',)], ids=" ".join)
def test_capture_sizes_on_the_command_line_that_cannot_be(
    tiny_llama: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    """A usage error, which names option and value."""
    from vllm.entrypoints.cli.main import main

    argv = ["serve", str(tiny_llama), "--skip-tokenizer-init", f"--cudagraph-capture-sizes={words[0]}"]
    if len(words) > 1:
        argv[-1:] = ["--cudagraph-capture-sizes", *words]
    try:
        code = main(argv)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    told = capsys.readouterr().err
    assert "cudagraph" in told
    assert words[0].strip('[]"') in told


def test_multimodal_checkpoint_gives_its_text_model(tmp_path: Path):
    text = {"model_type": "qwen3_5_moe_text", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    config = {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "dtype": "float16",
        "text_config": {**text, "max_position_embeddings": 77},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = EngineArgs(str(tmp_path)).create_model_config()
    assert model.architecture == "Qwen3_5MoeForConditionalGeneration"
    assert (model.vocab_size, model.max_model_len) == (99, 77)
    assert model.dtype == torch.float16


def test_quantised_checkpoint(tiny_llama: Path, tmp_path: Path):
    config = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "awq"}}))
    assert EngineArgs(str(tmp_path)).create_engine_config().model_config.quantization == "awq"
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(ValueError, match=r"'hqq' is not supported"):
        EngineArgs(str(tmp_path)).create_engine_config()


@pytest.mark.parametrize(
    ("stored", "source", "overrides", "expected"),
    [
        (None, "auto", {}, {"eos_token_id": 257}),
        ({"temperature": 0.6, "top_k": 20, "eos_token_id": [257, 3]}, "auto", {}, {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.6, "eos_token_id": [257, 3]}, "vllm", {}, {"eos_token_id": [257, 3]}),
        ({"temperature": 0.6}, "auto", {"temperature": 0.1, "top_p": 0.5}, {"temperature": 0.1, "top_p": 0.5}),
    ],
)
def test_generation_config(tiny_llama: Path, tmp_path: Path, stored, source, overrides, expected):
    shutil.copy(tiny_llama / "config.json", tmp_path)
    if stored is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    args = EngineArgs(str(tmp_path), generation_config=source, override_generation_config=overrides)
    found = args.get_generation_config(args.create_model_config())
    assert {name: found.get(name) for name in expected} == expected
    assert "temperature" not in found or source == "auto"


def test_sampling_defaults_take_upstreams_names():
    found = hf.sampling_defaults({"max_new_tokens": 9, "temperature": None, "top_p": 0.9, "do_sample": True})
    assert found == {"max_tokens": 9, "top_p": 0.9}


def test_every_argument_of_upstreams_release_is_known():
    """``upstream_engine_args.txt``: the fields of ``EngineArgs`` in upstream's release 0.33, in order."""
    names = Path(__file__).with_name("upstream_engine_args.txt").read_text().split()
    supported = [f.name for f in dataclasses.fields(EngineArgs)]
    assert sorted(set(names) - {*supported, *UNSUPPORTED}) == []
    assert [name for name in names if name in supported] == supported


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (7, 7),
        ("7", 7),
        (" 32k ", 32_000),
        ("25.6k", 25_600),
        ("1K", 1024),
        ("1.5K", 1536),
        ("2m", 2_000_000),
        ("2M", 2 << 20),
        ("1g", 10**9),
        ("3G", 3 << 30),
        (numpy.int64(9), 9),
        (None, None),
    ],
)
def test_counts_as_text(given, count):
    names = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_cache_memory_bytes")
    args = EngineArgs("nowhere", **dict.fromkeys(names, given))
    assert [getattr(args, name) for name in names] == [count] * 4
    assert EngineArgs(**vars(args)) == args


@pytest.mark.parametrize("given", ["", "k", "1.5", "1.0001k", "0x10", "12 tokens", "1e3", 32.0, True, [5], "32kk"])
@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs"])
def test_no_count(name, given):
    with pytest.raises(ValueError, match=rf"{name}=.* is no count: .*'32k'"):
        EngineArgs("nowhere", **{name: given})


def test_counts_on_the_command_line(tiny_llama: Path):
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    argv = ["--model", str(tiny_llama), "--max-num-batched-tokens", "4k", "--max-model-len"]
    for text, count in (("0.5K", 512), ("auto", -1), ("-1", -1), ("9", 9)):
        args = EngineArgs.from_cli_args(parser.parse_args([*argv, text]))
        assert (args.max_model_len, args.max_num_batched_tokens) == (count, 4000)


def test_auto_is_what_the_model_allows(tiny_llama: Path):
    for given in ("auto", "AUTO", -1):
        assert EngineArgs(str(tiny_llama), max_model_len=given).create_engine_config().model_config.max_model_len == 512
    with pytest.raises(ValueError, match=r"max_num_seqs='auto' is no count"):
        EngineArgs(str(tiny_llama), max_num_seqs="auto")


def test_auto_gives_way_to_the_cache(tiny_llama: Path):
    """Where the cache holds less than the model allows, requests may be as long as the cache."""
    llm = LLM(str(tiny_llama), dtype="float32", max_model_len="auto", num_gpu_blocks_override=6, max_num_seqs=2)
    assert llm.model_config.max_model_len == 80
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [5] * 70}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 10
    with pytest.raises(ValueError, match="max_model_len=80"):
        llm.generate([{"prompt_token_ids": [5] * 80}], params, use_tqdm=False)
    llm.shutdown()
    with pytest.raises(ValueError, match="one request of max_model_len=512 tokens needs"):
        LLM(str(tiny_llama), dtype="float32", max_model_len=512, num_gpu_blocks_override=6, max_num_seqs=2)


@pytest.mark.parametrize(
    ("given", "resolved"),
    [("fp16", "float16"), ("bf16", "bfloat16"), ("FP32", "float32"), ("torch.bfloat16", "bfloat16")],
)
def test_short_names_of_dtypes(tiny_llama: Path, given, resolved):
    assert EngineArgs(str(tiny_llama), dtype=given).create_model_config().dtype == getattr(torch, resolved)


@pytest.mark.parametrize("wrong", [{"load_format": "dumy"}, {"load_format": "pt"}, {"dtype": "fp8"}])
def test_refused_before_the_model_is_looked_for(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*(auto, safetensors, gguf, dummy|bfloat16)"):
        EngineArgs("some/where", **wrong).create_engine_config()


def test_load_format_in_capitals(tiny_llama: Path):
    assert EngineArgs(str(tiny_llama), load_format="Safetensors").create_model_config().load_format == "safetensors"


def test_rope_arguments_of_older_releases(tiny_llama: Path):
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    args = EngineArgs(str(tiny_llama), rope_scaling=rope, rope_theta=7.0, hf_overrides={"vocab_size": 99})
    model = args.create_model_config()
    assert (model.max_model_len, model.vocab_size) == (1024, 99)
    assert model.hf_config.rope_parameters == {**rope, "rope_theta": 7.0}
    assert EngineArgs(str(tiny_llama), rope_scaling=None, rope_theta=None).hf_overrides is None
    with pytest.raises(ValueError, match=r"rope_theta.*beside hf_overrides"):
        EngineArgs(str(tiny_llama), rope_theta=7.0, hf_overrides=lambda config: config)


@pytest.mark.parametrize(("asked", "level"), [(True, "WARNING"), (None, "INFO"), (False, None)])
def test_prefix_caching_of_a_hybrid(tmp_path: Path, log: pytest.LogCaptureFixture, asked, level):
    """A caller who asks for it by name is warned that there is none."""
    config = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    cache = EngineArgs(str(tmp_path), enable_prefix_caching=asked).create_engine_config().cache_config
    assert not cache.enable_prefix_caching
    told = [record.levelname for record in log.records if "prefix caching is off" in record.getMessage()]
    assert told == ([level] if level else [])


def test_the_kernels_choose_the_block_size_that_nobody_names(tiny_llama, monkeypatch):
    monkeypatch.setattr(arg_utils, "preferred_block_size", lambda device_type, head_size, default: 4 * default)
    assert EngineArgs(str(tiny_llama)).create_engine_config().cache_config.block_size == 64
    assert EngineArgs(str(tiny_llama), block_size=8).create_engine_config().cache_config.block_size == 8


@pytest.mark.parametrize(
    ("policies", "given", "expected"),
    [
        ("cpu", {}, False),
        ("cpu", {"async_scheduling": True, "data_parallel_size": 2, "enable_expert_parallel": True}, True),
        ("cuda", {}, True),
        ("cuda", {"async_scheduling": False}, False),
        ("cuda", {"data_parallel_size": 2, "enable_expert_parallel": True}, True),
        ("xpu", {}, True),
        ("xpu", {"data_parallel_size": 2}, True),
        ("xpu", {"enable_expert_parallel": True}, True),
        ("xpu", {"data_parallel_size": 2, "enable_expert_parallel": True}, False),
        ("xpu", {"data_parallel_size": 2, "enable_expert_parallel": True, "async_scheduling": True}, True),
    ],
)
def test_async_scheduling_by_platform(tiny_llama: Path, monkeypatch, log, policies, given, expected):
    monkeypatch.setenv("VLLM_POLICIES", policies)
    assert EngineArgs(str(tiny_llama), **given).create_engine_config().scheduler_config.async_scheduling is expected
    told = [record.getMessage() for record in log.records if "async scheduling is off" in record.getMessage()]
    assert len(told) == (policies == "xpu" and not expected)


def test_async_scheduling_gives_way_to_the_nan_trace(tiny_llama: Path, monkeypatch, log):
    monkeypatch.setenv("VLLM_DEBUG_NAN", "1")
    config = EngineArgs(str(tiny_llama), async_scheduling=True).create_engine_config()
    assert not config.scheduler_config.async_scheduling
    assert "VLLM_DEBUG_NAN=1 checks one step at a time" in log.text
