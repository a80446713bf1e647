# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint's files to a module's weights: find, validate by headers, then stream tensor by tensor."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from vllm.kernels.quantized import QuantizedWeight, dequantize, uncut
from vllm.logger import init_logger
from vllm.model_executor.parameter import WeightSpec

logger = init_logger(__name__)

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CODES = {  # parts of quantised matrices
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", None),
}
FLOATS = tuple(_FLOATS.values())
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class StoredCodes:
    """A matrix [N, K] as a file holds it quantised.

    read: ``read(dtype, rows)``: those rows, all for None, for products in ``dtype``; like ``StoredTensor.read``, maybe
        in memory that the next read uses again.
    ordered: whether the columns have an order of their own (``QuantizedWeight.input_order``); it may read a little.
    """

    format: str
    group_size: int
    read: Callable[[torch.dtype, slice | torch.Tensor | None], QuantizedWeight]
    ordered: Callable[[], bool] = bool


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a file holds it.

    read: ``read(dtype)`` returns the whole tensor, contiguous, on CPU, maybe in memory that the next read uses again.
    read_rows: ``read_rows(dtype, rows)``, where it costs less: the same for a slice of the first dimension.
    dtype: as stored; what ``read`` gives for it is bit for bit what the file holds.
    codes: set where the tensor is a matrix that is stored quantised.
    stored_as: the name of its storage type in a GGUF file.
    unreadable: why the tensor cannot be used (its storage type), or None.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[torch.dtype], torch.Tensor]
    unreadable: str | None = None
    read_rows: Callable[[torch.dtype, slice], torch.Tensor] | None = None
    dtype: torch.dtype | None = None
    codes: StoredCodes | None = None
    stored_as: str = ""

    def rows(self, dtype: torch.dtype, rows: slice | torch.Tensor | None) -> torch.Tensor:
        """Those rows of the tensor, all of it for None."""
        if self.read_rows is not None and isinstance(rows, slice):
            return self.read_rows(dtype, rows)
        whole = self.read(dtype)
        return whole if rows is None else whole[rows]

    def wanted(self, spec: WeightSpec, dtype: torch.dtype) -> torch.Tensor | QuantizedWeight:
        """What ``spec.take`` is to be given, in ``dtype`` where the spec names none."""
        if self.codes is None:
            return self.rows(spec.dtype or dtype, spec.rows)
        weight = self.codes.read(spec.dtype or dtype, spec.rows)
        return weight if spec.quantized else dequantize(weight).to(weight.dtype)

    def cut(self, spec: WeightSpec) -> str | None:
        """Why ``spec`` cannot keep its columns of the matrix quantised; None where it can."""
        if self.codes is None or spec.cols is None or not spec.quantized:
            return None
        K, columns = self.shape[1], spec.cols
        ordered = columns.indices(K)[:2] != (0, K) and self.codes.ordered()
        return uncut(self.codes.format, K, self.codes.group_size, columns, ordered)


def resolve_model_path(model: str, revision: str | None = None) -> Path:
    """The local folder or GGUF file of ``model``: a path, or a hub id whose snapshot is fetched or found in the cache.

    ``HF_HUB_OFFLINE=1`` keeps ``huggingface_hub`` to its cache. Raises FileNotFoundError when there is no such model.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model.endswith(".gguf") or model.startswith((".", "~", os.sep)) or not 1 <= len(path.parts) <= 2:
        raise FileNotFoundError(
            f"model={model!r}: no such file or folder; give a folder with config.json, or a .gguf file"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"model={model!r} is no local folder and its hub snapshot (revision={revision}) cannot be had: {error}. "
            f"Give a local path, or check the id, the network and HF_HUB_OFFLINE={os.environ.get('HF_HUB_OFFLINE')}"
        ) from error


def safetensors_files(folder: Path, named: str | None = None) -> list[Path]:
    """The safetensors files of a model folder, in transformers' order of preference: the file or index that its config
    names (``transformers_weights``, here ``named``), model.safetensors, the files of its index, any others.

    Raises FileNotFoundError naming what the folder lacks, ValueError for an unreadable index or for weights that are
    stored only as pickles.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json; give the folder of a Hugging Face model")
    if named is not None and not (folder / named).is_file():
        raise FileNotFoundError(f"{folder} lacks {named}, which transformers_weights in its config names; fetch it")
    index = folder / (named if named is not None and named.endswith(".index.json") else _INDEX)
    single = folder / (named or _SINGLE)
    if single.suffix == ".safetensors" and single.is_file():
        if index.is_file():
            logger.warning(
                "%s has both %s and %s; the former is loaded, as by transformers", folder, single.name, index.name
            )
        return [single]
    if index.is_file():
        try:
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index} is no safetensors index ({error!r}); fetch it again") from error
        lacking = [file.name for file in files if not file.is_file()]
        if lacking:
            raise FileNotFoundError(f"{folder} lacks {', '.join(lacking)}, which {index.name} lists; fetch them again")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} has its weights only as pickles ({', '.join(pickles)}), which are not read; convert them: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    ggufs = sorted(p.name for p in folder.glob("*.gguf"))
    hint = f"; to load {ggufs[0]}, give that file's path" if ggufs else ""
    raise FileNotFoundError(f"{folder} has no weights: neither *.safetensors nor {_INDEX}{hint}")


class ReadBuffer:
    """Memory for one tensor at a time. A block of its own for each costs more than the read: the system hands it out
    page by page, all zeroed."""

    def __init__(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, size: int) -> torch.Tensor:
        if self._data.numel() < size:
            del self._data
            self._data = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._data[:size]


def read_range(file: Path, offset: int, size: int, buffer: ReadBuffer | None = None) -> torch.Tensor:
    """``size`` bytes of ``file`` from ``offset``, as a uint8 tensor: of its own, or in ``buffer``.

    Plain reads, not a mapping: pages of a mapped file count as this process's memory until it is unmapped, and a
    file cut short under a mapping kills the process.
    """
    data = (buffer or ReadBuffer()).take(size)
    with file.open("rb") as stream:
        stream.seek(offset)
        found = stream.readinto(data.numpy().data)
    if found != size:
        raise ValueError(f"{file} ends {size - found} bytes before its header says; fetch the file again")
    return data


def read_safetensors(files: Sequence[Path], transposed_experts: bool = False) -> list[StoredTensor]:
    """Every tensor of ``files``, in storage order; reads the headers only. ``transposed_experts``: stacks of experts
    are [E, K, N], the columns of gate and up in turns (gpt-oss)."""
    tensors: list[StoredTensor] = []
    buffer = ReadBuffer()
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"{file} is truncated, corrupt or no safetensors file ({error}); fetch it again "
                "(with git lfs, when it is a pointer file)"
            ) from error
        with file.open("rb") as stream:
            header_size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(header_size))
        header.pop("__metadata__", None)
        tensors += [
            _stored(part, part_entry, file, 8 + header_size, buffer)
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
            for part, part_entry in _unstack_experts(name, entry, transposed_experts)
        ]
    return tensors


def _unstack_experts(name: str, entry: dict, transposed: bool) -> Iterator[tuple[str, dict]]:
    """The header entries of each expert where ``entry`` stacks them all: ``….experts.gate_up_proj`` [E, 2·I, H] and
    ``….experts.down_proj`` [E, H, I] (Qwen3.5); of ``entry`` itself otherwise. So a rank reads its own experts only."""
    stack, _, kind = name.rpartition(".")
    if not stack.endswith(".experts") or kind not in ("gate_up_proj", "down_proj") or len(entry["shape"]) != 3:
        yield name, entry
        return
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    (num_experts, rows, cols), (begin, end) = entry["shape"], entry["data_offsets"]
    if transposed:
        size = (end - begin) // num_experts
        for index in range(num_experts * len(parts)):
            expert, part = divmod(index, len(parts))
            at = [begin + expert * size, begin + (expert + 1) * size]
            every = {**entry, "shape": [rows, cols], "data_offsets": at, "columns": slice(part, None, len(parts))}
            yield f"{stack}.{expert}.{parts[part]}.weight", every
        return
    size = (end - begin) // (num_experts * len(parts))
    for index in range(num_experts * len(parts)):
        yield (
            f"{stack}.{index // len(parts)}.{parts[index % len(parts)]}.weight",
            {
                **entry,
                "shape": [rows // len(parts), cols],
                "data_offsets": [begin + index * size, begin + (index + 1) * size],
            },
        )


def _stored(name: str, entry: dict, file: Path, data_start: int, buffer: ReadBuffer) -> StoredTensor:
    begin, end = entry["data_offsets"]
    kind, shape = _FLOATS.get(entry["dtype"]) or _CODES.get(entry["dtype"]), entry["shape"]

    def read(dtype: torch.dtype) -> torch.Tensor:
        return read_from(dtype, begin, end).view(shape)

    def read_rows(dtype: torch.dtype, rows: slice) -> torch.Tensor:
        start, stop, step = rows.indices(shape[0])
        assert step == 1, f"{name}: rows in steps of {step}"
        row = (end - begin) // max(shape[0], 1)
        return read_from(dtype, begin + start * row, begin + stop * row).view(-1, *shape[1:])

    def read_from(dtype: torch.dtype, first: int, last: int) -> torch.Tensor:
        assert kind is not None, f"{name} is stored as {entry['dtype']}"
        return read_range(file, data_start + first, last - first, buffer).view(kind).to(dtype)

    unreadable = None if entry["dtype"] in _FLOATS else f"stored as {entry['dtype']}"
    if (columns := entry.get("columns")) is not None:
        turned = shape[1] // columns.step, shape[0]
        return StoredTensor(name, turned, lambda dtype: read(dtype)[:, columns].T.contiguous(), unreadable, None, kind)
    return StoredTensor(name, tuple(shape), read, unreadable, read_rows, kind)


def dummy_tensors(specs: Sequence[WeightSpec], seed: int) -> list[StoredTensor]:
    """Random weights for every required spec, the same for a name and seed in every parallel layout.

    Matrices are uniform with variance 1 / last dimension, so that activations neither vanish nor grow with depth;
    vectors (norms, biases) are uniform in [0.5, 1.5).
    """

    def stored(name: str, shape: tuple[int, ...]) -> StoredTensor:
        def read(dtype: torch.dtype) -> torch.Tensor:
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            unit = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
            if len(shape) < 2:
                return unit.add_(0.5).to(dtype)
            return unit.sub_(0.5).mul_(math.sqrt(12.0 / shape[-1])).to(dtype)

        return StoredTensor(name, shape, read)

    return [stored(spec.name, tuple(spec.shape)) for spec in specs if not spec.optional]


def without_extra_layers(
    stored: Sequence[StoredTensor], specs: Sequence[WeightSpec], ignored: Sequence[str], origin: str
) -> list[StoredTensor]:
    """``stored`` without the decoder layers past the last one of ``specs``: a config may ask for fewer layers. Those
    that are ``ignored`` stay, and go without a word."""
    layer = re.compile(r"^(?:\w+\.)*?layers\.(\d+)\.")
    last = max((int(found[1]) for spec in specs if (found := layer.match(spec.name))), default=None)
    if last is None:
        return list(stored)
    kept = [
        t
        for t in stored
        if not (found := layer.match(t.name)) or int(found[1]) <= last or any(re.search(p, t.name) for p in ignored)
    ]
    if len(kept) < len(stored):
        logger.warning(
            "%d tensors of %s belong to layers past %d, the last by its config: unread",
            len(stored) - len(kept),
            origin,
            last,
        )
    return kept


def match_specs(
    specs: Sequence[WeightSpec], stored: Sequence[StoredTensor], ignored: Sequence[str], origin: str
) -> list[tuple[WeightSpec, StoredTensor]]:
    """Each needed spec with its stored tensor, in storage order.

    Raises one ValueError that names every missing, extra, misshapen, unreadable or twice stored tensor of ``origin``.
    ``ignored`` are regular expressions (``re.search``) of stored tensors that are rightly unused.
    """
    wanted = {spec.name: spec for spec in specs}
    twice = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    assert not twice, f"{len(specs)} specs for {len(wanted)} tensors: several modules want {twice}"
    found = Counter(tensor.name for tensor in stored)
    faults = {
        "stored twice": [name for name, count in found.items() if count > 1],
        "missing": [spec.name for spec in specs if not spec.optional and spec.name not in found],
        "extra": [
            f"{tensor.name} {tensor.shape}"
            for tensor in stored
            if tensor.name not in wanted and not any(re.search(pattern, tensor.name) for pattern in ignored)
        ],
        "misshapen": [
            f"{tensor.name}: expected {tuple(wanted[tensor.name].shape)}, found {tensor.shape}"
            for tensor in stored
            if tensor.name in wanted and tuple(wanted[tensor.name].shape) != tensor.shape
        ],
        "unreadable": [
            f"{tensor.name}: {tensor.unreadable}" for tensor in stored if tensor.name in wanted and tensor.unreadable
        ],
        "not divisible over the ranks": [
            f"{tensor.name}: {why}"
            for tensor in stored
            if tensor.name in wanted and (why := tensor.cut(wanted[tensor.name]))
        ],
        "unlike the others of their layer": _unlike(wanted, stored),
    }
    if any(faults.values()):
        lines = [f"{len(names)} {kind}: {'; '.join(names)}" for kind, names in faults.items() if names]
        raise ValueError(
            f"the tensors of {origin} do not fit the model that its config describes:\n  "
            + "\n  ".join(lines)
            + "\nGive a checkpoint and config of the same model, with float weights or those that its "
            "quantization_config describes"
        )
    return [(wanted[t.name], t) for t in stored if t.name in wanted and wanted[t.name].needed]


def _unlike(wanted: dict[str, WeightSpec], stored: Sequence[StoredTensor]) -> list[str]:
    """Those whose ``alike`` are mostly stored in another format, and those of a layer that are float, or not, where its
    first ones are not, or are."""
    layers: dict[int, dict[str, list[tuple[str, str, str]]]] = {}
    for tensor in stored:
        spec, codes = wanted.get(tensor.name), tensor.codes
        if spec is not None and spec.alike is not None:
            format, groups = (codes.format, f" in groups of {codes.group_size}") if codes else ("float", "")
            layers.setdefault(id(spec.owner), {}).setdefault(spec.alike, []).append((tensor.name, format, groups))
    faults = []
    for kinds in layers.values():
        usual = {
            alike: Counter(tensor[1:] for tensor in tensors).most_common(1)[0][0] for alike, tensors in kinds.items()
        }
        first = next(iter(usual.values()))
        for alike, tensors in kinds.items():
            right = usual[alike] if (usual[alike][0] == "float") == (first[0] == "float") else first
            faults += [f"{t[0]} is {t[1]}{t[2]}, others are {right[0]}{right[1]}" for t in tensors if t[1:] != right]
    return faults


@contextlib.contextmanager
def freed_memory_goes_back() -> Iterator[None]:
    """Within it glibc maps every block of 64 KiB or more on its own and unmaps it when it is freed.

    Else a large temporary leaves a hole in the heap that an aligned block of the same size does not fit into, so
    copying a model tensor by tensor would hold it twice. After it steps reuse memory without asking the kernel: blocks
    come from the heap, which keeps up to 16 MiB that are free at its end.
    """
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    m_trim_threshold, m_mmap_threshold = -1, -3
    if mallopt is not None:
        mallopt(m_mmap_threshold, 64 << 10)
    try:
        yield
    finally:
        if mallopt is not None:
            mallopt(m_mmap_threshold, 32 << 20)
            mallopt(m_trim_threshold, 16 << 20)
            libc.malloc_trim(0)


def load_weights(model: nn.Module, pairs: Sequence[tuple[WeightSpec, StoredTensor]], dtype: torch.dtype) -> None:
    """Hand every tensor to its spec, one at a time, and let each module process its weights once it has them all.

    ``dtype`` serves specs without one. Beside the model itself at most one stored tensor, its cast and the modules
    that have only part of their tensors are in memory.
    """
    pending = Counter(id(spec.owner) for spec, _ in pairs)
    processed: set[int] = set()

    def process(module: nn.Module) -> None:
        hook: Any = getattr(module, "process_weights_after_loading", None)
        if hook is not None:
            hook()
        processed.add(id(module))

    for spec, tensor in pairs:
        assert spec.owner is not None, f"{spec.name} has no owner; list specs with collect_weight_specs"
        spec.take(tensor.wanted(spec, dtype))
        pending[id(spec.owner)] -= 1
        if not pending[id(spec.owner)]:
            process(spec.owner)
    for module in model.modules():
        if id(module) not in processed:
            process(module)
