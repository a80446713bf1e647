# SPDX-License-Identifier: Apache-2.0
"""Imports inside ``vllm`` point one way: a module imports from its own layer and from those above it in this list.

Imports in functions count, those for type checkers alone do not. The longest prefix that fits says a module's layer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [
    "vllm.launchers vllm.envs vllm.logger vllm.version vllm.utils vllm.usage vllm.forward_context",
    "vllm.logprobs vllm.inputs vllm.sampling_params vllm.lora vllm.outputs vllm.sequence vllm.v1.metrics"
    " vllm.v1.outputs vllm.v1.request",
    "vllm.platforms vllm.v1.transfers",
    "vllm.kernels vllm._custom_ops vllm.compilation.recording",
    "vllm.distributed",
    # files of weights, read by what understands them
    "vllm.model_executor.parameter vllm.model_executor.model_loader.weight_utils"
    " vllm.model_executor.model_loader.weight_update vllm.model_executor.model_loader.gguf_loader",
    "vllm.model_executor.models.registry vllm.tokenizers vllm.transformers_utils vllm.renderers vllm.config",
    "vllm.v1.kv_cache_interface vllm.v1.attention",
    "vllm.model_executor.layers vllm.model_executor.utils",
    "vllm.model_executor.models",
    "vllm.model_executor.model_loader",
    "vllm.v1.core vllm.v1.sample vllm.v1.structured_output vllm.v1.debug",
    "vllm.v1.worker vllm.compilation",
    "vllm.v1.executor",
    "vllm.engine.arg_utils",
    "vllm._upstream_names",
    "vllm.v1.engine",
    "vllm.engine vllm.beam_search",
    "vllm.benchmarks",
    "vllm.entrypoints",
    # packages that lead to all of the above
    "vllm vllm.model_executor vllm.v1",
]  # fmt: skip


def modules() -> dict[str, Path]:
    found = {}
    for path in (ROOT / "vllm").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


class Imports(ast.NodeVisitor):
    def __init__(self, module: str, path: Path, known: dict[str, Path]) -> None:
        self.package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        self.known, self.found = known, set[str]()
        self.visit(ast.parse(path.read_text()))

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {alias.name for alias in node.names if alias.name in self.known}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package.split(".")[: len(self.package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            self.found |= {f"{source}.{alias.name}", source} & self.known.keys()


def imports() -> dict[str, set[str]]:
    """Module → the modules that it imports; ``from package import module`` is the module alone."""
    known, graph = modules(), {}
    for module, path in known.items():
        found = Imports(module, path, known).found - {module}
        graph[module] = {x for x in found if not any(y.startswith(f"{x}.") for y in found)}
    return graph


def layer(module: str) -> int:
    ranks = {prefix: rank for rank, prefixes in enumerate(LAYERS) for prefix in prefixes.split()}
    parts = module.split(".")
    return next(ranks[name] for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in ranks)


def up(graph: dict[str, set[str]]) -> Iterator[str]:
    for module, found in graph.items():
        # The package's own name brings its version and, when asked for them, upstream's names.
        yield from (f"{module} imports {x}" for x in found if x != "vllm" and layer(x) > layer(module))


def test_imports_point_one_way() -> None:
    assert sorted(up(imports())) == []


def test_there_is_no_circle() -> None:
    graph = {module: found - {"vllm"} for module, found in imports().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import each other: {' -> '.join(error.args[1])}")


def test_what_this_file_finds(tmp_path: Path) -> None:
    """A circle through a function's import, and one that points up."""
    path = tmp_path / "low.py"
    path.write_text("def f():\n    from vllm.entrypoints import llm\nfrom .envs import X\n")
    found = Imports("vllm.utils", path, dict.fromkeys(("vllm.entrypoints.llm", "vllm.envs"), path)).found
    assert found == {"vllm.entrypoints.llm", "vllm.envs"}
    assert list(up({"vllm.utils": found})) == ["vllm.utils imports vllm.entrypoints.llm"]


def asks_which_device(node: ast.AST) -> bool:
    """``x.is_cuda``, or ``device.type == "cpu"`` and its like."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("is_cpu", "is_cuda", "is_xpu")
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    names = [side.value for side in sides if isinstance(side, ast.Constant)]
    return any(name in ("cpu", "cuda", "xpu") for name in names) and any(
        isinstance(side, ast.Attribute) and side.attr in ("type", "device_type") for side in sides
    )


def test_only_kernels_and_platforms_ask_which_device() -> None:
    """What else needs to know whether host and device share memory asks ``transfers.is_host``."""
    allowed = ("vllm.kernels", "vllm.platforms", "vllm.v1.transfers")
    for module, path in modules().items():
        found = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if asks_which_device(node)]
        assert module.startswith(allowed) or not found, f"{module} asks {found}: vllm.kernels.table chooses"
    for text in ("x.is_cpu", "device.type != 'cpu'", "'cuda' == self.platform.device_type"):
        assert asks_which_device(ast.parse(text).body[0].value)  # type: ignore[attr-defined]
