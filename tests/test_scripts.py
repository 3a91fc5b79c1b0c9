"""The project's scripts, run with stand-ins for Python and pip: what they install, and what they say."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# An interpreter that makes "environments" which are itself, logs what modules it is asked to run, and leaves
# everything else to the real one.
STAND_IN = """\
#!/bin/bash
if [ "$1" = "-c" ]; then exec {python} "$@"; fi
case "$1" in *arguments.py) exec {python} "$@" ;; esac
if [ "$1" = "--version" ]; then echo "Python 3.11.9"; exit; fi
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$4/bin" && cp "$0" "$4/bin/python"; exit; fi
echo "${{@:2}}" >>{log}
case "$*" in {failing}) echo "no such release" >&2; exit 1 ;; esac
echo "== 3 passed in 0.1s =="
"""
TOO_OLD = """\
#!/bin/bash
[ "$1" = "--version" ] && echo "Python 3.9.1"
exit 1
"""


class Clone:
    """A copy of the scripts in a folder of its own, with a PATH on which only stand-ins are interpreters."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "clone with a space"
        self.root.mkdir()
        for name in ("ci", ".ci"):
            shutil.copytree(ROOT / name, self.root / name)
        (self.root / "examples").mkdir()
        shutil.copy(ROOT / "examples/arguments.py", self.root / "examples")
        (self.root / "pyproject.toml").write_text("[project]\n")
        self.log = folder / "log"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in ("bash", "env", "dirname", "cksum", "cat", "cp", "mkdir"):
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.add_python()

    def add_python(self, name: str = "python3.11", failing: str = "nothing") -> None:
        text = STAND_IN.format(python=sys.executable, log=self.log, failing=failing)
        self.add(name, text)

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, script: str, *args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.root / script, *args],
            cwd=cwd or self.root.parent,
            env={"PATH": str(self.bin), **env},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def ran(self) -> list[str]:
        """The modules that were run since the last call, with their arguments."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.replace(str(self.root), "ROOT") for line in lines]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def installs(lines: Sequence[str]) -> list[str]:
    return [line.rpartition(" --disable-pip-version-check ")[2] for line in lines if line.startswith("pip ")]


def test_installs_torch_first_and_only_once(clone: Clone) -> None:
    assert clone.run("ci/test").returncode == 0
    assert installs(clone.ran()) == ["torch==2.13.0", "--editable ROOT[test]"]
    assert clone.run("ci/train").returncode == 0
    assert installs(clone.ran()) == []
    (clone.root / "pyproject.toml").write_text("[project]\ndependencies = []\n")
    assert clone.run("ci/test").returncode == 0
    assert installs(clone.ran()) == ["torch==2.13.0", "--editable ROOT[test]"]


def test_an_environment_that_exists_is_kept(clone: Clone) -> None:
    (clone.root / ".venv/bin").mkdir(parents=True)
    clone.add_python()
    shutil.move(clone.bin / "python3.11", clone.root / ".venv/bin/python")
    (clone.root / ".venv/mine").touch()
    assert clone.run("ci/test").returncode == 0
    assert (clone.root / ".venv/mine").exists()


@pytest.mark.parametrize("failing", ["*torch==*", "*--editable*"])
def test_a_failed_install_stops_and_is_tried_again(clone: Clone, failing: str) -> None:
    clone.add_python(failing=failing)
    for _ in range(2):
        result = clone.run("ci/test")
        assert result.returncode == 1
        assert "no such release" in result.stderr
        assert "failed (pip's message is above); nothing was run." in result.stderr
        assert not any(line.startswith("pytest") for line in clone.ran())
        shutil.rmtree(clone.root / ".venv")


def test_python_too_old_or_absent(clone: Clone) -> None:
    (clone.bin / "python3.11").unlink()
    absent = clone.run("ci/train")
    assert absent.returncode == 1
    assert "no Python 3.11 or newer on PATH" in absent.stderr
    clone.add("python3", TOO_OLD)
    assert "no Python 3.11 or newer on PATH" in clone.run("ci/test").stderr
    assert "PYTHON=python3 is Python 3.9.1; Python 3.11 or newer" in clone.run("ci/test", PYTHON="python3").stderr
    assert "PYTHON=python9: there is no such program" in clone.run("ci/test", PYTHON="python9").stderr
    clone.add_python("python3.13")
    assert clone.run("ci/test").returncode == 0


def test_train_passes_arguments_on_from_any_folder(clone: Clone, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "my text").mkdir()
    assert clone.run("ci/train", "--steps", "7", "--data", "my text", cwd=elsewhere).returncode == 0
    run = clone.ran()[-1]
    assert run.startswith("torch.distributed.run --standalone --nproc-per-node 2 ")
    assert run.endswith("ROOT/examples/train_lm.py --steps 7 --data my text")
    clone.run("ci/train", NPROC="4")
    assert "--nproc-per-node 4" in clone.ran()[-1]
    for wrong in ("0", "two", "-1"):
        result = clone.run("ci/train", NPROC=wrong)
        assert result.returncode == 1
        assert f"NPROC must be a positive number of ranks, not '{wrong}'" in result.stderr


def test_train_tells_a_mistake_once_and_starts_nothing(clone: Clone) -> None:
    assert clone.run("ci/train").returncode == 0
    assert clone.ran()[-1].startswith("torch.distributed.run")
    for wrong, message in (
        (["--batch", "25"], "--batch 25 must be a multiple of the number of ranks, 2.\n"),
        (["--data", "no such"], "--data no such: there is no such file or folder.\n"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'\n"),
    ):
        result = clone.run("ci/train", *wrong)
        assert result.returncode == 2
        assert (result.stdout, result.stderr) == ("", f"train_lm: {message}")
        assert clone.ran() == []
    shown = clone.run("ci/train", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.count("usage: train_lm") == 1
    assert clone.ran() == []


def test_the_arguments_are_checked_without_torch() -> None:
    program = "import sys, arguments; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT / "examples", capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr


def test_test_passes_arguments_and_the_exit_code_on(clone: Clone) -> None:
    assert clone.run("ci/test", "tests/test_plan.py", "-k", "hash").returncode == 0
    assert clone.ran()[-1] == "pytest tests/test_plan.py -k hash"
    clone.add_python(failing="*pytest*")
    shutil.copy(clone.bin / "python3.11", clone.root / ".venv/bin/python")
    assert clone.run("ci/test").returncode == 1


def test_ci_run_lints_tests_and_fails_if_any_fails(clone: Clone) -> None:
    passed = clone.run(".ci/run")
    assert passed.returncode == 0, passed.stderr
    assert passed.stdout.splitlines()[-1] == "== 3 passed in 0.1s =="
    lines = clone.ran()
    assert installs(lines) == ["torch==2.13.0", "--editable ROOT[test,dev]"]
    assert [line for line in lines if not line.startswith("pip ")] == [
        "ruff check .",
        "ruff format --check .",
        "mypy",
        "pytest",
    ]
    for failing in ("*check*.", "*mypy", "*pytest*"):
        clone.add_python(failing=failing)
        shutil.copy(clone.bin / "python3.11", clone.root / ".venv/bin/python")
        failed = clone.run(".ci/run")
        assert failed.returncode != 0
        assert clone.ran()[-1] == "pytest"


def test_scripts_name_no_registry_and_no_path_of_a_machine() -> None:
    for script in ("ci/setup", "ci/train", "ci/test", ".ci/run"):
        text = (ROOT / script).read_text()
        assert not any(word in text for word in ("http", "index-url", "/home", "/root", "/work"))
        assert os.access(ROOT / script, os.X_OK)
