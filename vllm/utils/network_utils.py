# SPDX-License-Identifier: Apache-2.0
"""Addresses and ports of this machine."""

from __future__ import annotations

import socket

from vllm import envs


def get_ip() -> str:
    """The address by which others reach this machine: ``VLLM_HOST_IP``, else that of its outward route, else the
    loopback one. Nothing is sent."""
    if given := envs.VLLM_HOST_IP:
        return given
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((outside, 9))
                return probe.getsockname()[0]
            except OSError:
                continue
    return "127.0.0.1"


def get_open_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def join_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def get_distributed_init_method(ip: str, port: int) -> str:
    """The ``init_method`` of torch.distributed for a rendezvous at ``ip`` and ``port``."""
    return f"tcp://{join_host_port(ip, port)}"
