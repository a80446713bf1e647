# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints that cannot be loaded: told by name, with the numbers and a remedy, from headers where they
show it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny_models as tiny
import tiny_quantised as quantised
import torch
from safetensors.torch import load_file, save_file

from vllm.engine.arg_utils import EngineArgs
from vllm.logger import log_once
from vllm.model_executor.layers.quantization import QuantizationConfig, get_quantization_config
from vllm.model_executor.model_loader import weight_utils


def config_of(tmp_path: Path, declared, **args):
    stored = json.loads(Path(tiny.checkpoint("llama"), "config.json").read_text())
    more = {} if declared is None else {"quantization_config": declared}
    (tmp_path / "config.json").write_text(json.dumps({**stored, **more}))
    return EngineArgs(str(tmp_path), skip_tokenizer_init=True, **args).create_model_config()


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported.*supported: fp8, .*gptq"),
        ({"quant_method": "gtpq"}, "'gtpq' is not supported; the nearest is 'gptq'"),
        ({"bits": 4}, "names no quant_method"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits is not supported; 4 and 8 are"),
        ({"quant_method": "gptq", "bits": 2}, "gptq with 2 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'.*gptq_v2"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size=0"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv'.*'gemm'"),
        ({"quant_method": "awq", "w_bit": 8}, "awq.* 8 bits is not supported"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:nv_fp"}, "auto_round:nv_fp.*auto_awq"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type='mx_fp'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'; only e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized.*pack-quant"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 2}}}}, "num_bits=2"),
        ({"quant_method": "compressed-tensors", "config_groups": [3]}, "config_groups=.*mapping"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity 'spars"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"input_activations": {"num_bits": 4}}}},
            "inputs of 4 bits",
        ),
    ],
)
def test_configs(tmp_path, declared, message):
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, declared)


@pytest.mark.parametrize(
    ("declared", "asked", "message"),
    [
        ({"quant_method": "awq"}, "gptq", "quantization='gptq', but the checkpoint is quantised by 'awq'"),
        ({"quant_method": "awq"}, "int8", "quantization='int8', but the checkpoint is quantised by 'awq'"),
        (None, "gptq", "quantization='gptq', but the checkpoint is not quantised.*fp8 or int8"),
        (None, "int3", "'int3' is not supported; .*supported: "),
    ],
)
def test_what_was_asked_for(tmp_path, declared, asked, message):
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, declared, quantization=asked)


@pytest.mark.parametrize(
    ("declared", "asked", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq", "gptq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq_marlin", "gptq"),
        ({"quant_method": "auto-round", "bits": 4}, "inc", "auto-round"),
        ({"quant_method": "intel/auto-round", "bits": 4}, None, "auto-round"),
        ({"quant_method": "fp8"}, "fp8", "fp8"),
        ({"config_groups": {}}, None, "compressed-tensors"),
        (None, "fp8", "fp8"),
        (None, "INT8", "int8"),
        (None, None, None),
    ],
)
def test_what_agrees(tmp_path, declared, asked, method):
    assert config_of(tmp_path, declared, quantization=asked).quantization == method


@pytest.mark.parametrize(
    ("file", "content", "method"),
    [("quantize_config.json", {"bits": 4, "group_size": 32}, "gptq"), ("quant_config.json", {"w_bit": 4}, "awq")],
)
def test_old_releases_say_it_in_a_file_of_its_own(tmp_path, file, content, method):
    (tmp_path / file).write_text(json.dumps(content))
    assert config_of(tmp_path, None).quantization == method
    (tmp_path / file).write_text("[")
    with pytest.raises(ValueError, match=f"{file} is no JSON mapping"):
        config_of(tmp_path, None)


def test_upstreams_names():
    cls = get_quantization_config("gptq")
    assert issubclass(cls, QuantizationConfig)
    assert (cls.get_name(), cls.from_config({"bits": 8}).bits) == ("gptq", 8)


# --- tensors -------------------------------------------------------------------------------------------------------


def damaged(tmp_path: Path, name: str, change) -> str:
    shutil.copytree(quantised.checkpoint(name), tmp_path / "damaged")
    file = tmp_path / "damaged" / "model-0.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, file)
    return str(tmp_path / "damaged")


Q = "model.layers.0.self_attn.q_proj"


def removed(leaf: str):
    return lambda tensors: tensors.pop(f"{Q}.{leaf}")


def replaced(leaf: str, value):
    return lambda tensors: tensors.update({f"{Q}.{leaf}": value(tensors[f"{Q}.{leaf}"])})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq:llama", removed("scales"), rf"1 unreadable: {Q}\.weight: .*{Q}\.scales is missing; fetch"),
        ("gptq:llama", removed("qzeros"), rf"{Q}\.qzeros is missing"),
        ("fp8-block:llama", removed("weight_scale_inv"), rf"{Q}\.weight_scale_inv is missing"),
        ("ct-int4:llama", removed("weight_scale"), rf"{Q}\.weight_scale is missing"),
        ("ct-int4:llama", removed("weight_shape"), rf"{Q}\.weight_shape is missing"),
        ("fp8-block:llama", replaced("weight_scale_inv", lambda t: t[:2]), r"shape \[2, 8\], needed \[3, 8\]"),
        ("gptq:llama", replaced("scales", lambda t: t[:, :32]), r"scales has shape \[8, 32\], needed \[8, 64\]"),
        ("gptq:llama", replaced("qzeros", lambda t: t[:3]), r"qzeros has shape \[3, 8\], needed \[8, 8\]"),
        ("gptq:llama", replaced("qweight", lambda t: t[:6]), r"holds 64 columns in 3 bits; 4 and 8 are supported"),
        ("gptq:llama", replaced("g_idx", lambda t: t[:32]), r"qzeros has shape \[8, 8\], needed \[8, 16\]"),
        ("awq:mixtral", replaced("qzeros", lambda t: t[:, :4]), r"qzeros has shape \[8, 4\], needed \[8, 8\]"),
        ("ct-int4:llama", replaced("weight_packed", lambda t: t[:, :7]), r"\[64, 7\] cannot hold \[64, 64\]"),
        ("ct-int4:llama", replaced("weight_zero_point", lambda t: t[:4]), r"zero_point has shape \[4, 8\], needed \[8"),
    ],
)
def test_tensors_that_do_not_fit_are_told_before_any_is_read(tmp_path, monkeypatch, name, change, message):
    folder, reads = damaged(tmp_path, name, change), []
    original = weight_utils.read_range
    monkeypatch.setattr(weight_utils, "read_range", lambda *a: reads.append(a[2]) or original(*a))
    with pytest.raises(ValueError, match=message):
        quantised.make_llm("", model=folder)
    assert sum(reads) < 2000, "headers, and true shapes, which are few bytes"


def with_one(value: float, row: int = 3):
    def change(scales: torch.Tensor) -> torch.Tensor:
        changed = scales.clone()
        changed.view(torch.uint8)[row] = value if scales.dtype is torch.uint8 else changed.view(torch.uint8)[row]
        if scales.dtype is not torch.uint8:
            changed[row] = value
        return changed

    return change


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "leaf", "value", "told"),
    [
        ("gptq:llama", "scales", NAN, "nan"),
        ("gptq:llama", "scales", INF, "inf"),
        ("gptq:llama", "scales", 0.0, "0.0"),
        ("awq:mixtral", "scales", NAN, "nan"),
        ("ct-int4:llama", "weight_scale", NAN, "nan"),
        ("ct-w8a8:llama", "weight_scale", 0.0, "0.0"),
        ("fp8-block:llama", "weight_scale_inv", NAN, "nan"),
        ("fp8-block:llama", "weight_scale_inv", 0.0, "0.0"),
        ("fp8-block:llama", "weight_scale_inv", -1.0, "-1.0"),
        ("ct-mxfp4:llama", "weight_scale", 255, "nan"),
    ],
)
def test_scales_that_cannot_be(tmp_path, name, leaf, value, told):
    row = 2 if "block" in name else 3
    folder = damaged(tmp_path, name, replaced(leaf, with_one(value, row)))
    with pytest.raises(
        ValueError, match=rf"{Q}\.weight: \d+ of \d+ scales cannot be, the first is {told} for row \d+.*"
    ):
        quantised.make_llm("", model=folder)


@pytest.mark.parametrize("value", [NAN, INF, 0.0, -0.5])
@pytest.mark.parametrize(("name", "leaf"), [("fp8-tensor:llama", "input_scale"), ("ct-w8a8:llama", "input_scale"),
                                            ("fp8-tensor:llama", "activation_scale")])  # fmt: skip
def test_scales_of_inputs_that_cannot_be(tmp_path, name, leaf, value):
    folder = damaged(tmp_path, name, lambda tensors: tensors.update({f"{Q}.{leaf}": torch.tensor(value)}))
    told = rf"{Q}\.weight: {Q}\.{leaf} is \[{value}\], which cannot be scales of inputs.*fetch it again, or remove"
    with pytest.raises(ValueError, match=told):
        quantised.make_llm("", model=folder)


@pytest.mark.parametrize(
    ("name", "how"),
    [("fp8-tensor:llama:down_proj", "inputs stay in the model's dtype"), ("ct-w8a8:llama", "each row has its own")],
)
def test_static_scales_of_inputs_are_told_once_and_not_used(tmp_path, log, name, how):
    """Far too small a scale would cut off nearly all: the tokens are those of the checkpoint without. Also beside a
    matrix in 16 bits."""

    def change(tensors):
        bases = [n.rpartition(".")[0] for n, t in tensors.items() if n.endswith("_proj.weight")]
        tensors |= {f"{base}.input_scale": torch.tensor([1e-3]) for base in bases}
        tensors["model.layers.1.mlp.down_proj.input_scale"] = torch.tensor(1e-3)

    log_once.cache_clear()
    folder = damaged(tmp_path, name, change)
    llm = quantised.make_llm("", model=folder)
    prompt = tiny.prompt(9, seed=4)
    assert tiny.tokens(tiny.generate(llm, [prompt], 8)) == [quantised.greedy(name, prompt, 8)]
    llm.shutdown()
    told = [r.message for r in log.records if "input_scale" in r.message]
    assert len(told) == 1, told
    assert how in told[0]


def test_a_scale_of_0_where_all_is_0(tmp_path):
    """As of rows that pad a matrix: their codes say 0 too."""

    def change(tensors):
        tensors[f"{Q}.weight"].view(torch.uint8)[5] = 0
        tensors[f"{Q}.weight_scale"][5] = 0

    folder = damaged(tmp_path, "ct-w8a8:llama", change)
    quantised.make_llm("", model=folder).shutdown()


def test_groups_that_are_none(tmp_path):
    folder = damaged(tmp_path, "gptq-order:llama", replaced("g_idx", lambda t: torch.where(t == 3, 4, t)))
    with pytest.raises(ValueError, match=rf"{Q}\.g_idx does not put 64 columns into groups of 8"):
        quantised.make_llm("", model=folder)


def test_experts_of_one_layer_in_two_forms():
    name = r"gptq:qwen3-moe:layers\.1\.mlp\.experts\.3\.up_proj"
    message = r"1 unlike .*experts\.3\.up_proj\.weight is float, others are int4 in groups of 8"
    with pytest.raises(ValueError, match=message):
        quantised.make_llm(name)


def test_gate_and_up_in_two_orders(tmp_path):
    gate = "model.layers.1.mlp.experts.3.gate_proj.g_idx"
    folder = damaged(tmp_path, "gptq-order:qwen3-moe", lambda tensors: tensors.update({gate: tensors[gate].flip(0)}))
    with pytest.raises(
        ValueError, match=r"experts\.3\.gate_proj and .*3\.up_proj .*different orders.*without desc_act"
    ):
        quantised.make_llm("", model=folder)


def test_biases_of_zeros_that_the_model_has_not(tmp_path):
    def biased(value: float):
        return lambda tensors: tensors.update({f"{Q}.bias": torch.full((64,), value)})

    quantised.make_llm("", model=damaged(tmp_path, "gptq:llama", biased(0.0))).shutdown()
    shutil.rmtree(tmp_path / "damaged")
    with pytest.raises(ValueError, match=rf"1 extra: {Q}\.bias"):
        quantised.make_llm("", model=damaged(tmp_path, "gptq:llama", biased(1.0)))


# --- new weights ---------------------------------------------------------------------------------------------------


def test_weights_in_another_form_than_they_are_held_in():
    llm = quantised.make_llm("gptq:llama")
    model = llm.llm_engine.worker.get_model()
    expected = tiny.tokens(tiny.generate(llm, [tiny.prompt(9)], 6))
    told = (
        rf"{Q}\.weight is held quantised, and came in torch.float32; give its tensors as the checkpoint has them "
        rf"\({Q}\.g_idx, {Q}\.qweight, {Q}\.qzeros, {Q}\.scales\), or load an unquantised checkpoint"
    )
    with pytest.raises(ValueError, match=told):
        model.load_weights([(f"{Q}.weight", torch.zeros(64, 64))])
    assert tiny.tokens(tiny.generate(llm, [tiny.prompt(9)], 6)) == expected
    assert model.load_weights([("model.norm.weight", torch.ones(64))]) == {"model.norm.weight"}
    llm.shutdown()


def test_quantised_weights_move_with_the_others():
    llm = quantised.make_llm("gptq-order:llama")
    expected = tiny.tokens(tiny.generate(llm, [tiny.prompt(9)], 6))
    model = llm.llm_engine.worker.get_model()
    model.move_weights(torch.device("cpu"))
    assert tiny.tokens(tiny.generate(llm, [tiny.prompt(9)], 6)) == expected
    llm.sleep(level=1)
    llm.wake_up()
    assert tiny.tokens(tiny.generate(llm, [tiny.prompt(9)], 6)) == expected
    llm.shutdown()
