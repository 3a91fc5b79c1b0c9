"""The benchmark of graph style runs, and says what it measured."""

import re

from test_multiprocess.benchmark_scripts import run


def test_all_systems_are_measured() -> None:
    size = ("--width", "16", "--layers", "1", "--heads", "2", "--batch", "2", "--context", "8", "--rounds", "1")
    table = run("graph.py", "--ranks", "2", "--backend", "aot_eager", *size)
    row = r" +[\d.]+ +\d+ - \d+ +[\d.]+ +[\d.]+ +[\d.]+\n"
    assert re.fullmatch(
        rf"GPT, width 16, 1 layers, batch 2 x 8, 2 ranks\n"
        rf" +ms / step +quartiles +graph over it +peak MiB +graph over it\n"
        rf"fsdp2, blocks compiled{row}"
        rf"hooks, blocks compiled{row}"
        rf"graph, compiled +[\d.]+ +\d+ - \d+ +1\.00 +[\d.]+ +1\.00\n"
        rf"hooks, eager{row}"
        rf"graph, eager{row}",
        table,
    ), table
