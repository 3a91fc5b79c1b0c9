"""What the README shows works as shown."""

import re
import subprocess
import sys
from pathlib import Path

import mfsdp

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks() -> tuple[str, str, str]:
    """The example, the lines that shard its model in graph style, and those about checkpoints of it."""
    first, graph, checkpoints = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    return first, graph, checkpoints


def example() -> str:
    return blocks()[0]


def test_the_example_is_short() -> None:
    assert sum(bool(line.strip()) for line in example().splitlines()) <= 15


def run_on_two_ranks(folder: Path, text: str) -> str:
    """Run a script, check that both ranks have trained, and return what it has printed."""
    script = folder / "example.py"
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder)
    assert result.returncode == 0, result.stderr
    losses = re.findall(r"rank (\d), step \d: loss ([\d.]+)", result.stdout)
    of_rank = [[float(loss) for rank, loss in losses if rank == wanted] for wanted in "01"]
    assert of_rank[0] != of_rank[1]  # each rank has data of its own
    assert all(len(found) == 10 and found[-1] < found[0] for found in of_rank)
    return result.stdout


def test_the_example_runs_on_two_ranks(tmp_path: Path) -> None:
    first, _, checkpoints = blocks()
    shown = run_on_two_ranks(
        tmp_path, f"{first}{checkpoints}print([p.placements for p in model.parameters()], extra)\n"
    )
    for part in ("OwnerShard(owner=0)", "OwnerShard(owner=1)", "Tail(owner=", "{'step': 100}"):
        assert part in shown
    assert mfsdp.checkpoint.latest(tmp_path / "runs") == tmp_path / "runs" / "step-100"


def test_the_example_runs_as_one_graph(tmp_path: Path) -> None:
    first, graph, _ = blocks()
    before, by_hooks, after = re.split(r"^(plan = .*?^mfsdp\.fully_shard.*?\n)", first, flags=re.DOTALL | re.MULTILINE)
    assert by_hooks.count("fully_shard") == 2
    quickly = graph.replace("fullgraph=True)", 'fullgraph=True, backend="aot_eager")')  # Inductor takes a minute
    assert quickly != graph
    run_on_two_ranks(tmp_path, f"{before}{quickly}{after}")


def test_names_in_the_table_exist() -> None:
    names = re.findall(r"^\| `(?:mfsdp\.)([\w.]+)", README, flags=re.MULTILINE)
    names += re.findall(r", `mfsdp\.([\w.]+)", README)
    assert len(names) > 5
    for name in names:
        found: object = mfsdp
        for part in name.split("."):
            found = getattr(found, part)
