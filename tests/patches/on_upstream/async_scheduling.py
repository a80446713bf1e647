# SPDX-License-Identifier: Apache-2.0
"""Upstream's own configuration: who gets asynchronous scheduling. One line of JSON."""

from __future__ import annotations

import json

from vllm.config import ParallelConfig, VllmConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.platforms import current_platform

# Harness: the CPU platform overrules the decision that is under test; an accelerator's does not.
type(current_platform).check_and_update_config = classmethod(lambda cls, config: None)


def main() -> None:
    found = {}
    for dp, ep, said in ((1, True, None), (2, False, None), (2, True, None), (2, True, True), (2, True, False)):
        scheduler = SchedulerConfig.default_factory(async_scheduling=said)
        parallel = ParallelConfig(data_parallel_size=dp, enable_expert_parallel=ep, distributed_executor_backend="mp")
        config = VllmConfig(parallel_config=parallel, scheduler_config=scheduler)
        taken = config.scheduler_config.get_scheduler_cls()
        found[f"{dp} {ep} {said}"] = [config.scheduler_config.async_scheduling, taken.__name__]
    print("CASES " + json.dumps(found))


if __name__ == "__main__":
    main()
