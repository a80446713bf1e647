# SPDX-License-Identifier: Apache-2.0
"""Which implementation is chosen, what the environment can change, and what happens where one refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.entrypoints.cli import collect_env
from vllm.kernels import checks, cpu, ops, packages, reference, table, triton

QUANTIZED = ("quantized_linear", "quantized_experts", "quantized_embedding")
SAMPLING = ("apply_penalties", "sample", "log_probabilities")  # on the CPU by plain torch


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """``chosen(device, NAME="value")``: operator → implementation under these variables."""

    def choose(device: str = "cpu", **variables: str) -> dict[str, str]:
        for name in ("VLLM_KERNELS", "VLLM_ATTENTION_BACKEND"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        table.choose.cache_clear()
        return {name: choice.implementation for name, choice in table.choose(device).items()}

    return choose


def packages_with(*present: str) -> Callable[[str], Any]:
    def find(module: str) -> Any:
        return SimpleNamespace() if module in present else None

    return find


def test_every_operator_has_contract_twin_and_row() -> None:
    public = {name for name, x in vars(ops).items() if inspect.isfunction(x) and x.__module__ == ops.__name__}
    helpers = {"pack_linear_weight", "unpack_linear_weight", "pack_expert_weights", "repack_expert_weight"}
    helpers |= {"zeroed_cache", "zeroed_state", "pack_quantized_weight"}
    assert {name for name in public if not name.startswith("_")} == {
        *table.TABLE,
        *helpers,
        "empty_experts",
        "paged_attention_workspace",
        "preferred_block_size",
        "paged_attention_forms",
        "fused_experts_forms",
        "quantized_linear_forms",
        "num_compiled",
        "check_fp8_cache",
    }
    for operator in table.TABLE:
        assert getattr(ops, operator).__doc__, f"{operator} has no contract"
        expected = [*inspect.signature(getattr(ops, operator)).parameters]
        for module in (reference, cpu, triton):
            if hasattr(module, operator):
                assert [*inspect.signature(getattr(module, operator)).parameters] == expected, (module, operator)
        assert hasattr(reference, operator)
        assert not any(table.TABLE[operator][1:]) or operator in checks._CASES, f"{operator} has no check on devices"


def test_choices_without_any_variable(chosen: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    own = dict.fromkeys(SAMPLING, "reference")
    assert chosen("cpu") == {operator: own.get(operator, "cpu") for operator in table.TABLE}
    assert set(chosen("meta").values()) == {"reference"}
    monkeypatch.setattr(table, "kernel_package", packages_with())
    assert set(chosen("cuda").values()) == {"reference"}
    reasons = {choice.reason for choice in table.choose("xpu").values()}
    assert any("vllm-xpu-kernels is not installed" in reason for reason in reasons)


def test_names_of_the_environment(chosen: Callable[..., dict[str, str]]) -> None:
    assert set(chosen(VLLM_KERNELS="reference").values()) == {"reference"}
    one = chosen(VLLM_KERNELS="rms_norm = reference, silu_and_mul=reference")
    assert {name for name, used in one.items() if used == "reference"} == {"rms_norm", "silu_and_mul", *SAMPLING}
    both = chosen(VLLM_KERNELS="reference,paged_attention=cpu")
    assert {name for name, used in both.items() if used == "cpu"} == {"paged_attention"}
    backend = chosen(VLLM_ATTENTION_BACKEND="TORCH_PAGED")
    assert {name for name, used in backend.items() if used == "reference"} == {*table.ATTENTION, *SAMPLING}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "VLLM_KERNELS",
            "trition",
            r"there is no implementation 'trition'; the nearest is 'triton'; known: cpu, triton",
        ),
        ("VLLM_KERNELS", "rmsnorm=cpu", r"there is no operator 'rmsnorm'; the nearest is 'rms_norm'; known: linear"),
        ("VLLM_KERNELS", "xpu", r"xpu was asked for, but vllm-xpu-kernels run on XPUs, not on cpu"),
        ("VLLM_KERNELS", "sample=cpu", r"sample=cpu was asked for, but cpu has no sample"),
        ("VLLM_ATTENTION_BACKEND", "FLASHINFER", r"'FLASHINFER' is unknown; known: CPU_ATTN, FLASH_ATTN, TORCH_PAGED"),
    ],
)
def test_names_that_cannot_be_honoured(
    name: str, value: str, message: str, chosen: Callable[..., dict[str, str]]
) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(**{name: value})
    assert collect_env.collect()["kernels"]["error"], "the report says so and goes on"


def test_triton_on_the_cpu_needs_its_interpreter(
    chosen: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="need TRITON_INTERPRET=1 in the environment"):
        chosen(VLLM_KERNELS="triton")
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton is not installed"):
        chosen(VLLM_KERNELS="triton")


def test_a_refusal_runs_the_twin_and_is_said_once(
    chosen: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def refuses(*args: Any) -> None:
        raise NotImplementedError("rows of 48 elements: only powers of two")

    monkeypatch.setattr(cpu, "rms_norm", refuses)
    chosen()
    x, weight = torch.randn(3, 48), torch.rand(48)
    for _ in range(3):
        assert torch.equal(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    said = [record.getMessage() for record in log.records if "rows of 48" in record.getMessage()]
    assert len(said) == 1
    assert "reference runs in its place, plain torch, far slower" in said[0]


def test_weights_are_read_by_what_packed_them(chosen: Callable[..., dict[str, str]]) -> None:
    """An engine whose weights were packed under other choices still gets right answers."""
    weight, x = torch.randn(24, 16), torch.randn(5, 16)
    panels = ops.pack_linear_weight(weight)
    chosen(VLLM_KERNELS="reference")
    plain = ops.pack_linear_weight(weight)
    assert (panels.kind, plain.kind) == ("panels", "plain")
    for _ in range(2):
        for packed in (panels, plain):
            torch.testing.assert_close(ops.linear(x, packed), x @ weight.T)
            assert torch.equal(ops.embedding(torch.tensor([3, 23]), packed), weight[[3, 23]])
        chosen()


def test_the_report_lists_the_choices(chosen: Callable[..., dict[str, str]]) -> None:
    chosen()
    kernels = collect_env.collect()["kernels"]
    assert kernels["rms_norm"] == "cpu (first choice)"
    assert kernels["sample"] == "reference (the only one)"


def test_packages_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packages.kernel_package.cache_clear()
    tried: list[str] = []
    monkeypatch.setattr(packages.importlib, "import_module", lambda name: tried.append(name) or SimpleNamespace())
    try:
        assert all(packages.kernel_package("some.kernels") is not None for _ in range(5))
    finally:
        packages.kernel_package.cache_clear()
    assert tried == ["some.kernels"]


@pytest.mark.parametrize("operator", table.TABLE)
def test_checks_pass_what_is_right_and_see_what_is_wrong(operator: str) -> None:
    honest = getattr(cpu, operator, getattr(reference, operator))
    packs = {"linear", "embedding", "fused_experts", *QUANTIZED}
    assert checks.failure(operator, getattr(reference, operator) if operator in packs else honest, "cpu") is None

    def wrong(*args: Any) -> Any:
        out = getattr(reference, operator)(*args)
        touched = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor)]
        (touched or [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()])[-1][-1] += 1
        return out

    def fails(*args: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    assert "is wrong in" in (checks.failure(operator, wrong, "cpu") or "")
    assert checks.failure(operator, fails, "cpu") == "RuntimeError: no kernel image is available"


@pytest.mark.parametrize("operator", [operator for operator in table.TABLE if hasattr(triton, operator)])
def test_interpreted_kernels_pass_their_checks(operator: str) -> None:
    assert checks.failure(operator, getattr(triton, operator), "cpu") is None


def test_a_kernel_that_fails_its_check_is_not_taken(
    chosen: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    stand_in = SimpleNamespace(**{operator: getattr(reference, operator) for operator in table.TABLE})
    stand_in.silu_and_mul = lambda *args: 1 / 0
    module = table._module
    monkeypatch.setattr(table, "_module", lambda name: stand_in if name == "triton" else module(name))
    monkeypatch.setattr(table, "why_not", lambda name, device: None if name in ("triton", "reference") else "absent")
    monkeypatch.setattr(
        checks, "failure", lambda op, function, device, module, check=checks.failure: check(op, function, "cpu")
    )
    used = chosen("cuda")
    assert used["rms_norm"] == "triton"
    assert used["silu_and_mul"] == "reference"
    assert "silu_and_mul by triton fails its check on cuda: ZeroDivisionError" in log.text


def test_a_refusal_goes_down_the_row(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    """xpu refuses, triton is not installed, fla takes it."""
    calls = []

    def implementation(name: str) -> SimpleNamespace:
        def run(*args: Any) -> str:
            calls.append(name)
            if name == "xpu":
                raise NotImplementedError("a state of another shape")
            return name

        return SimpleNamespace(gated_delta_net=run)

    modules = {name: implementation(name) for name in ("xpu", "fla", "triton", "reference")}
    monkeypatch.setattr(table, "_module", modules.__getitem__)
    monkeypatch.setattr(table, "_obstacle", lambda name, *_: "absent" if name == "triton" else None)
    monkeypatch.setattr(table, "TABLE", {"gated_delta_net": ("", "", "xpu triton fla")})
    table.choose.cache_clear()
    choice = table.choose("xpu")["gated_delta_net"]
    assert choice.implementation == "xpu"
    for _ in range(2):
        with pytest.raises(NotImplementedError) as refusal:
            choice.function()
        assert table.run_another(choice, refusal.value) == "fla"
    assert calls == ["xpu", "fla"] * 2
    told = [record.getMessage() for record in log.records if "another shape" in record.getMessage()]
    assert told == ["gated_delta_net by xpu: a state of another shape; fla runs in its place"]
