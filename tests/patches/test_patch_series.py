# SPDX-License-Identifier: Apache-2.0
"""Every patch on the released files of every upstream release in the matrix, by git and by the tool."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from upstream_releases import CannotFetch, fetch, hashes, pristine, small_tree

from patches.__main__ import main, table
from patches.series import HERE, load_series

SERIES = load_series()
PATCHES = {patch.number: patch for patch in SERIES.patches}
NEWEST_AND_OLDEST = {*SERIES.releases[:2], *SERIES.releases[-2:]}

XPU = "vllm/distributed/device_communicators/xpu_communicator.py"
BASE = "vllm/distributed/device_communicators/base_device_communicator.py"
DP_V2 = "vllm/v1/worker/gpu/dp_utils.py"
RUNNER_V2 = "vllm/v1/worker/gpu/model_runner.py"
# Where each patch is meant to land, written by hand: file and enclosing definition, in file order.
INTENDED = {
    "0001": [("vllm/v1/worker/dp_utils.py", "coordinate_batch_across_dp")],
    "0002": [
        (DP_V2, "<module>"),
        (DP_V2, "sync_cudagraph_and_dp_padding"),
        (RUNNER_V2, "GPUModelRunner.__init__"),
        (RUNNER_V2, "GPUModelRunner.execute_model"),
    ],
    "0003": [("vllm/v1/worker/gpu/input_batch.py", "InputBatch.make_dummy")] * 2,
    "0004": [("vllm/config/vllm.py", "VllmConfig.__post_init__")],
    "0005": [(XPU, "XpuCommunicator.all_gatherv._all_gather_single")] * 2,
    "0006": [(XPU, "XpuCommunicator.all_gatherv")],
    "0007": [
        (BASE, "DeviceCommunicatorBase.__init__"),
        (XPU, "XpuCommunicator.reduce_scatterv"),
        (XPU, "XpuCommunicator.all_gatherv"),
    ],
    "0008": [("vllm/model_executor/layers/attention/attention.py", "unified_attention_with_output")],
    "0009": [("vllm/model_executor/layers/attention/mla_attention.py", "MLAAttention.forward_impl")],
    "0010": [("vllm/model_executor/models/qwen3_next.py", "Qwen3NextDecoderLayer.forward")],
    "0011": [("vllm/_xpu_ops.py", "_gdn_attention_core_xpu_impl")],
    "0012": [("vllm/_xpu_ops.py", "_gdn_attention_core_xpu_impl")],
    "0013": [("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner._dummy_run")] * 2,
    "0014": [("vllm/v1/attention/ops/triton_decode_attention.py", "_fwd_kernel_stage2")],
    "0015": [("vllm/model_executor/layers/fused_moe/experts/xpu_moe.py", "XPUExperts.apply")],
}
# Here the patch fits, but the release has no use for it: its pinned kernels take padded rows; its routers give no -1.
FITS_WITHOUT_NEED = {("0012", release) for release in SERIES.releases[4:]} | {("0015", "0.22.1"), ("0015", "0.24.0")}


def fetched(release: str) -> Path:
    try:
        return fetch(release)
    except CannotFetch as reason:
        pytest.skip(str(reason))


@pytest.fixture(
    params=[
        pytest.param(release, marks=[] if release in NEWEST_AND_OLDEST else pytest.mark.slow)
        for release in SERIES.releases
    ]
)
def release(request: pytest.FixtureRequest) -> str:
    fetched(request.param)
    return request.param


def touched(release: str) -> list[str]:
    return list(SERIES.pristine[release])


def needed(release: str) -> list[str]:
    return [number for number, patch in PATCHES.items() if patch.states[release][0] == "needed"]


def git_apply(root: Path, number: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "apply", *flags, str(HERE / f"{PATCHES[number].name}.patch")]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def changes(before: Path, after: Path) -> list[tuple[str, int, int]]:
    """(path, first line, number of lines) of every run of new lines, in file order."""
    diff = subprocess.run(
        ["git", "diff", "--no-index", "--no-prefix", "-U0", str(before), str(after)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    found, path = [], ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = str(Path("/", line[4:].lstrip("/")).relative_to(after))
        elif head := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            found.append((path, int(head[1]), int(head[2] or 1)))
    return found


def enclosing(file: Path, line: int, count: int) -> str:
    """The innermost definition around lines ``line`` to ``line + count - 1`` (1-based)."""
    names: list[str] = []
    node: ast.AST = ast.parse(file.read_text())
    while True:
        for child in ast.walk(node):
            if child is node or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            assert child.end_lineno is not None
            if child.lineno <= line and line + count - 1 <= child.end_lineno:
                names.append(child.name)
                node = child
                break
        else:
            return ".".join(names) or "<module>"


def landed(before: Path, after: Path) -> list[tuple[str, str]]:
    return [(path, enclosing(after / path, line, count)) for path, line, count in changes(before, after)]


def test_every_file_has_a_row_and_every_row_a_file():
    assert sorted(path.stem for path in HERE.glob("*.patch")) == [patch.name for patch in SERIES.patches]
    assert list(INTENDED) == list(PATCHES)


def test_readme_shows_the_matrix():
    assert table() in (HERE / "README.md").read_text()


def test_headers_tell_what_a_reader_needs():
    for patch in SERIES.patches:
        header = (HERE / f"{patch.name}.patch").read_text().split("\n---\n")[0]
        for word in ("Symptom", "ause", "Change:", "Releases:", "Shown by: tests/patches/"):
            assert word in header, f"{patch.name} lacks {word!r}"
        for shown in re.findall(r"::(\w+)", header):
            assert f"def {shown}(" in (Path(__file__).parent / "test_behaviour.py").read_text()


def test_patches_quote_few_upstream_lines():
    removed = context = 0
    for patch in SERIES.patches:
        rows = (HERE / f"{patch.name}.patch").read_text().split("\n---\n")[1].splitlines()
        removed += sum(row.startswith("-") and not row.startswith("---") for row in rows)
        context += sum(row.startswith(" ") and row != " " for row in rows)
    hunks = sum(len(patch.hunks) for patch in SERIES.patches)
    assert removed == 1, "only the dummy's wrong slot count is replaced; all else is insertion"
    assert context <= 2 * hunks


def test_each_patch_alone_by_git(release: str, tmp_path: Path):
    before = small_tree(release, touched(release), tmp_path / "before")
    for number, patch in PATCHES.items():
        after = small_tree(release, touched(release), tmp_path / number)
        fits = git_apply(after, number).returncode == 0
        assert fits == (number in needed(release) or (number, release) in FITS_WITHOUT_NEED), f"{patch.name}"
        if fits:
            assert landed(before, after) == INTENDED[number], patch.name


def test_tool_applies_reverts_and_agrees_with_git(release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = small_tree(release, touched(release), tmp_path / "before")
    tree = small_tree(release, touched(release), tmp_path / "tree")
    by_git = small_tree(release, touched(release), tmp_path / "git")

    assert main(["apply", str(tree)]) == 0
    for number in needed(release):
        assert git_apply(by_git, number).returncode == 0, number
    assert hashes(tree) == hashes(by_git)
    for path in touched(release):
        compile((tree / path).read_text(), path, "exec")
    assert sorted(landed(before, tree)) == sorted(place for number in needed(release) for place in INTENDED[number])

    assert main(["status", str(tree)]) == 0
    report = capsys.readouterr().out
    assert len(re.findall(r"^\d{4}-\S+ +applied ", report, re.MULTILINE)) == len(needed(release))

    assert main(["revert", str(tree)]) == 0
    assert hashes(tree) == hashes(before)
    for number in reversed(needed(release)):
        assert git_apply(by_git, number, "-R").returncode == 0, number
    assert hashes(by_git) == hashes(before)


def test_each_patch_alone_by_the_tool(release: str, tmp_path: Path):
    before = small_tree(release, touched(release), tmp_path / "before")
    tree = small_tree(release, touched(release), tmp_path / "tree")
    for number in needed(release):
        assert main(["apply", str(tree), "--only", number]) == 0
        assert landed(before, tree) == INTENDED[number]
        assert main(["revert", str(tree)]) == 0
        assert hashes(tree) == hashes(before)


def test_release_is_recognised_without_a_version_file(release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tree = small_tree(release, touched(release), tmp_path)
    (tree / "vllm" / "_version.py").unlink()
    assert main(["apply", str(tree), "--only", "5,6"]) == 0
    assert f"vLLM {release} at" in capsys.readouterr().out


def test_pristine_hashes_are_those_of_the_release(release: str):
    paths = sorted({path for patch in SERIES.patches for path in patch.paths})
    row = pristine([release], paths).split("\n\n", 1)[1]
    assert row in (HERE / "pristine.toml").read_text()


def test_a_whole_release_is_unchanged_but_for_the_patched_files(tmp_path: Path):
    release = SERIES.releases[-1]
    tree = tmp_path / "tree"
    shutil.copytree(fetched(release), tree)
    before = hashes(tree)
    assert main(["apply", str(tree / "vllm")]) == 0
    after = hashes(tree)
    assert after.keys() == before.keys()
    assert {path for path in after if after[path] != before[path]} == {
        path for number in needed(release) for path in PATCHES[number].paths
    }
    assert main(["revert", str(tree)]) == 0
    assert hashes(tree) == before
