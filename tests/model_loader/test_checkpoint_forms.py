# SPDX-License-Identifier: Apache-2.0
"""Model folders in every form that transformers loads: the tokens are transformers' on the same folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_hybrids as hybrids
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from vllm import LLM
from vllm.engine.arg_utils import EngineArgs

Weights = dict[str, torch.Tensor]
PROMPT = tiny.prompt(9)
NAN = float("nan")


def save(folder: Path, weights: Weights, **config: Any) -> Path:
    """``weights`` in the folder's one file, ``config`` laid over its config.json; None removes a key."""
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    found = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    return folder


def copy_of(source: str, target: Path) -> tuple[Path, Weights]:
    shutil.copytree(source, target)
    return target, load_file(target / "model.safetensors")


def by_transformers(folder: Path, num_tokens: int = 12) -> tuple[int, ...]:
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"]
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
    out = model.eval().generate(ids, attention_mask=torch.ones_like(ids), **options)
    return tuple(out[0, len(PROMPT) :].tolist())


def by_us(folder: Path, num_tokens: int = 12, **kwargs: Any) -> tuple[int, ...]:
    settings = {"max_model_len": 64, "num_gpu_blocks_override": 20, "dtype": "float32", "skip_tokenizer_init": True}
    llm = LLM(str(folder), **settings, **kwargs)
    (tokens,) = tiny.tokens(tiny.generate(llm, [PROMPT], num_tokens))
    llm.shutdown()
    return tokens


def stacked(weights: Weights, gate: str, up: str, down: str, block: str, new_block: str) -> Weights:
    """The experts ``….{block}.experts.{e}.{gate|up|down}.weight`` as two tensors under ``new_block``."""
    out = {name.replace(f".{block}.", f".{new_block}."): t for name, t in weights.items() if ".experts." not in name}
    for prefix in sorted({name.split(f".{block}.experts.")[0] for name in weights if ".experts." in name}):
        experts = len([name for name in weights if name.startswith(f"{prefix}.{block}.experts.")]) // 3
        g, u, d = (
            torch.stack([weights[f"{prefix}.{block}.experts.{e}.{part}.weight"] for e in range(experts)])
            for part in (gate, up, down)
        )
        out |= {f"{prefix}.{new_block}.experts.gate_up_proj": torch.cat([g, u], 1)}
        out |= {f"{prefix}.{new_block}.experts.down_proj": d}
    return out


def renamed(old: str, new: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name.replace(old, new, 1): tensor for name, tensor in weights.items()}


FORMS: dict[str, tuple[str, Callable[[Weights], Weights]]] = {
    "mixtral stacked": ("mixtral", lambda w: stacked(w, "w1", "w3", "w2", "block_sparse_moe", "mlp")),
    "mixtral stacked, old name": (
        "mixtral",
        lambda w: stacked(w, "w1", "w3", "w2", "block_sparse_moe", "block_sparse_moe"),
    ),
    "mixtral, new name": ("mixtral", renamed(".block_sparse_moe.", ".mlp.")),
    "mixtral without prefix": ("mixtral", renamed("model.", "")),
    "qwen3-moe stacked": ("qwen3-moe", lambda w: stacked(w, "gate_proj", "up_proj", "down_proj", "mlp", "mlp")),
    "qwen3 without prefix": ("qwen3", renamed("model.", "")),
    "qwen3.5 under language_model": ("qwen3.5", renamed("model.", "model.language_model.")),
    "qwen3.5-moe without prefix": ("qwen3.5-moe", renamed("model.", "")),
}


@pytest.mark.parametrize("form", FORMS)
def test_names(tmp_path: Path, form: str, nan_poison: None) -> None:
    name, change = FORMS[form]
    source = (tiny if name in tiny.CHECKPOINTS else hybrids).checkpoint(name)
    folder, weights = copy_of(source, tmp_path / "m")
    changed = change(weights)
    assert changed.keys() != weights.keys()
    save(folder, changed)
    assert by_us(folder) == by_transformers(folder)


def test_a_saved_decoder_without_its_head(tmp_path: Path) -> None:
    AutoModel.from_pretrained(tiny.checkpoint("llama")).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaModel"]
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    assert by_us(tmp_path) == by_transformers(tmp_path)


def test_one_tensor_under_two_names_is_named(tmp_path: Path) -> None:
    folder, weights = copy_of(tiny.checkpoint("llama"), tmp_path / "m")
    save(folder, {**weights, "norm.weight": torch.zeros(64)})
    with pytest.raises(ValueError, match=r"1 stored twice: model\.norm\.weight"):
        by_us(folder)


INERT = [
    "model.layers.0.self_attn.k_scale",
    "model.layers.0.self_attn.attn.v_scale",
    "model.layers.1.self_attn.k_proj.k_scale",
    "model.layers.1.self_attn.v_proj.output_scale",
    "model.layers.1.self_attn.q_proj.input_scale",
    "model.layers.0.self_attn.prob_scale",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
    "model.rotary_emb.original_inv_freq",
    "model.layers.0.self_attn.rotary_emb.cos_cached",
    "model.position_ids",
    "v_head.summary.weight",
    "model.layers.2.mlp.down_proj.weight",
    "model.layers.11.self_attn.q_proj.weight_scale",
]


def test_tensors_that_change_nothing_are_left_unread(tmp_path: Path) -> None:
    folder, weights = copy_of(tiny.checkpoint("llama"), tmp_path / "m")
    save(folder, weights | {name: torch.full((2,), NAN) for name in INERT})
    assert by_us(folder) == by_transformers(folder) == tiny.greedy("llama", PROMPT, 12)


@pytest.mark.parametrize("extra", ["self_attn.q_proj.bias", "self_attn.q_proj.weight_scale", "self_attn.q_norm.weight"])
def test_tensors_that_would_change_the_function_are_refused(tmp_path: Path, extra: str) -> None:
    folder, weights = copy_of(tiny.checkpoint("llama"), tmp_path / "m")
    save(folder, {**weights, f"model.layers.1.{extra}": torch.zeros(64)})
    with pytest.raises(ValueError, match=f"1 extra: model.layers.1.{extra}"):
        by_us(folder)


def test_a_config_that_asks_for_fewer_layers(tmp_path: Path) -> None:
    folder, weights = copy_of(tiny.checkpoint("qwen3"), tmp_path / "m")
    save(folder, weights, num_hidden_layers=1, layer_types=None)
    assert by_us(folder) == by_transformers(folder) != tiny.greedy("qwen3", PROMPT, 12)


@pytest.mark.parametrize(
    "architectures", [["NoSuchForCausalLM", "Qwen3ForCausalLM"], ["MyQwen3LM"], ["Qwen3Model"], None]
)
def test_architectures(tmp_path: Path, architectures: list[str] | None) -> None:
    folder, weights = copy_of(tiny.checkpoint("qwen3"), tmp_path / "m")
    save(folder, weights, architectures=architectures)
    assert by_us(folder) == by_transformers(folder) == tiny.greedy("qwen3", PROMPT, 12)


def test_a_model_with_its_own_code_is_not_taken_for_its_base(tmp_path: Path) -> None:
    folder, weights = copy_of(tiny.checkpoint("qwen3"), tmp_path / "m")
    save(folder, weights, architectures=["MyQwen3LM"], auto_map={"AutoModelForCausalLM": "modeling.MyQwen3LM"})
    with pytest.raises(ValueError, match=r"no model for architectures=\['MyQwen3LM'\]"):
        by_us(folder)


def two_answers(folder: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """In ``folder`` the model of seed 0 in one file beside that of seed 1 in two with an index; both one's tokens."""
    shutil.copytree(tiny.checkpoint("llama"), folder)
    other = load_file(Path(tiny.checkpoint("llama", 1)) / "model.safetensors")
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(other)}
    for file in set(files.values()):
        save_file({name: other[name] for name in other if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    answers = tiny.greedy("llama", PROMPT, 12), tiny.greedy("llama", PROMPT, 12, 1)
    assert answers[0] != answers[1]
    return answers


def test_an_index_beside_a_single_file(tmp_path: Path) -> None:
    """As transformers: the single file, whether the index is stale, incomplete or no JSON; without it the index."""
    single, sharded = two_answers(tmp_path / "m")
    assert by_us(tmp_path / "m") == by_transformers(tmp_path / "m") == single
    (tmp_path / "m" / "model-00001-of-00002.safetensors").rename(tmp_path / "kept")
    assert by_us(tmp_path / "m") == by_transformers(tmp_path / "m") == single
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"lacks model-00001-of-00002.safetensors, which model.safetensors.index"
    ):
        by_us(tmp_path / "m")
    (tmp_path / "kept").rename(tmp_path / "m" / "model-00001-of-00002.safetensors")
    assert by_us(tmp_path / "m") == by_transformers(tmp_path / "m") == sharded


def test_the_file_that_the_config_names(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    single, sharded = two_answers(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "model.safetensors.index.json").rename(folder / "other.safetensors.index.json")
    shutil.copy(Path(tiny.checkpoint("qwen3")) / "model.safetensors", folder)  # of another model: never read
    config = json.loads((folder / "config.json").read_text())
    for named, expected in (("other.safetensors", single), ("other.safetensors.index.json", sharded)):
        (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": named}))
        assert by_us(folder) == by_transformers(folder) == expected
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "none.safetensors"}))
    with pytest.raises(FileNotFoundError, match=r"lacks none\.safetensors, which transformers_weights"):
        by_us(folder)


def test_an_unknown_model_without_architectures_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    with pytest.raises(ValueError, match=r"type 'bloom' names no architecture"):
        EngineArgs(str(tmp_path)).create_engine_config()
