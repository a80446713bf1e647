# SPDX-License-Identifier: Apache-2.0
"""What the tool refuses: one line that says what to do, exit code 1, and the tree as it was."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from upstream_releases import CannotFetch, hashes, small_tree

import patches.tree
from patches.__main__ import main
from patches.series import HERE, Hunk, load_series, parse_hunks

SERIES = load_series()
RELEASE = SERIES.releases[-1]
RUNNER_V2 = "vllm/v1/worker/gpu/model_runner.py"


@pytest.fixture
def tree() -> Iterator[Path]:
    # Not below pytest's own folder, which only its owner may enter.
    with tempfile.TemporaryDirectory() as name:
        try:
            yield small_tree(RELEASE, list(SERIES.pristine[RELEASE]), Path(name))
        except CannotFetch as reason:
            pytest.skip(str(reason))


@pytest.fixture
def refused(tree: Path, capsys: pytest.CaptureFixture[str]):
    def check(*argv: str, says: str, at: Path | None = None) -> None:
        before = hashes(tree)
        capsys.readouterr()
        assert main([argv[0], str(at or tree), *argv[1:]]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert says in error
        assert hashes(tree) == before

    return check


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("command", ["status", "apply", "revert"])
def test_no_tree_there(command: str, refused, tree: Path):
    refused(command, says="no vllm package in", at=tree / "nowhere")
    refused(command, says="no vllm package in", at=tree / "vllm" / "config")
    refused(command, says="no vllm package in", at=tree / "vllm" / "_version.py")


@pytest.mark.parametrize("command", ["status", "apply", "revert"])
def test_unknown_release(command: str, refused, tree: Path):
    version = tree / "vllm" / "_version.py"
    edit(version, f"version = '{RELEASE}'", "version = '0.31.0'")
    refused(command, says="release 0.31.0 is not in the series")
    edit(version, "version = '0.31.0'", f"version = '{RELEASE}.post1.dev3+gabc'")
    refused(command, says=f"release {RELEASE}.post1.dev3 is not in the series")
    version.write_text("")
    refused(command, says="release without a version is not in the series")
    version.unlink()
    edit(tree / RUNNER_V2, "self.max_model_len", "self.limit")
    refused(command, says="none of the releases")


@pytest.mark.parametrize("command", ["status", "apply", "revert"])
def test_modified_tree(command: str, refused, tree: Path):
    edit(tree / RUNNER_V2, "\n", "\n# a change of our own\n")
    refused(command, says=f"{RUNNER_V2} is not as release {RELEASE} ships it: restore it")
    edit(tree / "vllm" / "_xpu_ops.py", "\n", "\n# and one more\n")
    refused(command, says=", nor are 1 more files: restore it")


@pytest.mark.parametrize(
    "content", [b"", b"def broken(:\n", b"\xff\xfe", b"x = 1\r\n"], ids=["empty", "syntax", "not text", "crlf"]
)
def test_damaged_file(content: bytes, refused, tree: Path):
    (tree / RUNNER_V2).write_bytes(content)
    refused("apply", says="restore it")


def test_missing_file(refused, tree: Path):
    (tree / RUNNER_V2).unlink()
    refused("apply", says=f"{RUNNER_V2} is not as release {RELEASE} ships it: restore it")


def test_modified_after_apply(refused, tree: Path):
    assert main(["apply", str(tree)]) == 0
    edit(tree / RUNNER_V2, "fewest_reqs = min(", "fewest_reqs = max(")
    refused("revert", says="half applied: 0002-dp-padding-v2: restore its files")
    refused("apply", says="half applied: 0002-dp-padding-v2: restore its files")


def test_second_apply(refused, tree: Path):
    assert main(["apply", str(tree)]) == 0
    refused("apply", says="there is nothing to do, or `revert` first")
    refused("apply", "--only", "0001", says="already applied: 0001: there is nothing to do")


def test_partly_applied_series(refused, tree: Path):
    before = hashes(tree)
    assert main(["apply", str(tree), "--only", "0001,0004"]) == 0
    rest = "0002,0005,0006,0007,0008,0009,0011,0014"
    refused("apply", says=f"already applied: 0001, 0004: --only {rest} applies the rest")
    assert main(["apply", str(tree), "--only", rest]) == 0
    assert main(["revert", str(tree)]) == 0
    assert hashes(tree) == before


def test_half_applied_patch(refused, tree: Path):
    hunk = parse_hunks((HERE / "0002-dp-padding-v2.patch").read_text())[1]
    text = hunk.apply((tree / hunk.path).read_text())
    assert text is not None
    (tree / hunk.path).write_text(text)
    for command in ("status", "apply", "revert"):
        refused(command, says="half applied: 0002-dp-padding-v2: restore its files from release")


def test_wrong_names(refused):
    refused("apply", "--only", "0099", says="no patch '0099': `status` lists the names")
    refused("apply", "--only", "", says="no patch ''")
    refused("apply", "--only", "0001,0013", says="0013-dummy-slots is not for release")


def test_nothing_to_revert(refused):
    refused("revert", says="nothing to revert")


def test_a_tree_that_is_not_upstream(refused):
    refused("apply", says="", at=HERE.parent)


def test_read_only_folder(refused, tree: Path):
    folder = (tree / RUNNER_V2).parent
    files = list(tree.rglob("*"))
    user = os.geteuid()
    tree.chmod(0o755)
    for path in files:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        if user == 0:  # root may write anywhere
            os.seteuid(65534)
        refused("apply", says="run as the owner of a writable tree")
        if user == 0:
            os.seteuid(0)
            # The place for the originals is writable and one folder of the series is not.
            os.chown(tree / "vllm", 65534, 65534)
            (tree / "vllm").chmod(0o755)
            os.seteuid(65534)
            refused("apply", says="run as the owner of a writable tree")
    finally:
        os.seteuid(user)
        for path in files:
            path.chmod(0o755)
    assert not list(folder.glob(".patches*"))
    assert not list((tree / "vllm").glob(".patches*"))


@pytest.mark.parametrize("failing", range(1, 9))
def test_failure_half_way_leaves_nothing(failing: int, refused, tree: Path, monkeypatch: pytest.MonkeyPatch):
    replace, calls = patches.tree._replace, []

    def fail_once(path: Path, content: bytes) -> None:
        calls.append(path)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")
        replace(path, content)

    monkeypatch.setattr(patches.tree, "_replace", fail_once)
    refused("apply", says="No space left on device")
    assert not list(tree.rglob(".patches*"))


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_killed_half_way_is_rolled_back_by_the_next_call(command: str, refused, tree: Path):
    before = hashes(tree)
    if command == "revert":
        assert main(["apply", str(tree)]) == 0
    stands = hashes(tree)
    script = (
        "import os, sys, patches.tree as t; from patches.__main__ import main\n"
        "replace, calls = t._replace, []\n"
        "def die_at_third(path, content):\n"
        "    calls.append(path)\n"
        "    if len(calls) == 3: os._exit(9)\n"
        "    replace(path, content)\n"
        "t._replace = die_at_third\n"
        "main(sys.argv[1:])\n"
    )
    run = subprocess.run([sys.executable, "-c", script, command, str(tree)], cwd=HERE.parent, check=False)
    assert run.returncode == 9
    assert hashes(tree) != stands
    refused("status", says="killed half way")
    # One that is refused afterwards rolls back too; both are whole calls.
    assert main([command, str(tree)]) == 0
    assert (hashes(tree) == before) == (command == "revert")
    if command == "apply":
        assert main(["revert", str(tree)]) == 0
    assert hashes(tree) == before
    assert not list(tree.rglob(".patches*"))


def test_two_calls_at_once(refused, tree: Path):
    handle = os.open(tree / "vllm", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        refused("apply", says="another call is changing")
    finally:
        os.close(handle)


def test_dry_run_writes_nothing(tree: Path, capsys: pytest.CaptureFixture[str]):
    before = hashes(tree)
    assert main(["apply", str(tree), "--dry-run"]) == 0
    assert "would apply 0001-dp-padding-v1, 0002-dp-padding-v2" in capsys.readouterr().out
    assert hashes(tree) == before


def test_works_without_git_and_keeps_file_modes(tree: Path):
    (tree / RUNNER_V2).chmod(0o640)
    command = [sys.executable, "-m", "patches", "apply", str(tree)]
    subprocess.run(command, cwd=HERE.parent, env={"PATH": "/nowhere"}, check=True)
    assert (tree / RUNNER_V2).stat().st_mode & 0o777 == 0o640
    assert shutil.which("git", path="/nowhere") is None


def test_a_hunk_stays_in_its_function():
    """The same lines in another function, nearer to the hunk's line number, are not touched; nor are two alike."""
    body = "    first\n    second\n"
    decoy, target = f"def decoy():\n{body}", f"def target():\n{body}"
    (hunk,) = parse_hunks("+++ b/x.py\n@@ -2,2 +2,3 @@ target\n     first\n+    added\n     second\n")
    assert hunk.apply(decoy + target) == decoy + target.replace("first\n", "first\n    added\n")
    assert hunk.apply(decoy) is None
    assert hunk.apply(target + body) is None
    assert isinstance(hunk, Hunk)


def test_the_tree_can_be_named_from_inside(tree: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in (tree, tree / "vllm"):
        monkeypatch.chdir(folder)
        assert main(["status", "."]) == 0
        assert main(["status", str(folder)]) == 0


def test_a_tree_that_may_not_be_read(tree: Path, capsys: pytest.CaptureFixture[str]):
    user = os.geteuid()
    tree.chmod(0)
    try:
        if user == 0:
            os.seteuid(65534)
        assert main(["apply", str(tree)]) == 1
    finally:
        os.seteuid(user)
        tree.chmod(0o755)
    assert "give a tree that you may read and write" in capsys.readouterr().err
