# SPDX-License-Identifier: Apache-2.0
"""Safetensors folders, hub ids and dummy weights through ``get_model``; references are the tensors that were saved."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save_file
from torch import nn
from toy_checkpoint import random_tensors, toy_config, write_folder

from vllm.model_executor.model_loader import get_model, weight_utils
from vllm.model_executor.parameter import WeightSpec, collect_weight_specs

MODULES = {
    "embed": {"model.embed.weight": (32, 8)},
    "qkv": {"model.q.weight": (16, 8), "model.k.weight": (8, 8), "model.v.weight": (8, 8)},
    "norm": {"model.norm.weight": (8,)},
    "experts": {f"model.experts.{e}.{w}.weight": (6, 8) for e in range(4) for w in ("gate", "up")},
}


def count_reads(monkeypatch) -> list[tuple[int, int]]:
    reads: list[tuple[int, int]] = []
    original = weight_utils.read_range

    def counted(file, offset, size, *buffer):
        reads.append((offset, size))
        return original(file, offset, size, *buffer)

    monkeypatch.setattr(weight_utils, "read_range", counted)
    return reads


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_arrives_in_the_models_dtype(tmp_path, stored, dtype, poison):
    tensors = random_tensors(MODULES, stored)
    write_folder(tmp_path, tensors)
    model = get_model(toy_config(tmp_path, MODULES, dtype=dtype))
    assert not model.training
    assert model.weights.keys() == tensors.keys()
    for name, tensor in model.weights.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, tensors[name].to(dtype)), name
        assert not tensor.isnan().any()


def test_poison_shows_a_tensor_that_was_never_read(tmp_path, monkeypatch, poison):
    write_folder(tmp_path, random_tensors(MODULES, torch.bfloat16))
    monkeypatch.setattr(weight_utils, "read_range", lambda _, __, size, *___: torch.empty(size, dtype=torch.uint8))
    model = get_model(toy_config(tmp_path, MODULES, dtype=torch.bfloat16))
    assert all(tensor.isnan().all() for tensor in model.weights.values())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_shards_of_files_and_of_ranks(tmp_path, shards, rank):
    tensors = random_tensors(MODULES, torch.float32)
    write_folder(tmp_path, tensors, shards)
    model = get_model(toy_config(tmp_path, MODULES, rank=rank, parts=2))
    for name, tensor in model.weights.items():
        assert torch.equal(tensor, tensors[name].chunk(2)[rank]), name


def test_files_without_an_index_are_all_read(tmp_path):
    tensors = random_tensors(MODULES, torch.float32)
    write_folder(tmp_path, tensors, 3)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert get_model(toy_config(tmp_path, MODULES)).weights.keys() == tensors.keys()


def test_a_spec_may_keep_its_own_dtype_and_scalars_load(tmp_path):
    modules = {"a": {"scale": (1,), "weight": (4, 4)}}
    tensors = random_tensors(modules, torch.float32)
    write_folder(tmp_path, tensors)
    options = {"scale": {"dtype": torch.float32}}
    model = get_model(toy_config(tmp_path, modules, options=options, dtype=torch.bfloat16))
    assert model.weights["scale"].dtype == torch.float32
    assert torch.equal(model.weights["scale"], tensors["scale"])
    assert model.weights["weight"].dtype == torch.bfloat16
    save_file({"zero_dim": torch.tensor(3.5)}, tmp_path / "scalar.safetensors")
    (zero_dim,) = weight_utils.read_safetensors([tmp_path / "scalar.safetensors"])
    assert zero_dim.shape == ()
    assert zero_dim.read(torch.float32).item() == 3.5


def test_all_faults_are_named_at_once_and_before_any_data_is_read(tmp_path, monkeypatch):
    tensors = random_tensors(MODULES, torch.float32)
    del tensors["model.q.weight"], tensors["model.experts.3.up.weight"]
    tensors["model.k.weight"] = torch.zeros(9, 8)
    tensors["model.experts.0.gate.weight"] = torch.zeros(48)
    tensors["model.stranger"] = torch.zeros(5)
    tensors["model.norm.weight"] = torch.zeros(8, dtype=torch.int32)
    write_folder(tmp_path, tensors, 2)
    reads = count_reads(monkeypatch)
    config = toy_config(tmp_path, MODULES)
    with pytest.raises(ValueError) as caught:
        get_model(config)
    message = str(caught.value)
    assert "2 missing: model.q.weight; model.experts.3.up.weight" in message
    assert "1 extra: model.stranger (5,)" in message
    assert "2 misshapen" in message
    assert "model.k.weight: expected (8, 8), found (9, 8)" in message
    assert "model.experts.0.gate.weight: expected (6, 8), found (48,)" in message
    assert "1 unreadable: model.norm.weight: stored as I32" in message
    assert str(tmp_path) in message
    assert not reads
    assert not config.model_config.hf_config.events


def test_quantised_storage_is_refused(tmp_path):
    modules = {"a": {"weight": (4, 4)}}
    write_folder(tmp_path, {"weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match="weight: stored as F8_E4M3"):
        get_model(toy_config(tmp_path, modules))


def test_ignored_optional_and_unneeded_tensors(tmp_path, monkeypatch):
    tensors = random_tensors(MODULES, torch.float32)
    elsewhere = [name for name in tensors if ".experts.2." in name or ".experts.3." in name]
    del tensors["model.norm.weight"]
    tensors["model.layers.0.rotary_emb.inv_freq"] = torch.zeros(3)
    write_folder(tmp_path, tensors)
    reads = count_reads(monkeypatch)
    options = {name: {"needed": False} for name in elsewhere} | {"model.norm.weight": {"optional": True}}
    config = toy_config(tmp_path, MODULES, options=options, ignored=(r"rotary_emb\.inv_freq$",))
    model = get_model(config)
    assert model.weights.keys() == set(tensors) - {*elsewhere, "model.layers.0.rotary_emb.inv_freq"}
    assert sum(size for _, size in reads) == sum(t.nbytes for t in model.weights.values())
    events = config.model_config.hf_config.events
    assert [events.count(f"processed {label}") for label in MODULES] == [1, 1, 1, 1]


@pytest.mark.parametrize("fault", ["missing", "misshapen"])
def test_an_unneeded_tensor_is_still_checked(tmp_path, fault):
    tensors, name = random_tensors(MODULES, torch.float32), "model.experts.3.up.weight"
    tensors |= {name: torch.zeros(7, 8)}
    if fault == "missing":
        del tensors[name]
    write_folder(tmp_path, tensors)
    with pytest.raises(ValueError, match=f"1 {fault}: {name}"):
        get_model(toy_config(tmp_path, MODULES, options={name: {"needed": False}}))


def test_a_module_is_processed_as_soon_as_it_is_complete(tmp_path):
    write_folder(tmp_path, random_tensors(MODULES, torch.float32))
    config = toy_config(tmp_path, MODULES)
    get_model(config)
    events = config.model_config.hf_config.events
    assert len(events) == len(set(events))
    for label, shapes in MODULES.items():
        assert events.index(f"processed {label}") == max(events.index(name) for name in shapes) + 1


class Tied(nn.Module):
    """Has no tensors of its own, so it must come after the module that it reads."""

    def __init__(self, source) -> None:
        super().__init__()
        self.source = (source,)

    def process_weights_after_loading(self) -> None:
        self.weight = self.source[0].held["w"]


def test_a_module_without_tensors_is_processed_last(tmp_path):
    modules = {"a": {"w": (2, 2)}, "b": {"x": (2, 2)}}
    write_folder(tmp_path, random_tensors(modules, torch.float32))
    config = toy_config(tmp_path, modules)
    from toy_checkpoint import ToyModel

    from vllm.model_executor.models.registry import ModelRegistry

    class TiedModel(ToyModel):
        def __init__(self, vllm_config, prefix="") -> None:
            super().__init__(vllm_config, prefix)
            self.parts_of = nn.ModuleList([Tied(self.parts_of[0]), *self.parts_of])

    ModelRegistry.register_model("ToyModel", TiedModel)
    model = get_model(config)
    assert model.parts_of[0].weight is model.parts_of[1].held["w"]


def test_two_modules_cannot_want_one_tensor(tmp_path):
    write_folder(tmp_path, {"w": torch.zeros(2, 2)})
    with pytest.raises(AssertionError, match=r"2 specs for 1 tensors: .*'w'"):
        get_model(toy_config(tmp_path, {"a": {"w": (2, 2)}, "b": {"w": (2, 2)}}))


def test_collected_specs_know_their_owner():
    leaf, other = nn.Linear(1, 1), nn.Linear(1, 1)
    leaf.weight_specs = lambda: [WeightSpec("a", (1,), print), WeightSpec("b", (1,), print, owner=other)]
    root = nn.Sequential(leaf)
    root.weight_specs = lambda: pytest.fail("the root lists its children's")
    assert [(spec.name, spec.owner) for spec in collect_weight_specs(root)] == [("a", leaf), ("b", other)]


def test_truncated_and_corrupt_files_are_named(tmp_path):
    (file,) = write_folder(tmp_path, random_tensors(MODULES, torch.float32))
    whole = file.read_bytes()
    cuts = [0, 4, 8, 100, len(whole) // 2, len(whole) - 1]
    texts = [whole[:cut] for cut in cuts]
    texts += [whole + b"x", b"\xff" * 64, b"version https://git-lfs.github.com/spec/v1\n", whole[:8] + b"?" + whole[9:]]
    for text in texts:
        file.write_bytes(text)
        with pytest.raises(ValueError, match=r"model\.safetensors is truncated.*fetch it again"):
            get_model(toy_config(tmp_path, MODULES))


def test_a_file_cut_after_its_header_was_read(tmp_path):
    (file,) = write_folder(tmp_path, random_tensors(MODULES, torch.float32))
    tensors = weight_utils.read_safetensors([file])
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors ends 10 bytes before"):
        tensors[-1].read(torch.float32)


def test_a_tensor_in_two_files(tmp_path):
    tensors = random_tensors(MODULES, torch.float32)
    write_folder(tmp_path, tensors, 2)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"model.q.weight": tensors["model.q.weight"]}, tmp_path / "stale.safetensors")
    with pytest.raises(ValueError, match=r"1 stored twice: model\.q\.weight"):
        get_model(toy_config(tmp_path, MODULES))


@pytest.mark.parametrize(
    ("break_it", "error", "message"),
    [
        (lambda f: (f / "config.json").unlink(), FileNotFoundError, r"has no config\.json"),
        (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), FileNotFoundError, "lacks model-00002-of-00002"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), ValueError, "index.json is no safetensors"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), ValueError, "index.json is no safetensors"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), ValueError, "index.json is no safetensors"),
    ],
)
def test_incomplete_folders(tmp_path, break_it, error, message):
    write_folder(tmp_path, random_tensors(MODULES, torch.float32), 2)
    break_it(tmp_path)
    with pytest.raises(error, match=message):
        get_model(toy_config(tmp_path, MODULES))


def test_folders_without_readable_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="has no weights"):
        get_model(toy_config(tmp_path, MODULES))
    (tmp_path / "a.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"a\.gguf, give that file's path"):
        get_model(toy_config(tmp_path, MODULES))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*save_pretrained"):
        get_model(toy_config(tmp_path, MODULES))
    with pytest.raises(ValueError, match=r"load_format='gguf' but .* is a folder"):
        get_model(toy_config(tmp_path, MODULES, load_format="gguf"))


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "none.gguf", "a/b/c", ""])
def test_a_path_that_is_not_there(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    if model == "":
        with pytest.raises((ValueError, FileNotFoundError)):
            get_model(toy_config(model, MODULES))
        return
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        get_model(toy_config(model, MODULES))


def test_unknown_load_format():
    with pytest.raises(ValueError, match=r"load_format='pt'.*auto, safetensors, gguf, dummy"):
        get_model(toy_config("none", MODULES, load_format="pt"))


def test_a_hub_id_loads_its_snapshot(tmp_path, monkeypatch):
    tensors = random_tensors(MODULES, torch.float32)
    write_folder(tmp_path / "snapshot", tensors)
    asked = []

    def snapshot_download(repo_id, *, revision, allow_patterns):
        asked.append((repo_id, revision))
        assert "*.safetensors" in allow_patterns
        assert "*.json" in allow_patterns
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    model = get_model(toy_config("owner/name", MODULES, revision="main"))
    assert asked == [("owner/name", "main")]
    assert torch.equal(model.weights["model.q.weight"], tensors["model.q.weight"])


def test_a_hub_id_that_cannot_be_had(tmp_path, monkeypatch):
    def snapshot_download(*args, **kwargs):
        raise LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"owner/name.*not in the cache.*HF_HUB_OFFLINE=1"):
        get_model(toy_config("owner/name", MODULES))


def test_offline_the_network_is_never_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("asked the network"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="owner/name"):
        get_model(toy_config("owner/name", MODULES))


def test_dummy_weights_are_the_same_in_every_layout(tmp_path, poison):
    def dummy(**fields):
        return get_model(toy_config(tmp_path / "nothing", MODULES, load_format="dummy", **fields)).weights

    whole = dummy()
    assert whole.keys() == random_tensors(MODULES, torch.float32).keys()
    halves = [dummy(rank=rank, parts=2) for rank in range(2)]
    for name, tensor in whole.items():
        assert torch.equal(tensor, torch.cat([half[name] for half in halves])), name
        assert tensor.isfinite().all()
        assert tensor.std() > 0
    assert all(torch.equal(tensor, whole[name]) for name, tensor in dummy().items())
    some = dummy(options={"model.experts.0.up.weight": {"needed": False}, "model.norm.weight": {"optional": True}})
    assert whole.keys() - some.keys() == {"model.experts.0.up.weight", "model.norm.weight"}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in some.items())
    assert not torch.equal(whole["model.k.weight"], whole["model.v.weight"])
    assert not torch.equal(whole["model.k.weight"], dummy(seed=1)["model.k.weight"])
    assert torch.equal(whole["model.k.weight"].bfloat16(), dummy(dtype=torch.bfloat16)["model.k.weight"])


def test_dummy_matrices_keep_the_variance():
    (tensor,) = weight_utils.dummy_tensors([WeightSpec("w", (512, 256), print)], seed=0)
    assert (torch.randn(64, 256) @ tensor.read(torch.float32).T).std().item() == pytest.approx(1.0, rel=0.05)


PEAK = """
import gc, json, sys
from pathlib import Path
import torch
sys.path[:0] = json.loads(sys.argv[1])
from safetensors.torch import load_file
from toy_checkpoint import ToyModel, toy_config
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models.registry import ModelRegistry

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

def peak(work):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    result = work()
    return memory("VmHWM") - before

folder = Path(sys.argv[2])
modules = json.loads(sys.argv[3])
modules = {k: {n: tuple(s) for n, s in v.items()} for k, v in modules.items()}
ModelRegistry.register_model("ToyModel", ToyModel)
config = toy_config(folder, modules, dtype=torch.bfloat16)
ours = peak(lambda: get_model(config))
files = sorted(folder.glob("*.safetensors"))
def all_at_once():
    read = [load_file(file) for file in files]
    return [{name: tensor.clone() for name, tensor in part.items()} for part in read]
print(json.dumps([ours, peak(all_at_once)]))
"""


def test_peak_memory_is_at_most_one_shard_above_the_model(tmp_path):
    modules = {f"layer{i}": {f"layers.{i}.{w}": (1024, 2048) for w in "ab"} for i in range(12)}
    files = write_folder(tmp_path, random_tensors(modules, torch.bfloat16), 4)
    shard = files[0].stat().st_size
    model = sum(file.stat().st_size for file in files)
    paths = json.dumps([str(Path(__file__).parent), str(Path(weight_utils.__file__).parents[3])])
    command = [sys.executable, "-c", PEAK, paths, str(tmp_path), json.dumps(modules)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ours, all_at_once = json.loads(done.stdout)
    assert model < ours <= model + shard
    assert all_at_once > model + shard, "the fault is not seen by this measurement"


def test_only_the_rows_that_a_rank_keeps_are_read(tmp_path, monkeypatch, poison):
    tensors = {name: torch.randn(6, 4) for name in ("whole", "some", "none", "picked")}
    write_folder(tmp_path, tensors)
    rows = {"some": slice(2, 5), "none": slice(6, 6), "picked": torch.tensor([4, 1])}
    reads = count_reads(monkeypatch)
    options = {name: {"rows": kept} for name, kept in rows.items()}
    model = get_model(toy_config(tmp_path, {"a": dict.fromkeys(tensors, (6, 4))}, options=options))
    for name, tensor in model.weights.items():
        assert torch.equal(tensor, tensors[name][rows.get(name, slice(None))]), name
    assert sum(size for _, size in reads) == (6 + 3 + 0 + 6) * 16


def test_layers_split_by_rows_ask_for_their_rows(monkeypatch):
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    for module in (linear, vocab_parallel_embedding):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 2)
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 1)
    layers = [
        linear.QKVParallelLinear(16, 4, 4, 2, True, torch.float32, "qkv"),
        linear.MergedColumnParallelLinear(16, [32, 32], False, torch.float32, ["gate", "up"]),
        vocab_parallel_embedding.VocabParallelEmbedding(33, 16, torch.float32, "embed"),
    ]
    for layer in layers:
        for spec in layer.weight_specs():
            assert len(torch.empty(spec.shape)[spec.rows]) * 2 <= spec.shape[0] + 1, spec.name


def test_tensors_are_read_into_one_place(tmp_path):
    tensors = {name: torch.randn(64, 64) for name in "abc"}
    read = [tensor.read(torch.float32) for tensor in weight_utils.read_safetensors(write_folder(tmp_path, tensors))]
    assert len({tensor.data_ptr() for tensor in read}) == 1
    assert torch.equal(read[0], tensors["c"])
