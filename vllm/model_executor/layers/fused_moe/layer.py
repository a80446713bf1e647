# SPDX-License-Identifier: Apache-2.0
"""The mixture-of-experts layer: route → dispatch → experts → combine.

Routing happens on the rank that owns the token. ``dispatch`` and ``combine`` are the EP group's: the identity on one
rank, a gather and a reduce-scatter where DP ranks share the experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from vllm import forward_context
from vllm.distributed import get_ep_group, get_tp_group
from vllm.distributed.eplb import first_placement
from vllm.kernels import ops
from vllm.kernels.quantized import QuantizedWeight, put_rows
from vllm.kernels.weights import PackedExperts
from vllm.model_executor.layers.fused_moe.router import Router
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import divide
from vllm.model_executor.parameter import WeightSpec


def _plain(weight: QuantizedWeight | None) -> QuantizedWeight | None:
    """Where new rows can be put: not into what is packed."""
    return weight if weight is not None and weight.kind == "plain" else None


class FusedMoE(Layer):
    """Routed experts: hidden_states [T, hidden] and router_logits [T, E] → [T, hidden]; the ``router`` chooses.

    With expert parallelism each EP rank holds whole experts: a run of them, the first ``E % ep`` ranks one more than
    the rest, which may be none, until ``distributed.eplb`` moves some; else every rank holds a TP slice of each expert.
    ``projections``: an expert's gate, up and down ones in the checkpoint, where expert e is ``{prefix}.{e}``.
    ``bias_names``: those of all experts' biases, [E, 2 * I] with the elements of gate and up in turns, and [E, hidden].
    ``activation`` is that of ``ops.fused_experts``.

    Raises:
        ValueError: without expert parallelism, the intermediate size cannot be divided over the ranks.
    """

    weight_attributes = ("w13", "w2", "b13", "b2")

    def __init__(
        self,
        router: Router,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        prefix: str,
        enable_expert_parallel: bool,
        projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        bias_names: tuple[str, str] | None = None,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        self.router, self.num_experts = router, router.num_experts
        self.hidden_size, self.intermediate_size, self.dtype = hidden_size, intermediate_size, dtype
        self.layer_name, self.projections = prefix, projections
        ep, tp = get_ep_group(), get_tp_group()
        if enable_expert_parallel:
            owners = first_placement(self.num_experts, ep.world_size)
            self.intermediate_slice = slice(None)
            self.local_intermediate = intermediate_size
        else:
            owners = [list(range(self.num_experts))]
            self.local_intermediate = divide(intermediate_size, tp.world_size, f"intermediate size of {prefix}")
            first = tp.rank_in_group * self.local_intermediate
            self.intermediate_slice = slice(first, first + self.local_intermediate)
        self.expert_load: torch.Tensor | None = None
        self.expert_map: torch.Tensor | None = None
        self.place(owners)
        self.w13: PackedExperts | QuantizedWeight | None = None
        self.w2: PackedExperts | QuantizedWeight | None = None
        self.bias_names, self.activation = bias_names, activation
        # Ranks with slices of one expert add up their results: the bias comes from one of them.
        self.adds_down_bias = enable_expert_parallel or tp.rank_in_group == 0
        self.b13: torch.Tensor | None = None
        self.b2: torch.Tensor | None = None
        # of quantised matrices, by (attribute, place, half), until they are packed
        self.input_orders: dict[tuple[str, int, int], torch.Tensor | None] = {}

    def place(self, owners: list[list[int]]) -> None:
        """``owners``: each EP rank's experts, in the order of their places in memory."""
        self.owners, self.local_experts = owners, owners[get_ep_group().rank_in_group if len(owners) > 1 else 0]
        self.local_num_experts = len(self.local_experts)
        if self.local_num_experts == self.num_experts:
            return
        if self.expert_map is None:
            self.expert_map = torch.empty(self.num_experts, dtype=torch.int32)
        expert_map = torch.full((self.num_experts,), -1, dtype=torch.int32, device="cpu")
        expert_map[self.local_experts] = torch.arange(self.local_num_experts, dtype=torch.int32, device="cpu")
        self.expert_map.copy_(expert_map)

    def expert_names(self, expert: int) -> list[str]:
        return [f"{self.layer_name}.{expert}.{projection}" for projection in self.projections]

    def bytes_of(self, place: int) -> list[torch.Tensor]:
        """The memory of the expert in this rank's ``place``, as flat uint8 views."""
        found = []
        for name in self.weight_attributes:
            held = getattr(self, name)
            fields = [held]
            if dataclasses.is_dataclass(held):
                fields = [getattr(held, field.name) for field in dataclasses.fields(held)]
            found += [field[place].view(-1).view(torch.uint8) for field in fields if isinstance(field, torch.Tensor)]
        return found

    def weight_specs(self) -> list[WeightSpec]:
        specs = []
        place_of = {expert: place for place, expert in enumerate(self.local_experts)}
        hidden, inter = self.hidden_size, self.intermediate_size
        for expert in range(self.num_experts):
            local, needed = place_of.get(expert, -1), expert in place_of
            gate, up, down = self.expert_names(expert)
            of_w13: dict[str, Any] = {"rows": self.intermediate_slice, "alike": "w13"}
            of_w2: dict[str, Any] = {"cols": self.intermediate_slice, "alike": "w2"}
            for name, shape, take, more in (
                (gate, (inter, hidden), self._take_w13(local, 0), of_w13),
                (up, (inter, hidden), self._take_w13(local, 1), of_w13),
                (down, (hidden, inter), self._take_w2(local), of_w2),
            ):
                specs.append(WeightSpec(f"{name}.weight", shape, take, needed=needed, quantized=True, **more))
        return specs + self._bias_specs()

    def _bias_specs(self) -> list[WeightSpec]:
        if self.bias_names is None:
            return []
        E, some = self.num_experts, bool(self.local_experts)
        local = torch.tensor(self.local_experts, dtype=torch.int64, device="cpu")
        of_gate_up, of_down = (E, 2 * self.intermediate_size), (E, self.hidden_size)
        gate_up, down = self.bias_names
        return [
            WeightSpec(gate_up, of_gate_up, self._take_b13, torch.float32, needed=some, rows=local),
            WeightSpec(down, of_down, self._take_b2, torch.float32, needed=some and self.adds_down_bias, rows=local),
        ]

    def _take_b13(self, loaded: torch.Tensor) -> None:
        halves = loaded.unflatten(1, (-1, 2))[:, self.intermediate_slice].mT.flatten(1)
        self.b13 = torch.empty(halves.shape, dtype=torch.float32)
        self.b13.copy_(halves)

    def _take_b2(self, loaded: torch.Tensor) -> None:
        self.b2 = torch.empty(loaded.shape, dtype=torch.float32)
        self.b2.copy_(loaded)

    def _take_w13(self, expert: int, half: int) -> Callable[[torch.Tensor], None]:
        def take(loaded: torch.Tensor | QuantizedWeight) -> None:
            rows = 2 * self.local_intermediate
            if isinstance(loaded, QuantizedWeight):
                assert not isinstance(self.w13, PackedExperts), f"{self.layer_name}: experts in two forms"
                first, part = half * self.local_intermediate, self._in_its_order(loaded, "w13", expert, half)
                self.w13 = put_rows(_plain(self.w13), part, self.local_num_experts, rows, expert, first, gated=True)
                return
            assert not isinstance(self.w13, QuantizedWeight), f"{self.layer_name}: experts in two forms"
            if self.w13 is None:
                self.w13 = ops.empty_experts(self.local_num_experts, rows, self.hidden_size, self.dtype, True)
            ops.repack_expert_weight(self.w13, expert, loaded, half)

        return take

    def _take_w2(self, expert: int) -> Callable[[torch.Tensor], None]:
        def take(loaded: torch.Tensor | QuantizedWeight) -> None:
            if isinstance(loaded, QuantizedWeight):
                assert not isinstance(self.w2, PackedExperts), f"{self.layer_name}: experts in two forms"
                part = self._in_its_order(loaded.columns(self.intermediate_slice), "w2", expert)
                self.w2 = put_rows(_plain(self.w2), part, self.local_num_experts, self.hidden_size, expert, 0)
                return
            assert not isinstance(self.w2, QuantizedWeight), f"{self.layer_name}: experts in two forms"
            if self.w2 is None:
                columns = self.local_intermediate
                self.w2 = ops.empty_experts(self.local_num_experts, self.hidden_size, columns, self.dtype)
            ops.repack_expert_weight(self.w2, expert, loaded[:, self.intermediate_slice])

        return take

    def _in_its_order(self, loaded: QuantizedWeight, name: str, expert: int, half: int = 0) -> QuantizedWeight:
        self.input_orders[name, expert, half] = loaded.input_order
        return dataclasses.replace(loaded, input_order=None)

    def _settle_orders(self) -> None:
        """Act-order: the columns of w2 meet rows of w13 in the same order, those of w13 the inputs by ``input_order``.

        Raises:
            ValueError: gate and up of an expert have their columns in two orders, or there are biases.
        """
        orders, self.input_orders = self.input_orders, {}
        w13, inter = self.w13, self.local_intermediate
        if not orders or not isinstance(w13, QuantizedWeight):
            return
        if all(order is None for order in orders.values()):
            self.w13 = dataclasses.replace(w13, input_order=None)
            return
        if self.b13 is not None:
            raise ValueError(
                f"{self.layer_name}: experts with biases, quantised in the order of their activations (act-order), are "
                "not supported; use a checkpoint without desc_act"
            )
        of_inputs = torch.arange(w13.K).repeat(w13.E, 1)
        for place, expert in enumerate(self.local_experts):
            gate, up = orders.get(("w13", place, 0)), orders.get(("w13", place, 1))
            if (gate is None) != (up is None) or not (gate is None or up is None or torch.equal(gate, up)):
                raise ValueError(
                    f"{' and '.join(self.expert_names(expert)[:2])} have their columns in different orders (act-order) "
                    "but are one product; use a checkpoint without desc_act"
                )
            if gate is not None:
                of_inputs[place] = gate
            if (order := orders.get(("w2", place, 0))) is not None:
                both = torch.cat((order, order + inter)).to(w13.codes.device)
                for tensor in (w13.codes, w13.scales, w13.zeros):
                    if tensor is not None:
                        tensor[place] = tensor[place][both]
        self.w13 = dataclasses.replace(w13, input_order=of_inputs)

    def process_weights_after_loading(self) -> None:
        self._settle_orders()
        for name in ("w13", "w2"):
            weight = getattr(self, name)
            if isinstance(weight, QuantizedWeight) and weight.kind == "plain":
                setattr(self, name, ops.pack_quantized_weight(weight))

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.w13, QuantizedWeight)

    def forward(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, tp_partial: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``tp_partial`` [T, hidden]: a shared expert's share, partial over TP, that rides in the combine's sum.
        Its pad rows are set to 0."""
        forward_context.set_current_layer(self.layer_name)
        slot_mapping = forward_context.get_forward_context().slot_mapping
        assert slot_mapping is not None, f"{self.layer_name}: the forward context says nothing of pad rows"
        weights, ids = self.router(router_logits, slot_mapping)
        if self.expert_load is not None:
            slots = torch.where(ids < 0, self.num_experts, ids).flatten().long()
            self.expert_load.scatter_add_(0, slots, torch.ones_like(slots))
        if tp_partial is not None:
            ops.zero_padding_rows(tp_partial, slot_mapping)
        ep = get_ep_group()
        sent = ep.dispatch(hidden_states, weights, ids)
        return ep.combine(self.experts(sent.hidden_states, sent.topk_weights, sent.topk_ids), sent, tp_partial)

    def experts(self, hidden_states: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """This rank's share of the experts' output for R rows: [R, hidden], exactly 0 in rows with no expert here."""
        if not self.local_num_experts:
            return torch.zeros_like(hidden_states)
        if self.expert_map is not None:
            ids = torch.where(ids >= 0, self.expert_map[ids.clamp(min=0)], -1)
        assert self.w13 is not None, f"{self.layer_name}: no expert was loaded"
        assert self.w2 is not None, f"{self.layer_name}: no expert was loaded"
        return ops.fused_experts(
            hidden_states, self.w13, self.w2, ids, weights, None, self.b13, self.b2, self.activation
        )
