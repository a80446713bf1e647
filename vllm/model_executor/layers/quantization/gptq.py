# SPDX-License-Identifier: Apache-2.0
"""GPTQ checkpoints (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel write them, and AWQ's.

GPTQ packs words along the inputs: ``qweight`` int32 [K · bits / 32, N]; ``qzeros`` int32 [K / G, N · bits / 32], each 1
less than what it stands for, but in ``checkpoint_format`` "gptq_v2"; ``scales`` [K / G, N]; ``g_idx`` int32 [K], the
group of each input. AWQ packs along the outputs, in an order of its own: see ``awq``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm.kernels.quantized import QuantizedWeight
from vllm.logger import log_once
from vllm.model_executor.layers.quantization import base
from vllm.model_executor.layers.quantization.awq import awq_matrix
from vllm.model_executor.model_loader.weight_utils import StoredTensor
from vllm.model_executor.parameter import WeightSpec

_WORD_OF_ONES = {4: 0x11111111, 8: 0x01010101}


def in_order_of_groups(
    name: str, format: str, codes: Tensor, g_idx: Tensor, group_size: int
) -> tuple[Tensor, Tensor | None]:
    """Codes [N, bytes] with the columns of each group side by side, and their ``input_order``, None if they were.

    Raises:
        ValueError: the groups are not of ``group_size``, but for the last one.
    """
    K = len(g_idx)
    by_place = torch.arange(K, device="cpu") // group_size
    if torch.equal(g_idx.long(), by_place):
        return codes, None
    order = torch.argsort(g_idx.long(), stable=True)
    if not torch.equal(g_idx.long()[order], by_place):
        raise ValueError(
            f"{name}.g_idx does not put {K} columns into groups of {group_size}; fetch the checkpoint again"
        )
    if format == "int8":
        return codes[:, order], order
    halves = base.nibbles(codes)[:, order]
    return halves[:, ::2] | halves[:, 1::2] << 4, order


class GPTQConfig(base.QuantizationConfig):
    method = "gptq"
    anchors = ("qweight",)
    parts = ("qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        bits, group_size = config.get("bits", config.get("w_bit", 4)), config.get("group_size", 128)
        if bits not in (4, 8):
            raise ValueError(f"{self.method} with {bits} bits is not supported; 4 and 8 are")
        if not isinstance(group_size, int) or (group_size != -1 and group_size < 1):
            raise ValueError(f"quantization_config has group_size={group_size!r}; needed are -1 or 1 and more")
        layout = str(config.get("checkpoint_format") or "gptq").lower()
        if layout not in ("gptq", "gptq_v2"):
            raise ValueError(
                f"checkpoint_format={layout!r} is laid out for one kernel and not supported; gptq and gptq_v2 are"
            )
        self.bits, self.zeros_less_one = bits, layout == "gptq"
        self.symmetric = bool(config.get("sym", False)) or config.get("zero_point") is False
        self.form = (f"int{bits}", group_size if group_size > 0 else 1 << 62)

    def adapt(self, stored: Sequence[StoredTensor], specs: Sequence[WeightSpec]) -> list[StoredTensor]:
        """Also without the biases of zeros that AutoGPTQ gave to layers that have none."""
        wanted, names = {spec.name for spec in specs}, {tensor.name for tensor in stored}

        def is_made_up(tensor: StoredTensor) -> bool:
            name, _, leaf = tensor.name.rpartition(".")
            if leaf != "bias" or tensor.name in wanted or f"{name}.qweight" not in names or tensor.unreadable:
                return False
            return not tensor.read(torch.float32).any()

        return super().adapt([tensor for tensor in stored if not is_made_up(tensor)], specs)

    def matrix(self, name: str, found: dict[str, StoredTensor], shape: tuple[int, ...] | None) -> StoredTensor:
        codes, scales = found["qweight"], base.part(found, "scales", name)
        if len(codes.shape) != 2 or len(scales.shape) != 2 or codes.dtype is not torch.int32:
            raise ValueError(
                f"{codes.name} {list(codes.shape)} {codes.dtype} with {scales.name} {list(scales.shape)}: needed are "
                "two matrices, the former of int32"
            )
        N = scales.shape[1]
        if codes.shape[1] != N and codes.shape[1] * 8 == N:
            if self.method == "gptq":
                log_once(
                    base.logger,
                    logging.WARNING,
                    "the config says gptq, but matrices are packed as awq does: they are read so",
                )
            return awq_matrix(name, codes, base.part(found, "qzeros", name), scales, self.symmetric)
        if self.method == "awq":
            log_once(
                base.logger,
                logging.WARNING,
                "the config says awq, but matrices are packed as gptq does: they are read so",
            )
        return self._gptq_matrix(name, found, shape)

    def _gptq_matrix(self, name: str, found: dict[str, StoredTensor], shape: tuple[int, ...] | None) -> StoredTensor:
        codes, scales, zeros = found["qweight"], found["scales"], base.part(found, "qzeros", name)
        order = found.get("g_idx")
        (words, N), (groups, _) = codes.shape, scales.shape
        K = order.shape[0] if order is not None else shape[1] if shape else words * 32 // self.bits
        bits = words * 32 // max(K, 1)
        if bits not in (4, 8) or words * 32 != K * bits:
            raise ValueError(
                f"{codes.name} {list(codes.shape)} holds {K} columns in {words * 32 / K:g} bits; 4 and 8 are supported"
            )
        base.expect(scales, (groups, N))
        base.expect(zeros, (groups, N * bits // 32))
        said = self.form[1]
        group_size = min(said, K) if -(-K // min(said, K)) == groups else -(-K // groups)
        format = f"int{bits}"

        def read(dtype: torch.dtype, rows: base.Rows) -> QuantizedWeight:
            of_rows = base.take(base.own(scales).T, rows).contiguous()
            words = base.raw(zeros)
            z = (words + _WORD_OF_ONES[bits] if self.zeros_less_one else words.clone()).view(torch.uint8)
            z = base.take((base.nibbles(z) if bits == 4 else z ^ 0x80).T, rows).contiguous()
            of_groups = base.unless_implied(name, z if bits == 4 else z.view(torch.int8), format, self.symmetric)
            g_idx = None if order is None else base.own(order)
            held = base.raw(codes).view(torch.uint8).view(-1, N, 4).transpose(0, 1)
            held = base.take(held, rows).flatten(1)
            held = held if bits == 4 else held ^ 0x80
            input_order = None
            if g_idx is not None:
                held, input_order = in_order_of_groups(name, format, held, g_idx, group_size)
            return base.checked_scales(
                f"{name}.weight",
                of_rows,
                lambda s: QuantizedWeight(
                    format, len(held), K, group_size, dtype, held, s, of_groups, input_order=input_order
                ),
                signed=True,
            )

        def ordered() -> bool:
            assert order is not None
            return bool((base.raw(order) != torch.arange(K, device="cpu") // group_size).any())

        return base.joined(codes, name, (N, K), format, group_size, read, bool if order is None else ordered)


class AWQConfig(GPTQConfig):
    method = "awq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits = config.get("bits", config.get("w_bit", 4))
        super().__init__(
            {**config, "bits": bits, "group_size": config.get("group_size", config.get("q_group_size", 128))}
        )
        version = str(config.get("version") or "gemm").lower()
        if version != "gemm" or bits != 4:
            raise ValueError(
                f"awq with version={version!r} and {bits} bits is not supported; version 'gemm' in 4 bits is"
            )
