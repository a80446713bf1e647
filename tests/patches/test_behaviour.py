# SPDX-License-Identifier: Apache-2.0
"""Upstream's own code, without and with the patches: without them the fault shows, with them it is gone.

Two ways to run it. Functions taken out of a released file run here, their surroundings stubbed; a stand-in for a
kernel is called that. Whole modules run in the environment of ``upstream_env``, over Gloo (marker ``upstream``).
"""

from __future__ import annotations
import __future__

import ast
import inspect
import json
import sys
import textwrap
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import upstream_env
from upstream_releases import CannotFetch, fetch

from patches.__main__ import main
from patches.series import load_series

SERIES = load_series()
PATCHES = {patch.number: patch for patch in SERIES.patches}
DEFAULT_RUN = {*SERIES.releases[:2], *SERIES.releases[-2:]}
ATTENTION = "vllm/model_executor/layers/attention/attention.py"
MLA = "vllm/model_executor/layers/attention/mla_attention.py"
INPUT_BATCH = "vllm/v1/worker/gpu/input_batch.py"
RUNNER_V1 = "vllm/v1/worker/gpu_model_runner.py"
RUNNER_V2 = "vllm/v1/worker/gpu/model_runner.py"
XPU_OPS = "vllm/_xpu_ops.py"
XPU_MOE = "vllm/model_executor/layers/fused_moe/experts/xpu_moe.py"


def releases_of(number: str) -> Any:
    """Every release that needs the patch; those outside the default run are slow."""
    needed = [release for release in SERIES.releases if PATCHES[number].states[release][0] == "needed"]
    kept = DEFAULT_RUN if DEFAULT_RUN.intersection(needed) else {needed[-1]}
    marks = [pytest.param(r, marks=[] if r in kept else pytest.mark.slow) for r in needed]
    return pytest.mark.parametrize("release", marks)


def taken_out(release: str, path: str, qualname: str, numbers: list[str], names: dict[str, Any]) -> Callable[..., Any]:
    """The function ``qualname`` of a released file, with the hunks of ``numbers``, in a namespace of ``names``."""
    try:
        text = (fetch(release) / path).read_text()
    except CannotFetch as reason:
        pytest.skip(str(reason))
    for number in numbers:
        for hunk in PATCHES[number].hunks:
            if hunk.path == path:
                text = hunk.apply(text) or pytest.fail(f"{number} does not fit {path} of {release}")
    node: Any = ast.parse(text)
    for part in qualname.split("."):
        node = next(child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part)
    source = textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))
    namespace = dict(names)
    exec(compile(source, path, "exec", __future__.annotations.compiler_flag, True), namespace)
    return namespace[node.name]


class Stop(Exception):
    """Raised by a stub where the lines under test have run."""


@pytest.fixture
def poison(nan_poison: None) -> None:
    """Every uninitialised byte is NaN, as on a device that reuses memory."""


def forward_context(mode: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(cudagraph_runtime_mode=types.SimpleNamespace(name=mode))


# --- fix 1 ---------------------------------------------------------------------------------------------------------


@releases_of("0003")
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize(("tokens", "requests", "limit"), [(30, 4, 8), (9, 2, 5), (26, 1, 26), (7, 7, 1)])
def test_v2_dummy_split(release: str, patched: bool, tokens: int, requests: int, limit: int):
    names = {"torch": torch, "np": np, "random_uuid": lambda: "id"}
    make_dummy = taken_out(release, INPUT_BATCH, "InputBatch.make_dummy", ["0003"] if patched else [], names)
    size = 40
    buffers = types.SimpleNamespace(device="cpu", max_num_reqs=8)
    for name in ("seq_lens", "query_start_loc", "input_ids", "positions", "is_padding"):
        setattr(buffers, name, torch.full((size,), 99, dtype=torch.int32))
    batch = make_dummy(dict, requests, tokens, buffers)
    lengths = batch["num_scheduled_tokens"].tolist()
    assert sum(lengths) == tokens
    assert batch["seq_lens"].tolist() == lengths
    assert buffers.seq_lens[requests:].eq(0).all()
    assert batch["query_start_loc"].tolist() == [0, *np.cumsum(lengths)]
    if patched:
        assert max(lengths) == -(-tokens // requests) <= limit
    elif tokens == 30:
        assert max(lengths) == 9 > limit


@releases_of("0002")
@pytest.mark.parametrize("patched", [False, True])
def test_v2_idle_dummy(release: str, patched: bool):
    """An idle rank, one dummy request, padded to 30 rows because another rank has them; max_model_len is 8."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Descriptor:
        cg_mode: str
        num_tokens: int
        num_reqs: int | None
        max_query_len: int | None = None
        num_ubatches: int = 1

    modes = types.SimpleNamespace(NONE="none", FULL="full")
    made: list[int] = []

    def make_dummy(num_reqs: int, num_tokens: int, *_: Any, **__: Any) -> None:
        assert num_tokens == 30
        made.append(num_reqs)
        raise Stop

    def run(mode: str, dp_size: int, max_num_reqs: int = 16, requests: int = 1) -> int:
        made.clear()
        agreed = Descriptor(mode, 30, requests), None
        names = {
            "CUDAGraphMode": modes,
            "InputBatch": types.SimpleNamespace(make_dummy=make_dummy),
            "dispatch_cg_and_sync_dp": lambda *_, **__: agreed,
            "sync_cudagraph_and_dp_padding": lambda *_, **__: agreed,
            "get_uniform_token_count": lambda *_: None,
            "BatchExecutionDescriptor": Descriptor,
        }
        execute = taken_out(release, RUNNER_V2, "GPUModelRunner.execute_model", ["0002"] if patched else [], names)
        runner = MagicMock(dp_size=dp_size, max_model_len=8, max_num_reqs=max_num_reqs, lora_config=None)
        runner.is_encoder_decoder, runner.pcp_manager = False, None
        runner.gather_batch_req_state.return_value = (None, None)
        runner.cudagraph_manager.dispatch.return_value = agreed[0]
        work = MagicMock(num_scheduled_tokens=dict.fromkeys(range(requests), 1), total_num_scheduled_tokens=requests)
        with pytest.raises(Stop):
            inspect.unwrap(execute)(runner, work, dummy_run=True)
        return made[0]

    assert run("none", dp_size=2) == (4 if patched else 1)  # 4 requests of at most 8 tokens hold 30
    assert run("none", dp_size=2, requests=6) == 6
    assert run("none", dp_size=2, max_num_reqs=3) == (3 if patched else 1)
    assert run("full", dp_size=2) == 1
    assert run("none", dp_size=1) == 1


# --- fixes 7, 8, 8b, 2 ---------------------------------------------------------------------------------------------


def attention(release: str, patched: bool, mode: str, metadata: Any, rows: int = 30) -> torch.Tensor:
    """Upstream's attention op around a stand-in backend that writes only the real rows."""

    def write(layer, query, key, value, kv_cache, meta, output, **_: Any):
        if meta is not None:
            output[: meta.written] = 1.0

    layer = types.SimpleNamespace(impl=types.SimpleNamespace(forward=write))
    names = {
        "torch": torch,
        "get_attention_context": lambda name: (metadata, layer, None, None),
        "get_forward_context": lambda: forward_context(mode),
        "_resolve_layer_name": lambda name: name,
        "maybe_transfer_kv_layer": lambda function: function,
        "eager_break_during_capture": lambda function: function,
    }
    op = taken_out(release, ATTENTION, "unified_attention_with_output", ["0008"] if patched else [], names)
    output = torch.empty(rows, 2, 4)
    op(None, None, None, output, "layer")
    return output


@releases_of("0008")
def test_attention_pad_rows(release: str, poison: None):
    meta = types.SimpleNamespace(num_actual_tokens=26, written=26)
    assert attention(release, False, "NONE", meta)[26:].isnan().all()
    output = attention(release, True, "NONE", meta)
    assert output[:26].eq(1).all()
    assert output[26:].eq(0).all()
    # In a full graph the metadata calls all 30 rows real, and the backend fills the 26 of the replayed batch.
    graph = types.SimpleNamespace(num_actual_tokens=30, written=26)
    assert attention(release, False, "FULL", graph)[26:].isnan().all()
    assert attention(release, True, "FULL", graph)[26:].eq(0).all()
    # An idle rank of runner V1 has no metadata.
    assert attention(release, False, "NONE", None).isnan().all()
    assert attention(release, True, "NONE", None).eq(0).all()
    # No padding, and metadata without a count.
    whole = types.SimpleNamespace(num_actual_tokens=30, written=30)
    assert attention(release, True, "NONE", whole).eq(1).all()
    assert attention(release, True, "NONE", types.SimpleNamespace(written=5))[5:].eq(0).all()


@releases_of("0009")
@pytest.mark.parametrize("patched", [False, True])
def test_mla_pad_rows(release: str, patched: bool, poison: None):
    class Query:
        def __getitem__(self, rows: Any) -> None:
            raise Stop

    for mode, first_zero in (("NONE", 26), ("FULL", 0)):
        names = {
            "torch": torch,
            "get_forward_context": lambda mode=mode: forward_context(mode),
            "_detect_output_quant_key": lambda *_: None,
            "is_quantized_kv_cache": lambda _: False,
            "get_dcp_group": MagicMock(),
        }
        forward = taken_out(release, MLA, "MLAAttention.forward_impl", ["0009"] if patched else [], names)
        layer = MagicMock(use_pcp=False, kv_cache_dtype="auto")
        layer.impl.dcp_world_size = 1
        output = torch.empty(30, 8)
        with pytest.raises(Stop):
            forward(layer, Query(), None, None, None, types.SimpleNamespace(num_actual_tokens=26), output)
        assert output[:first_zero].isnan().all()
        assert output[first_zero:].eq(0).all() if patched else output.isnan().all()


@releases_of("0010")
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_qwen3_next_output(release: str, patched: bool, kind: str, poison: None):
    path = "vllm/model_executor/models/qwen3_next.py"
    forward = taken_out(release, path, "Qwen3NextDecoderLayer.forward", ["0010"] if patched else [], {"torch": torch})

    def attend(hidden_states: torch.Tensor, output: torch.Tensor, **_: Any) -> None:
        output[:26] = 1.0

    layer = types.SimpleNamespace(
        layer_type=kind,
        linear_attn=attend,
        self_attn=attend,
        layer_scale=False,
        input_layernorm=lambda hidden: hidden,
        post_attention_layernorm=lambda hidden, residual: (hidden, residual + hidden),
        mlp=lambda hidden: hidden,
    )
    hidden, residual = forward(layer, torch.zeros(30, 4), None)
    assert hidden[:26].eq(1).all()
    assert residual[26:].eq(0).all() if patched else residual[26:].isnan().all()


class Kernel:
    """Stand-in for an XPU GDN kernel: fills the real rows; one of up to v0.1.8 wants no others."""

    def __init__(self, wants_equal_counts: bool):
        self.wants_equal_counts = wants_equal_counts
        self.rows: tuple[int, ...] = ()

    def gdn_attention(self, core, z, qkvz, ba, *_: Any, num_actual_tokens: int, **__: Any) -> None:
        self.rows = (core.shape[0], z.shape[0], qkvz.shape[0], ba.shape[0], num_actual_tokens)
        if self.wants_equal_counts:
            assert core.size(0) == num_actual_tokens, f"{core.size(0)} rows, {num_actual_tokens} real tokens"
        core[:num_actual_tokens] = qkvz[:num_actual_tokens, :1, None]
        z[:num_actual_tokens] = ba[:num_actual_tokens, :1, None]


def gdn(release: str, numbers: list[str], kernel: Kernel, monkeypatch, mode: str = "NONE", idle: bool = False):
    """Core and gate after upstream's XPU GDN op on 30 rows of which 26 are real."""

    class GDNAttentionMetadata(types.SimpleNamespace):
        def __getattr__(self, name: str) -> None:
            return None

    metadata = {"layer": GDNAttentionMetadata(num_actual_tokens=30 if mode == "FULL" else 26)}
    layer = MagicMock(prefix="layer")
    context = forward_context(mode)
    context.no_compile_layers, context.attn_metadata = {"layer": layer}, None if idle else metadata
    for name, content in {
        "vllm.forward_context": {"get_forward_context": lambda: context},
        "vllm.v1.attention.backends.gdn_attn": {"GDNAttentionMetadata": GDNAttentionMetadata},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    fake_torch = types.SimpleNamespace(
        ops=types.SimpleNamespace(_xpu_C=kernel), get_device_module=torch.get_device_module, int32=torch.int32
    )
    op = taken_out(release, XPU_OPS, "_gdn_attention_core_xpu_impl", numbers, {"torch": fake_torch})
    core, z = torch.zeros(30, 2, 4), torch.empty(30, 2, 4)
    op(core, z, torch.full((30, 8), 2.0), torch.full((30, 8), 3.0), "layer")
    return core, z


@releases_of("0011")
def test_gdn_gate_pad_rows(release: str, poison: None, monkeypatch: pytest.MonkeyPatch):
    kernel = Kernel(wants_equal_counts=False)
    core, z = gdn(release, [], kernel, monkeypatch)
    assert z[26:].isnan().all()
    assert (core * z)[26:].isnan().all(), "zero rows times a garbage gate"
    core, z = gdn(release, ["0011"], kernel, monkeypatch)
    assert z[:26].eq(3).all()
    assert z[26:].eq(0).all()
    assert core[:26].eq(2).all()
    assert core[26:].eq(0).all()
    _, z = gdn(release, ["0011"], kernel, monkeypatch, idle=True)
    assert z.eq(0).all()
    assert gdn(release, [], kernel, monkeypatch, idle=True)[1].isnan().all()
    kernel.gdn_attention = lambda core, z, *_, **__: z[:26].fill_(3.0)  # a replay with 26 real rows
    assert gdn(release, ["0011"], kernel, monkeypatch, mode="FULL")[1][26:].eq(0).all()
    assert gdn(release, [], kernel, monkeypatch, mode="FULL")[1][26:].isnan().all()


@releases_of("0012")
def test_gdn_real_row_views(release: str, poison: None, monkeypatch: pytest.MonkeyPatch):
    kernel = Kernel(wants_equal_counts=True)
    with pytest.raises(AssertionError, match="30 rows, 26 real tokens"):
        gdn(release, [], kernel, monkeypatch)
    core, z = gdn(release, ["0012", "0011"], kernel, monkeypatch)
    assert kernel.rows == (26, 26, 26, 26, 26)
    assert core[:26].eq(2).all()
    assert z[:26].eq(3).all()
    assert core[26:].eq(0).all()
    assert z[26:].eq(0).all()


# --- fix 11 --------------------------------------------------------------------------------------------------------


class RemappingExperts:
    """Stand-in for the XPU MoE kernel on one EP rank, whose memory is a list: what lies in front of the expert table
    is where id -1 lands. Expert e adds (e + 1) times the row; rows are filed under the local expert that the table
    names, each expert has as many places as *valid* ids named it, and a row more takes the next expert's first place.
    """

    def __init__(self, ep_rank: int, ep_size: int, num_experts: int) -> None:
        local = num_experts // ep_size
        first = ep_rank * local
        table = [e - first if first <= e < first + local else -1 for e in range(num_experts)]
        self.first, self.local, self.memory = first, local, [0, *table]

    def apply(self, output, hidden_states, topk_weights, topk_ids, **_: Any) -> None:
        ids = topk_ids.tolist()
        places: list[tuple[int, int, int]] = []
        for expert in range(self.local):
            places += [
                (expert, t, k) for t, row in enumerate(ids) for k, e in enumerate(row) if self.memory[e + 1] == expert
            ]
        sizes = [sum(e == self.first + expert for row in ids for e in row) for expert in range(self.local)]
        runs = [expert for expert, size in enumerate(sizes) for _ in range(size)]
        output.zero_()
        for (_, token, choice), expert in zip(places, runs, strict=False):
            output[token] += topk_weights[token, choice] * (self.first + expert + 1) * hidden_states[token]


def xpu_moe(release: str, numbers: list[str], ids: torch.Tensor, hidden: torch.Tensor, ep_size: int) -> torch.Tensor:
    """The sum over the EP ranks of what upstream's XPU experts put out; 4 experts, weights 1, pad rows' 0."""
    apply = taken_out(release, XPU_MOE, "XPUExperts.apply", numbers, {"torch": torch})
    weights = (ids >= 0).float()
    total = torch.zeros_like(hidden)
    for ep_rank in range(ep_size):
        experts = types.SimpleNamespace(
            moe_config=types.SimpleNamespace(ep_size=ep_size, ep_rank=ep_rank),
            fused_moe_impl=RemappingExperts(ep_rank, ep_size, 4),
        )
        given = inspect.signature(apply).parameters.keys() - {"self"}
        arguments: dict[str, Any] = dict.fromkeys(given)
        arguments |= {"output": torch.empty_like(hidden), "hidden_states": hidden, "topk_weights": weights}
        arguments |= {"topk_ids": ids.clone(), "global_num_experts": 4}
        apply(experts, **arguments)
        total += arguments["output"]
    return total


@releases_of("0015")
@pytest.mark.parametrize("ep_size", [2, 4])
def test_xpu_moe_pad_rows(release: str, ep_size: int, poison: None):
    """Rows [2] and [5] are padding, from two DP ranks; real rows lose their experts to them without the patch."""
    ids = torch.tensor([[0, 1], [2, 3], [-1, -1], [1, 2], [3, 0], [-1, -1]], dtype=torch.int32)
    hidden = torch.arange(1.0, 7)[:, None].expand(6, 3).clone()
    real = ids[:, 0] >= 0
    right = (ids + 1).sum(1, keepdim=True) * hidden
    broken = xpu_moe(release, [], ids, hidden, ep_size)
    assert (broken[real] != right[real]).any()
    fixed = xpu_moe(release, ["0015"], ids, hidden, ep_size)
    assert torch.equal(fixed[real], right[real])
    assert fixed[~real].eq(0).all()


# --- fix 9 ---------------------------------------------------------------------------------------------------------


@releases_of("0013")
@pytest.mark.parametrize("patched", [False, True])
def test_dummy_slots(release: str, patched: bool):
    """An idle rank's dummy of 1 token, padded to 4: the slots that reach the metadata."""
    laid_out: dict[str, Any] = {}

    def get_slot_mappings(num_tokens_padded: int, **_: Any):
        slots = torch.zeros(num_tokens_padded, dtype=torch.int64)
        laid_out["slots"] = slots
        return {0: slots}, {"layer": slots}

    runner = MagicMock(max_num_tokens=64, uniform_decode_query_len=1)
    runner.vllm_config.model_config.multimodal_config = None
    runner.scheduler_config.max_num_seqs = 8
    descriptor = types.SimpleNamespace(num_tokens=4, num_reqs=4)
    runner._determine_batch_execution_and_padding.return_value = ("none", descriptor, False, None, None)
    runner._get_slot_mappings = get_slot_mappings
    runner.synchronize_input_prep.side_effect = Stop
    names = {
        "torch": torch,
        "np": np,
        "logger": MagicMock(),
        "cdiv": lambda a, b: -(-a // b),
        "CUDAGraphMode": types.SimpleNamespace(NONE="none", FULL="full"),
        "maybe_create_ubatch_slices": lambda *_: (None, None),
    }
    dummy_run = taken_out(release, RUNNER_V1, "GPUModelRunner._dummy_run", ["0013"] if patched else [], names)
    with pytest.raises(Stop):
        inspect.unwrap(dummy_run)(runner, 1, uniform_decode=True)
    assert laid_out["slots"].tolist() == ([-1] * 4 if patched else [0])


# --- upstream's modules in their own environment --------------------------------------------------------------------


@pytest.fixture(scope="session")
def views(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    if reason := upstream_env.missing():
        pytest.skip(reason)
    plain = upstream_env.make_view(tmp_path_factory.mktemp("plain"))
    patched = upstream_env.make_view(tmp_path_factory.mktemp("patched"))
    assert main(["apply", str(patched)]) == 0
    return {False: plain, True: patched}


@pytest.fixture(scope="session")
def cases(views: dict[bool, Path]):
    """Results of ``collectives.py``, each layout run once: ``cases(patched, dp, tp, ep)[case] == [of each rank]``."""
    found: dict[tuple[bool, int, int, int], dict[str, list[Any]]] = {}

    def of(patched: bool, dp: int, tp: int, ep: int = 1) -> dict[str, list[Any]]:
        key = patched, dp, tp, ep
        if key not in found:
            status, log = upstream_env.run(views[patched], "collectives.py", *map(str, key[1:]), timeout=900)
            assert status == 0, log[-3000:]
            found[key] = json.loads(next(line for line in log.splitlines() if line.startswith("CASES "))[6:])
        return found[key]

    return of


LAYOUTS = [(2, 1), (4, 1), (2, 2)]


def upstream(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.upstream(pytest.mark.timeout(2400)(test))


def starting(results: dict[str, list[Any]], *words: str) -> dict[str, list[Any]]:
    return {name: row for name, row in results.items() if name.startswith(words)}


@upstream
@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
def test_gather_one_tensor(cases, dp: int, tp: int):
    for name, row in starting(cases(False, dp, tp), "one ").items():
        fault = "invalid output tensor list" if "uniform" in name else "invalid tensor size"
        assert all(fault in found for found in row), (name, row)
    good = starting(cases(True, dp, tp), "one ")
    assert len(good) >= 6
    assert all(row == ["exact"] * dp * tp for row in good.values()), good


@upstream
@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
def test_gather_list(cases, dp: int, tp: int):
    for name, row in starting(cases(False, dp, tp), "list ").items():
        fault = "invalid output tensor list" if "uniform" in name else "invalid tensor size"
        assert all(fault in found for found in row), (name, row)
    results = cases(True, dp, tp)
    good = starting(results, "list ")
    assert len(good) >= 4
    assert all(row == ["exact"] * dp * tp for row in good.values()), good
    assert results["collectives of a list"] == [1] * dp * tp
    assert results["empty list"] == [[]] * dp * tp


@upstream
@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
def test_dispatch_combine(cases, dp: int, tp: int):
    for name, row in starting(cases(False, dp, tp), "dispatch ").items():
        assert all("ProcessGroupGloo::allgather: invalid" in found for found in row), (name, row)
    good = starting(cases(True, dp, tp), "dispatch ")
    assert len(good) >= 2
    assert all(row == ["exact"] * dp * tp for row in good.values()), good


def counts_of(name: str) -> list[int]:
    return json.loads(name[name.index("[") :])


@upstream
@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
def test_v1_padding(cases, dp: int, tp: int):
    for ep, patched in ((1, False), (1, True), *([(0, True)] if dp == 2 and tp == 1 else [])):
        results = cases(patched, dp, tp, ep)
        assert starting(results, "v1 [")
        for name, row in starting(results, "v1 ").items():
            counts = counts_of(name)
            padded = [max(counts)] * dp
            wanted = padded if "graph" in name or (patched and ep) else counts
            assert row == [wanted] * dp * tp, name


@upstream
@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
def test_v2_padding(cases, dp: int, tp: int):
    for ep, patched in ((1, False), (1, True), *([(0, True)] if dp == 2 and tp == 1 else [])):
        results = cases(patched, dp, tp, ep)
        assert starting(results, "v2 [")
        for name, row in starting(results, "v2 ").items():
            counts = counts_of(name)
            wanted = [max(counts)] * dp if patched and ep else counts
            assert row == [[wanted[rank // tp], wanted] for rank in range(dp * tp)], name


@upstream
def test_a_crashed_run_leaves_nothing(views: dict[bool, Path]):
    status, log = upstream_env.run(views[False], "crash.py", timeout=60)
    assert status < 0
    child, name = log.split()[:2]
    assert not Path("/dev/shm", name).exists()
    for _ in range(50):  # killed; its new parent takes note of that in its own time
        state = Path("/proc", child, "status")
        if not state.exists() or "State:\tZ" in state.read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"process {child} is still there")


@upstream
def test_barrier(cases):
    assert cases(False, 2, 1)["barriers"] == [[], []]
    call = {"device_group": True, "device_ids": [0]}
    assert cases(True, 2, 1)["barriers"] == [[call, call]] * 2
    assert cases(True, 2, 1, 0)["barriers"] == [[], []], "without expert parallelism there is none"


@upstream
def test_async_scheduling(views: dict[bool, Path]):
    """dp, ep, what the user said -> the configuration's value and the scheduler that the engine core takes."""
    found = {}
    for patched, view in views.items():
        status, log = upstream_env.run(view, "async_scheduling.py", timeout=300)
        assert status == 0, log[-3000:]
        found[patched] = json.loads(next(line for line in log.splitlines() if line.startswith("CASES "))[6:])
    on, off = [True, "AsyncScheduler"], [False, "Scheduler"]
    same = {"1 True None": on, "2 False None": on, "2 True True": on, "2 True False": off}
    assert found[False] == {**same, "2 True None": on}
    assert found[True] == {**same, "2 True None": off}


@upstream
def test_mla_decode_empty_sequence(views: dict[bool, Path]):
    """Upstream's Triton kernel in Triton's interpreter; sequence lengths 5, 0, 3."""
    found = {}
    for patched, view in views.items():
        status, log = upstream_env.run(view, "mla_decode.py", timeout=300, TRITON_INTERPRET="1")
        assert status == 0, log[-3000:]
        found[patched] = json.loads(next(line for line in log.splitlines() if line.startswith("CASES "))[6:])
    assert found[False]["empty"] == "nan"
    assert found[True] == {"empty": "zero", "empty lse": "-inf", "others": "as by hand"}
    assert found[False]["others"] == "as by hand"
