# SPDX-License-Identifier: Apache-2.0
"""What the agreement of a step costs against the number of DP ranks: on paper, in simulated time, and here over Gloo.

    python benchmarks/bench_protocol.py --hop-us 50                                       # paper and simulation
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=4 benchmarks/bench_protocol.py    # what is real

The agreement is one sum of an int32 table with a row a DP rank, ``S`` bytes. With ``P`` ranks, a hop of ``h`` seconds
from one process to another and ``B`` bytes/s:

- ring (what Gloo runs unless told otherwise: ``gloo/allreduce.cc``; NCCL's ring): each part of the table goes round
  twice, 2 (P - 1) hops one after the other and 2 S (P - 1) / P bytes a rank;
- halving and doubling (``docs/algorithms.md`` of Gloo; Thakur et al. 2005): 2 log2 P hops, as many bytes;
- tree (NCCL from 2.4 on, for small messages over many nodes): up and down, 2 log2 P hops of S bytes.

Time = hops x (h + bytes of a hop / B). The simulation lets each hop take a random time (h in the mean, a third of it
at least, the rest exponential) and each rank begin up to ``--apart-us`` late, and counts until the last rank has the
sum; a ring waits for its slowest hop again and again, so it comes out above paper. The wake of idle ranks is counted
beside it: a hop to the front end, which writes to P - 1 channels one after the other (``--write-us`` each), and a hop.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time

import numpy as np

SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def table_bytes(num_ranks: int) -> int:
    from vllm.v1.worker.dp_utils import DPVote

    return 4 * len(DPVote._fields) * num_ranks


def on_paper(num_ranks: int, hop: float, bandwidth: float) -> dict[str, tuple[int, float, float]]:
    """algorithm → (hops, bytes that a rank sends, seconds)."""
    size, levels = table_bytes(num_ranks), math.ceil(math.log2(num_ranks))
    around = 2 * (num_ranks - 1)
    spread = size * around / num_ranks
    return {
        "ring": (around, spread, around * hop + spread / bandwidth),
        "halving": (2 * levels, spread, 2 * levels * hop + spread / bandwidth),
        "tree": (2 * levels, 2.0 * size, 2 * levels * (hop + size / bandwidth)),
    }


def simulate(
    num_ranks: int, hop: float, bandwidth: float, apart: float, rounds: int, seed: int = 0
) -> dict[str, float]:
    """algorithm → median seconds from the first rank's begin until the last has the sum, over ``rounds``."""
    rng = np.random.default_rng(seed)
    size, levels = table_bytes(num_ranks), math.ceil(math.log2(num_ranks))

    def hops(count: int, nbytes: float) -> np.ndarray:
        return hop / 3 + rng.exponential(2 * hop / 3, count) + nbytes / bandwidth

    def ring(at: np.ndarray) -> float:
        for _ in range(2 * (num_ranks - 1)):
            at = np.maximum(at, np.roll(at, 1) + hops(num_ranks, size / num_ranks))
        return float(at.max())

    def exchange(at: np.ndarray) -> float:
        ranks = np.arange(num_ranks)
        for level in [*range(levels), *reversed(range(levels))]:
            partner = ranks ^ (1 << level)
            at = np.maximum(at, at[partner] + hops(num_ranks, size / 2 ** (level + 1)))
        return float(at.max())

    def tree(at: np.ndarray) -> float:
        for level in range(levels):  # up: rank r with r % 2^(level + 1) == 0 waits for r + 2^level
            to = np.arange(0, num_ranks, 2 << level)
            at[to] = np.maximum(at[to], at[to + (1 << level)] + hops(len(to), size))
        for level in reversed(range(levels)):
            to = np.arange(0, num_ranks, 2 << level)
            at[to + (1 << level)] = at[to] + hops(len(to), size)
        return float(at.max())

    found: dict[str, list[float]] = {"ring": [], "halving": [], "tree": []}
    for _ in range(rounds):
        begins = rng.uniform(0.0, apart, num_ranks) if apart else np.zeros(num_ranks)
        for name, run in (("ring", ring), ("halving", exchange), ("tree", tree)):
            found[name].append(run(begins.copy()))
    return {name: statistics.median(values) for name, values in found.items()}


def wake(num_ranks: int, hop: float, write: float) -> float:
    """Seconds from a rank's begin until the last of the others is told of it."""
    return 2 * hop + (num_ranks - 1) * write


def measure(steps: int) -> None:
    """On this machine: a hop over Gloo between two ranks, and the agreement of all."""
    import torch
    import torch.distributed as dist

    from vllm.distributed import get_dp_group, init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.dp_utils import coordinate_batch_across_dp

    init_distributed_environment()
    size = int(os.environ["WORLD_SIZE"])
    initialize_model_parallel(1, size, True)
    group, rank, word = get_dp_group(), int(os.environ["RANK"]), torch.zeros(2, dtype=torch.int64)
    hops, took, cpu = [], [], []
    for _ in range(steps):
        dist.barrier(group.cpu_group)
        if rank < 2:
            began = time.perf_counter()
            for sender in (0, 1):
                (dist.send if rank == sender else dist.recv)(word, 1 - rank, group=group.cpu_group)
            hops.append((time.perf_counter() - began) / 2)
    for step in range(steps):
        began, used = time.perf_counter(), time.process_time()
        coordinate_batch_across_dp(rank, step=step, has_unfinished=True)
        took.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
    if rank == 0:
        deciles = statistics.quantiles(took, n=10)
        print(
            f"{size} ranks on {os.cpu_count()} cores: hop {1e6 * statistics.median(hops):.0f} us; agreement "
            f"{1e6 * statistics.median(took):.0f} us (tenths {1e6 * deciles[0]:.0f} to {1e6 * deciles[-1]:.0f}), "
            f"{1e6 * statistics.median(cpu):.0f} us of a core"
        )
    dist.barrier(group.cpu_group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hop-us", type=float, default=50.0, help="from process to process")
    parser.add_argument("--gbit", type=float, default=10.0, help="of a rank's link")
    parser.add_argument("--apart-us", type=float, default=0.0, help="between the first and the last rank's begin")
    parser.add_argument("--write-us", type=float, default=10.0, help="of the front end, for each rank that it wakes")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=500, help="under torchrun")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args.steps)
        return
    hop, bandwidth = args.hop_us * 1e-6, args.gbit * 1e9 / 8
    print(
        f"hop {args.hop_us:g} us, {args.gbit:g} Gbit/s, begins {args.apart_us:g} us apart at most; "
        "ms on paper / simulated"
    )
    print("| DP | table | hops: ring | tree | bytes a rank: ring | tree | ring | halving | tree | wake |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for size in SIZES:
        paper = on_paper(size, hop, bandwidth)
        found = simulate(size, hop, bandwidth, args.apart_us * 1e-6, args.rounds)
        waking = 1e3 * wake(size, hop, args.write_us * 1e-6)
        times = " | ".join(f"{1e3 * paper[n][2]:.2f} / {1e3 * found[n]:.2f}" for n in ("ring", "halving", "tree"))
        print(
            f"| {size} | {table_bytes(size):,} B | {paper['ring'][0]:,} | {paper['tree'][0]} | "
            f"{paper['ring'][1]:,.0f} | {paper['tree'][1]:,.0f} | {times} | {waking:.2f} |"
        )


if __name__ == "__main__":
    main()
