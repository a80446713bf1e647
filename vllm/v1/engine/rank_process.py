# SPDX-License-Identifier: Apache-2.0
"""The process of a served rank: first tied to its agent, since loading torch takes seconds in which either may end."""

from __future__ import annotations

import sys

from vllm.v1.engine.launch import die_with_the_agent, end_at_the_agents_word, leave


def main(argv: list[str]) -> None:
    die_with_the_agent()
    end_at_the_agents_word()
    from vllm.v1.engine.rank import run_rank

    run_rank(argv[0])
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1:])
