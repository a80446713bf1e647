# SPDX-License-Identifier: Apache-2.0
"""Upstream's own XpuCommunicator, AgRsAll2AllManager and DP agreement over Gloo, one line of JSON for each case.

``collectives.py DP TP EP``: starts DP * TP processes; EP is 1 or 0. A case is "exact" or the error that it met.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rows_of(rank: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """``rows`` rows that tell rank, row and column apart; exact in every dtype used here."""
    values = torch.arange(rows * width).view(rows, width) % 7 + 16 * rank
    return values.to(dtype)


class Counter:
    """Counts the calls of one torch.distributed function and keeps their keyword arguments."""

    def __init__(self, name: str):
        self.name, self.real, self.calls = name, getattr(dist, name), []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        return self.real(*args, **kwargs)

    def __enter__(self) -> Counter:
        setattr(dist, self.name, self)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(dist, self.name, self.real)


def worker(rank: int, dp: int, tp: int, ep: bool, store: str, results: Any) -> None:
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    # Harness: upstream's CPU platform would build a CpuCommunicator; the XPU one is under test.
    communicator = "vllm.distributed.device_communicators.xpu_communicator.XpuCommunicator"
    type(current_platform).get_device_communicator_cls = classmethod(lambda cls: communicator)
    # Harness: from 0.32.0 uneven reduce_scatterv asks how many XPUs this process sees; here it sees all.
    torch.xpu.device_count = lambda: dp * tp

    world = dp * tp
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    parallel = ParallelConfig(
        data_parallel_size=dp,
        tensor_parallel_size=tp,
        enable_expert_parallel=ep,
        distributed_executor_backend="external_launcher",
    )
    parallel.data_parallel_rank = rank // tp
    config = VllmConfig(parallel_config=parallel)
    cases: dict[str, Any] = {}

    def case(name: str, body: Callable[[], Any]) -> None:
        try:
            found = body()
        except Exception as error:
            found = f"{type(error).__name__}: {error}".splitlines()[0]
        cases[name] = found

    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(world, rank, f"file://{store}", rank, "gloo")
        parallel_state.initialize_model_parallel(tp, backend="gloo")
        sequence_parallel = tp > 1
        group = parallel_state.get_ep_group() if sequence_parallel else parallel_state.get_dp_group()
        assert group.world_size == world
        comm = group.device_communicator
        assert type(comm).__name__ == "XpuCommunicator"
        me = group.rank_in_group

        def gathered(sizes: list[int], width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.cat([rows_of(r, n, width, dtype) for r, n in enumerate(sizes)])

        def same(found: torch.Tensor, wanted: torch.Tensor) -> str:
            ok = found.dtype == wanted.dtype and torch.equal(found.float(), wanted.float())
            return "exact" if ok else f"wrong: {found.flatten()[:8].tolist()}"

        def one(sizes: list[int], uniform: bool, dtype: torch.dtype) -> str:
            mine = rows_of(me, sizes[me], 6, dtype)
            return same(comm.all_gatherv(mine, 0, None if uniform else sizes), gathered(sizes, 6, dtype))

        def many(sizes: list[int], uniform: bool) -> str:
            kinds = [
                (6, torch.bfloat16),
                (2, torch.float32),
                (2, torch.int32),
                (3, torch.float8_e4m3fn),
                (5, torch.bool),
            ]
            mine = [rows_of(me, sizes[me], width, dtype) for width, dtype in kinds]
            # A column, a transposed and a three-dimensional tensor too.
            mine.append(mine[1][:, 0])
            mine.append(rows_of(me, 4, sizes[me], torch.float32).t())
            mine.append(rows_of(me, sizes[me], 12, torch.int64).view(sizes[me], 3, 4))
            found = comm.all_gatherv(mine, 0, None if uniform else sizes)
            wanted = [gathered(sizes, width, dtype) for width, dtype in kinds]
            wanted.append(wanted[1][:, 0])
            wanted.append(torch.cat([rows_of(r, 4, n, torch.float32).t() for r, n in enumerate(sizes)]))
            wanted.append(gathered(sizes, 12, torch.int64).view(sum(sizes), 3, 4))
            verdicts = [same(f, w) for f, w in zip(found, wanted, strict=True)]
            return next((verdict for verdict in verdicts if verdict != "exact"), "exact")

        def collectives_of_a_list() -> int:
            names = ("all_gather", "all_gather_into_tensor", "broadcast")
            with Counter(names[0]) as a, Counter(names[1]) as b, Counter(names[2]) as c:
                many([4] * world, True)
                return len(a.calls) + len(b.calls) + len(c.calls)

        def dispatch_combine(counts: list[int]) -> str:
            """Through AgRsAll2AllManager and the forward context, as a MoE layer does it."""
            from vllm.forward_context import get_forward_context, set_forward_context

            across = torch.tensor(counts, dtype=torch.int32)
            mine = counts[rank // tp]
            with set_forward_context(None, config, num_tokens=mine, num_tokens_across_dp=across):
                metadata = get_forward_context().dp_metadata
                with metadata.sp_local_sizes(tp):
                    sizes = metadata.get_chunk_sizes_across_dp_rank()
                    manager = parallel_state.get_ep_group().device_communicator.all2all_manager
                    assert type(manager).__name__ == "AgRsAll2AllManager"
                    hidden = rows_of(me, sizes[me], 8, torch.bfloat16)
                    weights = rows_of(me, sizes[me], 2, torch.float32)
                    ids = rows_of(me, sizes[me], 2, torch.int32)
                    got = manager.dispatch(hidden, weights, ids, sequence_parallel)
                    kinds = [(8, torch.bfloat16), (2, torch.float32), (2, torch.int32)]
                    verdicts = [same(f, gathered(sizes, *kind)) for f, kind in zip(got, kinds, strict=True)]
                    back = manager.combine(got[0].float(), sequence_parallel)
                    verdicts.append(same(back, world * hidden.float()))
                    # Routing by logits instead of chosen experts.
                    got = manager.dispatch_router_logits(hidden, weights, sequence_parallel)
                    verdicts += [same(f, gathered(sizes, *kind)) for f, kind in zip(got, kinds, strict=False)]
            return next((verdict for verdict in verdicts if verdict != "exact"), "exact")

        def barriers() -> list[dict[str, Any]]:
            with Counter("barrier") as counter:
                comm.reduce_scatterv(torch.ones(4 * world, 2), 0, [4] * world)
                with suppress(RuntimeError):  # unpatched: the one-element list is refused
                    comm.all_gatherv([torch.ones(4, 2)], 0, None)
            return [
                {"device_group": call["group"] is comm.device_group, "device_ids": call["device_ids"]}
                for call in counter.calls
            ]

        def v1(counts: list[int], mode: int) -> list[int]:
            from vllm.v1.worker.dp_utils import coordinate_batch_across_dp

            mine = counts[rank // tp]
            _, across, agreed = coordinate_batch_across_dp(mine, False, parallel, mine, cudagraph_mode=mode)
            assert agreed == mode
            return across.tolist()

        def v2(counts: list[int]) -> list[Any]:
            from vllm.config.compilation import CUDAGraphMode
            from vllm.v1.worker.gpu import dp_utils
            from vllm.v1.worker.gpu.model_runner import GPUModelRunner

            class OnlyParallel:
                """Enough of a configuration for the lines of the runner's constructor that are under test."""

                model_config = cache_config = compilation_config = lora_config = load_config = None
                parallel_config = parallel

            with suppress(AttributeError):  # no scheduler_config: the lines before it have run
                GPUModelRunner.__init__(object.__new__(GPUModelRunner), OnlyParallel, torch.device("cpu"))
            mine = counts[rank // tp]
            desc = dp_utils.BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=mine, num_reqs=1)
            desc, sync = dp_utils.sync_cudagraph_and_dp_padding(None, desc, mine, 1, None, dp, rank // tp)
            return [desc.num_tokens, getattr(sync, "num_tokens_across_dp", sync).tolist()]

        # Uneven sizes for each world size; the last has a rank without rows.
        uneven = {2: [[26, 30], [3, 0]], 4: [[13, 13, 15, 15], [3, 5, 2, 4], [3, 0, 2, 4]]}[world]
        for dtype in (torch.bfloat16, torch.float32, torch.int32):
            case(f"one uniform {dtype}", lambda dtype=dtype: one([5] * world, True, dtype))
        case("one uniform 0 rows", lambda: one([0] * world, True, torch.float32))
        case("list uniform", lambda: many([5] * world, True))
        case("list uniform 0 rows", lambda: many([0] * world, True))
        for sizes in uneven:
            case(f"one {sizes}", lambda sizes=sizes: one(sizes, False, torch.bfloat16))
            case(f"list {sizes}", lambda sizes=sizes: many(sizes, False))
        case("empty list", lambda: comm.all_gatherv([], 0, None))
        case("collectives of a list", collectives_of_a_list)
        counts = [[26, 30], [30, 26], [8, 8]] if dp == 2 else [[3, 1, 2, 4], [8, 8, 8, 8]]
        for each in counts:
            case(f"dispatch {each}", lambda each=each: dispatch_combine(each))
            case(f"v1 {each}", lambda each=each: v1(each, 0))
            case(f"v1 graph {each}", lambda each=each: v1(each, 1))
            case(f"v2 {each}", lambda each=each: v2(each))
        case("barriers", barriers)
        results.put((rank, cases))
        dist.barrier()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def main() -> None:
    dp, tp, ep = (int(arg) for arg in sys.argv[1:])
    import vllm.distributed.device_communicators.all2all
    import vllm.distributed.device_communicators.xpu_communicator
    import vllm.v1.worker.dp_utils
    import vllm.v1.worker.gpu.model_runner  # noqa: F401  Imported once, before the processes fork.

    context = mp.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, dp, tp, bool(ep), f"{folder}/store", results) for rank in range(dp * tp)]
        processes = [context.Process(target=worker, args=each) for each in arguments]
        for process in processes:
            process.start()
        found = dict(results.get(timeout=400) for _ in processes)
        for process in processes:
            process.join(60)
    names = found[0].keys()
    print("CASES " + json.dumps({name: [found[rank][name] for rank in sorted(found)] for name in names}))


if __name__ == "__main__":
    main()
