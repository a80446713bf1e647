# SPDX-License-Identifier: Apache-2.0
"""Which implementation runs which operator on which device.

For each device type the first implementation of a row that is installed and passes its check (``checks``) is taken,
once, when the device's first operator runs; ``reference`` is plain torch and always usable. ``VLLM_KERNELS`` puts
others first: one name for all operators that it has (``VLLM_KERNELS=reference``), ``operator=implementation`` for one,
several with commas. ``VLLM_ATTENTION_BACKEND`` does so for attention, by upstream's names. ``vllm collect-env`` prints
the choices.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.kernels import checks
from vllm.kernels.packages import kernel_package
from vllm.logger import init_logger
from vllm.utils.suggestions import nearest

logger = init_logger(__name__)

#                       cpu    cuda          xpu
TABLE = {
    "linear":             ("cpu", "",           ""),
    "quantized_linear":   ("cpu", "triton",     "xpu triton"),
    "quantized_experts":  ("cpu", "triton",     "xpu triton"),
    "quantized_embedding": ("cpu", "triton",    "triton"),
    "embedding":          ("cpu", "triton",     "triton"),
    "rms_norm":           ("cpu", "triton",     "xpu triton"),
    "fused_add_rms_norm": ("cpu", "triton",     "xpu triton"),
    "silu_and_mul":       ("cpu", "triton",     "triton xpu"),
    "gelu_tanh_and_mul":  ("cpu", "triton",     "triton xpu"),
    "sigmoid_gate":       ("cpu", "",           ""),
    "rotary_embedding":   ("cpu", "triton",     "xpu triton"),
    "reshape_and_cache":  ("cpu", "triton",     "xpu triton"),
    "paged_attention":    ("cpu", "triton",     "xpu triton"),
    "zero_padding_rows":  ("cpu", "triton",     "triton"),
    "topk_softmax":       ("cpu", "triton",     "xpu triton"),
    "topk_sigmoid":       ("cpu", "triton",     "triton"),
    "grouped_topk":       ("cpu", "triton",     "xpu triton"),
    "fused_experts":      ("cpu", "triton",     "xpu triton"),
    "gated_delta_net":    ("cpu", "fla triton", "xpu fla triton"),
    "row_max":            ("cpu", "triton",     "triton"),
    "apply_penalties":    ("",    "triton",     "triton"),
    "sample":             ("",    "triton",     "triton"),
    "log_probabilities":  ("",    "triton",     "triton"),
}  # fmt: skip
DEVICES = ("cpu", "cuda", "xpu")
IMPLEMENTATIONS = ("cpu", "triton", "fla", "xpu", "reference")
# Both read the cache in the layout that the other one's kernels write.
ATTENTION = ("reshape_and_cache", "paged_attention")
ATTENTION_BACKENDS = {"CPU_ATTN": "cpu", "TORCH_PAGED": "reference", "TRITON_ATTN": "triton", "FLASH_ATTN": "xpu"}


@dataclass(frozen=True)
class Choice:
    """``module`` implements ``operator`` for one device type; ``reason`` says why it and none before it."""

    operator: str
    device_type: str
    implementation: str
    module: Any
    function: Callable[..., Any]
    reason: str
    others: tuple[str, ...]

    @functools.cached_property
    def followers(self) -> list[tuple[str, Any]]:
        """What may run where the chosen one refuses its arguments, in order, with their modules: the rest of the row,
        plain torch."""
        usable = [name for name in self.others if _obstacle(name, self.operator, self.device_type) is None]
        return [(name, _module(name)) for name in (*usable, "reference")]


def why_not(implementation: str, device_type: str) -> str | None:
    """None where ``implementation`` can run on ``device_type`` in this process, else what is missing."""
    if implementation == "cpu":
        if device_type != "cpu":
            return f"the C++ kernels run on the CPU, not on {device_type}"
        from vllm.kernels.cpu import ops

        return None if ops.kernels_available() else "the C++ kernels could not be built"
    if implementation == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "on the CPU Triton's kernels need TRITON_INTERPRET=1 in the environment (slow: for tests)"
        return None if kernel_package("vllm.kernels.triton") else "triton cannot be loaded"
    if implementation == "fla":
        if device_type == "cpu":
            return "fla-core has no CPU kernels"
        return None if kernel_package("fla.ops.gated_delta_rule") else "fla-core is not installed"
    if implementation == "xpu":
        if device_type != "xpu":
            return f"vllm-xpu-kernels run on XPUs, not on {device_type}"
        return None if kernel_package("vllm_xpu_kernels._xpu_C") else "vllm-xpu-kernels is not installed"
    return None


@dataclass(frozen=True)
class Wishes:
    """Implementations that the environment puts first: for all operators that they have, and for single ones."""

    for_all: str | None
    single: dict[str, str]


def wishes() -> Wishes:
    """What ``VLLM_KERNELS`` and ``VLLM_ATTENTION_BACKEND`` ask for.

    Raises:
        ValueError: one of them names what does not exist.
    """
    for_all, single, text = None, {}, envs.VLLM_KERNELS
    for part in filter(None, (part.strip() for part in text.split(","))):
        operator, equals, implementation = (x.strip() for x in part.rpartition("="))
        for name, known, what in ((implementation, IMPLEMENTATIONS, "implementation"), (operator, TABLE, "operator")):
            if name not in known and (equals or what == "implementation"):
                raise ValueError(
                    f"VLLM_KERNELS={text!r}: there is no {what} {name!r}{nearest(name, known)}; known: "
                    f"{', '.join(known)}"
                )
        if equals:
            single[operator] = implementation
        else:
            for_all = implementation
    if backend := envs.VLLM_ATTENTION_BACKEND:
        if backend not in ATTENTION_BACKENDS:
            raise ValueError(
                f"VLLM_ATTENTION_BACKEND={backend!r} is unknown; known: {', '.join(sorted(ATTENTION_BACKENDS))}"
            )
        single |= dict.fromkeys(ATTENTION, ATTENTION_BACKENDS[backend])
    return Wishes(for_all, single)


@functools.cache
def choose(device_type: str) -> dict[str, Choice]:
    """The choices for ``device_type``, by operator.

    Raises:
        ValueError: the environment asks for an implementation that cannot run here.
    """
    return {operator: _choice(operator, device_type, wishes()) for operator in TABLE}


def choose_anew(device_type: str) -> dict[str, Choice]:
    """``choose`` by what the environment says now: an engine calls it before it loads weights. Logs what is taken."""
    choose.cache_clear()
    choices = choose(device_type)
    by_implementation: dict[str, list[str]] = {}
    for choice in choices.values():
        by_implementation.setdefault(choice.implementation, []).append(choice.operator)
    told = "; ".join(f"{name}: {', '.join(operators)}" for name, operators in by_implementation.items())
    logger.info("kernels on %s: %s", device_type, told)
    return choices


def first_installed(operator: str, device_type: str) -> Any:
    """The module that ``choose`` takes if it passes its check; touches no device."""
    wanted = wishes()
    wish = wanted.single.get(operator) or wanted.for_all
    row = TABLE[operator][DEVICES.index(device_type)].split() if device_type in DEVICES else []
    for name in [wish, *row] if wish else row:
        if why_not(name, device_type) is None and hasattr(_module(name), operator):
            return _module(name)
    return _module("reference")


def _choice(operator: str, device_type: str, wanted: Wishes) -> Choice:
    row = tuple(TABLE[operator][DEVICES.index(device_type)].split()) if device_type in DEVICES else ()

    def taken(implementation: str, reason: str) -> Choice:
        module = _module(implementation)
        others = row[row.index(implementation) + 1 :] if implementation in row else ()
        function = getattr(module, operator)
        return Choice(operator, device_type, implementation, module, function, reason, others)

    if (wish := wanted.single.get(operator)) is not None:
        if (obstacle := _obstacle(wish, operator, device_type)) is not None:
            raise ValueError(f"{operator}={wish} was asked for, but {obstacle}")
        return taken(wish, "asked for")
    if wanted.for_all is not None:
        if (obstacle := why_not(wanted.for_all, device_type)) is not None:
            raise ValueError(f"VLLM_KERNELS={wanted.for_all} was asked for, but {obstacle}")
        if _obstacle(wanted.for_all, operator, device_type) is None:
            return taken(wanted.for_all, "asked for")
    passed: list[str] = []
    for implementation in row:
        if (obstacle := _obstacle(implementation, operator, device_type)) is None:
            return taken(implementation, "; ".join(passed) or "first choice")
        passed.append(obstacle)
    return taken("reference", "; ".join(passed) or "the only one")


def _obstacle(implementation: str, operator: str, device_type: str) -> str | None:
    if (missing := why_not(implementation, device_type)) is not None:
        return missing
    module = _module(implementation)
    if not hasattr(module, operator):
        return f"{implementation} has no {operator}"
    if hasattr(module, "why_not") and (missing := module.why_not(operator)) is not None:
        return missing
    if implementation in ("cpu", "reference") or device_type == "cpu":
        return None  # the law itself, and what the test suite runs on this very processor
    wrong = checks.failure(operator, getattr(module, operator), device_type, module)
    if wrong is not None:
        logger.warning("%s by %s fails its check on %s: %s", operator, implementation, device_type, wrong)
    return None if wrong is None else f"{implementation} fails its check: {wrong}"


def _module(implementation: str) -> Any:
    return importlib.import_module(f"vllm.kernels.{implementation}")


_refused: set[str] = set()


def run_another(choice: Choice, refusal: NotImplementedError, *args: Any) -> Any:
    """The operator by the first implementation after ``choice``'s that does not refuse ``args`` as that one did; each
    refusal is said once."""
    used = choice.implementation
    for name, module in choice.followers:
        if f"{used} {refusal}" not in _refused:
            _refused.add(f"{used} {refusal}")
            slower = ", plain torch, far slower" if name == "reference" else ""
            logger.warning("%s by %s: %s; %s runs in its place%s", choice.operator, used, refusal, name, slower)
        try:
            return getattr(module, choice.operator)(*args)
        except NotImplementedError as error:
            used, refusal = name, error
    raise refusal
