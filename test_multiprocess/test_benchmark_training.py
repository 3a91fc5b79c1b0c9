"""The benchmarks that train by several systems run, and say what they measured."""

import re
from pathlib import Path

from test_multiprocess.benchmark_scripts import TINY, report
from test_multiprocess.world import Worlds


def test_every_system_is_measured(worlds: Worlds, tmp_path: Path) -> None:
    text, (table,) = report("training_step.py", tmp_path, "--ranks", "2", "--rounds", "2", *TINY, worlds=worlds)
    assert "- measured: GPT of 1 blocks, width 32, fp32, 2 x 8 tokens a rank, 2 rounds after 1 to warm up;" in text
    rows = {row["system"]: row for row in table["rows"]}
    systems = ["mfsdp", "stock", "gather-once", "all-to-all", "zero1-owner", "ddp", "adamw", "mfsdp (again)"]
    assert list(rows) == systems
    assert all(len(re.findall(rf"^\| {re.escape(name)} \|", text, re.M)) == 1 for name in rows)
    assert all(len(row["step"]) == len(row["whole"]) == 2 for row in rows.values())
    silent = {name for name, row in rows.items() if row["collectives"] == row["given"] == row["got"] == 0}
    assert silent == {"mfsdp", "ddp", "adamw", "mfsdp (again)"}
    # six matrices of 32 x 32 elements (one up, one down of four times that), rows of half of them on each rank
    elements = (4 + 4 + 4) * 32 * 32
    assert (rows["gather-once"]["given"], rows["gather-once"]["got"]) == (elements // 2 * 4, elements * 4)
    # bfloat16; half of its rows go away, and so do half of those that it works on for others
    assert rows["all-to-all"]["given"] == rows["all-to-all"]["got"] == elements // 2 * 2 * 2
    assert rows["zero1-owner"]["given"] == elements * 4
    # on the wire each rank gets the other's half, with headers, and what else uses loopback meanwhile
    assert rows["gather-once"]["wire_sent"] > elements // 2 * 4
    assert rows["gather-once"]["wire_received"] > elements // 2 * 4


def test_the_losses_of_two_ranks_are_those_of_ddp(worlds: Worlds, tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--rounds", "4", "--every", "2", *TINY)
    text, (table,) = report("trajectory.py", tmp_path, *arguments, worlds=worlds)
    assert [row["step"] for row in table["rows"]] == [0, 2, 4]
    assert all(row["mfsdp"] == row["ddp"] and row["mfsdp apart"] == 0 for row in table["rows"])
    assert "largest difference from ddp in 5 steps: mfsdp 0.0e+00 nats, stock " in text
    assert "noise: the losses of two runs of mfsdp are at most 0.0e+00 nats apart." in text


def test_a_system_is_measured_beside_what_it_is_compared_with(worlds: Worlds, tmp_path: Path) -> None:
    _, (memory,) = report(
        "memory.py", tmp_path, "--ranks", "2", "--systems", "adamw", "--predict", *TINY, worlds=worlds
    )
    assert [row["system"] for row in memory["rows"]] == ["mfsdp", "adamw", "mfsdp (again)"]
    arguments = ("--ranks", "2", "--rounds", "1", "--systems", "gather-once", *TINY)
    _, (losses,) = report("trajectory.py", tmp_path, *arguments, worlds=worlds)
    assert {"mfsdp", "ddp", "gather-once"} < set(losses["rows"][0])


def test_tokens_per_second_are_measured_for_each_shape(worlds: Worlds, tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--rounds", "1", "--systems", "adamw", "--shapes", "1x4", "2x8", *TINY)
    _, (table,) = report("end_to_end.py", tmp_path, *arguments, worlds=worlds)
    found = [(row["shape"], row["tokens"], row["system"]) for row in table["rows"]]
    systems = ("mfsdp", "adamw", "mfsdp (again)")
    assert found == [("1 x 4", 8, name) for name in systems] + [("2 x 8", 32, name) for name in systems]
    for row in table["rows"]:
        assert abs(row["rate"] * row["whole"][0] - row["tokens"]) < 1e-6


def test_memory_is_measured_beside_its_prediction(worlds: Worlds, tmp_path: Path) -> None:
    systems = ("--systems", "mfsdp", "stock", "gather-once", "zero1-owner", "ddp")
    text, (table, predicted) = report(
        "memory.py", tmp_path, "--ranks", "2", *systems, "--predict", "qwen3-14b", *TINY, worlds=worlds
    )
    assert re.search(r"^\| qwen3-14b \| zero1-owner \| 56\.85 GiB \| 57\.78 GiB \|", text, re.M), text
    rows = {row["system"]: row for row in table["rows"]}
    assert list(rows) == ["mfsdp", "stock", "gather-once", "zero1-owner", "ddp", "mfsdp (again)"]
    assert len(predicted["rows"]) == 4
    for name in ("stock", "gather-once", "ddp"):
        # the planner's picture lacks the tokens and AdamW's step counters
        assert 0 < rows[name]["resident"] - rows[name]["resident_predicted"] < 1024, name
    assert rows["stock"]["resident"] < rows["zero1-owner"]["resident"] < rows["ddp"]["resident"]
    matrices = 12 * 32 * 32 * 4
    assert rows["gather-once"]["step"] - rows["gather-once"]["resident"] >= matrices * 5 // 2


def test_scaling_is_measured_and_simulated(worlds: Worlds, tmp_path: Path) -> None:
    arguments = ("--ranks", "1", "2", "--rounds", "1", "--model", "llama3-8b", "--simulate", "64", "1024", *TINY)
    text, (measured, simulated) = report("scaling.py", tmp_path, *arguments, worlds=worlds)
    assert [row["ranks"] for row in measured["rows"]] == [1, 2]
    few, many = simulated["rows"]
    assert few["step"] >= few["bound"]
    # fewer matrices than ranks: the largest one's step, and some elements of embeddings
    assert many["bound"] <= many["step"] < 1.02 * many["bound"]
    assert re.search(r"^\| 1,024 \| 224 \| 800 \|", text, re.M), text
