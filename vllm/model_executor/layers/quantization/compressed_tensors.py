# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors checkpoints: integers packed into words, FP8, INT8, and MXFP4.

Formats: https://github.com/vllm-project/compressed-tensors. Bits, groups, zeros and order are what the tensors show;
from the config come block sizes, and whether products round their inputs. INT8 ones do where it says so, each row by
its own largest magnitude, also where it gives static scales of inputs, see ``base.check_input_scales``. Inputs of FP8
weights: see ``fp8``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from vllm.kernels.quantized import QuantizedWeight
from vllm.model_executor.layers.quantization import base
from vllm.model_executor.layers.quantization.fp8 import fp8_matrix
from vllm.model_executor.layers.quantization.gptq import in_order_of_groups
from vllm.model_executor.layers.quantization.mxfp4 import mxfp4_matrix
from vllm.model_executor.model_loader.weight_utils import StoredTensor

_FORMATS = (
    "pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "mxfp4-pack-quantized",
    "mixed-precision", "dense",
)  # fmt: skip


class CompressedTensorsConfig(base.QuantizationConfig):
    method = "compressed-tensors"
    anchors = ("weight", "weight_packed")
    parts = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", *base.INPUT_PARTS)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            raise ValueError(f"quantization_config has config_groups={groups!r}; needed is a mapping of mappings")
        self.groups = [dict(group) for group in groups.values()]
        formats = [config.get("format"), *(group.get("format") for group in self.groups)]
        for name in formats:
            if name is not None and name not in _FORMATS:
                raise ValueError(
                    f"compressed-tensors format {name!r} is not supported; supported: {', '.join(_FORMATS)}"
                )
        sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            raise ValueError(f"compressed-tensors with sparsity {sparsity!r} is not supported; give a dense checkpoint")
        if (config.get("transform_config") or {}).get("config_groups"):
            raise ValueError(
                "compressed-tensors with transform_config (rotated weights) is not supported; give another checkpoint"
            )
        for group in self.groups:
            self._rounds(group)
            weights = group.get("weights") or {}
            if (bits := weights.get("num_bits", 8)) not in (4, 8):
                raise ValueError(f"compressed-tensors with num_bits={bits} is not supported; 4 and 8 are")
        first = (self.groups[0].get("weights") or {}) if self.groups else {}
        kind = "fp" if first.get("type") == "float" else "int"
        self.form = (f"{'mx' * (kind == 'fp' and first.get('num_bits') == 4)}{kind}{first.get('num_bits', 8)}",
                     first.get("group_size") or 1 << 62)  # fmt: skip

    @staticmethod
    def _rounds(group: Mapping[str, Any]) -> str | None:
        """What products round their inputs to by ``group``."""
        inputs = group.get("input_activations")
        if not inputs:
            return None
        if inputs.get("num_bits", 8) != 8 and inputs.get("type") != "float":
            raise ValueError(
                f"compressed-tensors with inputs of {inputs.get('num_bits')} bits is not supported; 8 and unrounded are"
            )
        return "fp8" if inputs.get("type") == "float" else "int8"

    def _group(self, name: str) -> Mapping[str, Any]:
        """The group that matrix ``name`` belongs to: the first that names it, else one for all linear layers."""
        for group in self.groups:
            for target in group.get("targets") or ():
                if re.match(target[3:], name) if target.startswith("re:") else name.endswith(target):
                    return group
        return next((group for group in self.groups if "Linear" in (group.get("targets") or ())), {})

    def is_anchor(self, tensor: StoredTensor, leaf: str) -> bool:
        return len(tensor.shape) == 2 and (
            leaf == "weight_packed" or (leaf == "weight" and tensor.dtype in (base.FP8, torch.int8))
        )

    def matrix(self, name: str, found: dict[str, StoredTensor], shape: tuple[int, ...] | None) -> StoredTensor:
        group, scales = self._group(name), base.part(found, "weight_scale", name)
        weights, rounds = group.get("weights") or {}, self._rounds(group)
        if "weight_packed" in found and found["weight_packed"].dtype is torch.uint8:
            packed = found["weight_packed"]
            return mxfp4_matrix(f"{name}.weight", packed, scales, (packed.shape[0], 2 * packed.shape[1]))
        if "weight" in found and found["weight"].dtype is base.FP8:
            block = weights.get("block_structure")
            return fp8_matrix(name, found, scales, tuple(block) if block else None, rounds == "fp8")
        rounds = None if rounds == "fp8" else rounds
        base.check_input_scales(name, found, rounds is not None)
        if "weight" in found:
            N, K = found["weight"].shape
            return self._integers(name, found["weight"], found, (N, K), 8, rounds, weights.get("group_size"))
        packed, (N, words) = found["weight_packed"], found["weight_packed"].shape
        base.expect(base.part(found, "weight_shape", name), (2,))
        rows, K = base.raw(found["weight_shape"]).tolist()
        bits = next((b for b in (4, 8) if words == -(-K * b // 32)), 0)
        if rows != N or not bits:
            raise ValueError(
                f"{packed.name} [{N}, {words}] cannot hold [{rows}, {K}], which is its weight_shape, in 4 or 8 bits"
            )
        return self._integers(name, packed, found, (N, K), bits, rounds, weights.get("group_size"))

    def _integers(
        self,
        name: str,
        codes: StoredTensor,
        found: dict[str, StoredTensor],
        shape: tuple[int, int],
        bits: int,
        rounds: str | None,
        said: int | None,
    ) -> StoredTensor:
        """``said``: the config's group size, where it gives one."""
        (N, K), scales, zeros = shape, found["weight_scale"], found.get("weight_zero_point")
        groups = scales.shape[1] if len(scales.shape) == 2 else 1
        if not 0 < groups <= K:
            raise ValueError(f"{scales.name} {list(scales.shape)} does not fit a weight {list(shape)}")
        fits = said is not None and said > 0 and -(-K // said) == groups
        group_size = said if fits and said is not None else -(-K // groups)
        base.expect(scales, (N, groups), *([(), (1,), (N,), (1, 1)] if groups == 1 else []))
        packed_zeros = codes.name.endswith("_packed")
        if zeros is not None:
            base.expect(zeros, (-(-N * bits // 32), groups) if packed_zeros else scales.shape)
        format, order = f"int{bits}", found.get("weight_g_idx")
        if order is not None:
            base.expect(order, (K,))

        def read(dtype: torch.dtype, rows: base.Rows) -> QuantizedWeight:
            of_rows = base.take(base.own(scales).reshape(-1, groups).expand(N, groups), rows).contiguous()
            z = None
            if zeros is not None and packed_zeros:
                words = base.raw(zeros).T.contiguous().view(torch.uint8)  # [groups, 4 bytes a word]
                z = (base.nibbles(words) if bits == 4 else words ^ 0x80)[:, :N].T
                z = z if bits == 4 else z.contiguous().view(torch.int8)
            elif zeros is not None:
                z = base.own(zeros).reshape(-1, groups).expand(N, groups)
            z = None if z is None else base.take(z, rows).contiguous()
            g_idx = None if order is None else base.own(order)
            held = base.raw(codes, rows).contiguous()
            if packed_zeros:
                held = held.view(torch.uint8)[:, : math.ceil(K * bits / 8)]
                held = held if bits == 4 else held ^ 0x80
            held = held.view(torch.uint8)
            input_order = None
            if g_idx is not None:
                held, input_order = in_order_of_groups(name, format, held, g_idx, group_size)
            return base.checked_scales(
                f"{name}.weight",
                of_rows,
                lambda s: QuantizedWeight(
                    format,
                    len(held),
                    K,
                    group_size,
                    dtype,
                    held,
                    s,
                    z,
                    rounds,
                    input_order,
                ),
                signed=True,
            )

        def ordered() -> bool:
            assert order is not None
            return bool((base.raw(order) != torch.arange(K, device="cpu") // group_size).any())

        return base.joined(codes, name, shape, format, group_size, read, bool if order is None else ordered)
