# SPDX-License-Identifier: Apache-2.0
"""Scripts as people write them, each ending in its own way.

    lifetimes.py FOLDER WAY TP DP EP     one rank, as its launcher placed it
    lifetimes.py FOLDER                  serves: [WAY, TP, DP, EP, environments] in, [[exit code, output]] out, as JSON

A served rank is forked from this process, which has imported everything, and then ends as any interpreter does.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from typing import Any

import torch
import transformers.models.mixtral  # noqa: F401 - here once, not in each rank

from vllm import LLM, SamplingParams
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    get_local_rank,
    get_local_world_size,
    get_world_group,
)
from vllm.v1.debug import watchdog

_DEADLINE_S = 180


def serve() -> list[str]:
    """Fork the ranks that are asked for; returns in each of them, with its way."""
    gc.freeze()  # what is here for all ranks stays shared, and no collection looks at it
    for line in sys.stdin:
        way, *asked, environments = json.loads(line)
        outputs = [os.memfd_create(way) for _ in environments]
        children = []
        for environment, output in zip(environments, outputs, strict=True):
            if (child := os.fork()) == 0:
                os.environ.update(environment)
                os.dup2(output, 1)
                os.dup2(output, 2)
                # One that hangs says where; the alarm is for one that hangs after its interpreter has gone.
                faulthandler.dump_traceback_later(_DEADLINE_S, exit=True)
                signal.alarm(_DEADLINE_S + 5)
                return [way, *asked]
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        texts = []
        for output in outputs:
            os.lseek(output, 0, os.SEEK_SET)
            with os.fdopen(output, "rb") as file:
                texts.append(file.read().decode(errors="replace"))
        print(json.dumps(list(zip(codes, texts, strict=True))), flush=True)
    os._exit(0)


folder, *asked = sys.argv[1:]
way, tp, dp, ep = asked or serve()
tp, dp, ep = int(tp), int(dp), int(ep)
RANK = int(os.environ.get("OWN_RANK") or os.environ.get("RANK", "0"))


def make(**kwargs: Any) -> LLM:
    return LLM(
        folder,
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        enable_expert_parallel=bool(ep),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=40,
        kv_cache_memory_bytes=1 << 24,
        distributed_executor_backend=os.environ.get("BACKEND"),
        **kwargs,
    )


def use(llm: LLM, lengths: tuple[int, int] = (90, 4), num_tokens: int = 4) -> None:
    """Tokens of a prompt as long as this DP rank's entry says."""
    length = lengths[RANK // tp % 2]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": list(range(3, 3 + length))}], params, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    os.write(1, f"TOKENS rank={RANK} length={length} {tokens}\n".encode())


if way == "polls all the time":
    # The thread that reads the board is nearly always inside it, and so when the interpreter goes.
    watchdog._POLL_S = 1e-4
if way.startswith("file://"):
    # As trainers do: torch.distributed is there first, and no variable says where the ranks met.
    torch.distributed.init_process_group("gloo", init_method=way, rank=RANK, world_size=tp * dp)
    way = "says where it is"
llm = make()
use(llm)
if way == "says where it is":
    os.write(1, f"PLACE {get_world_group().rank} {get_local_rank()}/{get_local_world_size()}\n".encode())
elif way in ("falls off its end", "polls all the time"):
    pass
elif way == "sys.exit(0)":
    sys.exit(0)
elif way == "del llm":
    del llm
    gc.collect()
    if dp * tp > 1:
        try:
            get_local_world_size()
        except AssertionError:
            sys.exit(0)
        sys.exit(5)
elif way == "raises":
    if RANK == 0:
        raise KeyError("of the script")
    use(llm)
elif way == "interrupted":
    os.write(1, b"READY\n")
    while True:
        use(llm, num_tokens=30)
elif way == "interrupts itself":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
    os.kill(os.getpid(), signal.SIGINT)
elif way == "one rank lingers":
    if RANK == 0:
        time.sleep(8)
elif way == "shuts down three times":
    for _ in range(2):
        llm.shutdown()
        llm.shutdown()
        llm = make()
        use(llm)
    llm.shutdown()
elif way == "cleans up three times":
    for _ in range(2):
        destroy_model_parallel()
        destroy_distributed_environment()
        del llm
        gc.collect()
        llm = make()
        use(llm)
elif way == "drops three times":
    for _ in range(2):
        del llm
        llm = make()
        use(llm)
elif way == "two engines":
    other = make(seed=1)
    use(other)
    llm.shutdown()
    use(other)
    third = make()
    other.shutdown()
    try:
        use(llm)
    except RuntimeError as error:
        assert "this engine has been shut down: make a new LLM" in str(error)  # noqa: PT017
    use(third)
else:
    raise AssertionError(f"no way {way!r}")
