"""The benchmark scripts of the optimizers run, and say what they measured."""

import re

from test_multiprocess.benchmark_scripts import run

NUMBER = r"[\d.]+"


def test_variants_of_the_step_are_timed_compiled_too() -> None:
    lines = run("optimizer_step.py", "--shapes", "tiny", "--repeats", "2", "--threads", "1", "--compile").splitlines()
    assert lines[0] == "6 matrices, tiny, cpu, 1 threads"
    names = [re.split(" {2,}", line)[0] for line in lines[2:]]
    assert names == [
        "torch.optim.Muon",
        "mfsdp, one by one",
        "mfsdp, batched",
        "mfsdp, compiled",
        "torch's products",
        "plain products",
    ]
    for line in lines[2:]:
        assert re.fullmatch(rf".{{20}} +{NUMBER} ms +\d+% +{NUMBER} +{NUMBER}x +{NUMBER}x +\d+%", line), line


def test_without_a_gpu_the_step_on_it_says_so() -> None:
    assert run("optimizer_step.py", "--device", "cuda") == "no GPU here: nothing was measured\n"


def test_layouts_of_tails_are_timed() -> None:
    lines = run("tails.py", "--tails", "3", "--elements", "5", "--repeats", "2").splitlines()
    names = ["one by one", "foreach", "fused", "flat, with its copies", "flat"]
    for name, line in zip(names, lines[1:], strict=True):
        assert re.fullmatch(rf"{name} +{NUMBER} ms, least +{NUMBER} ms", line), line


def test_owned_and_plain_steps_are_timed_and_nothing_is_sent() -> None:
    table = run("owned_step.py", "--ranks", "2", "--matrices", "4", "--width", "8", "--rounds", "2")
    times = rf"owned {NUMBER} ms, plain {NUMBER} ms, ratio {NUMBER}"
    assert re.fullmatch(
        rf"4 matrices of width 8 on 2 ranks, one by one; CPU time of a rank's step\n"
        rf"median rank  {times}\n"
        rf"worst rank   {times}\n"
        rf"collectives in an owned step, over all ranks: 0\n",
        table,
    ), table


def test_steps_in_backward_hold_the_gradients_of_a_unit_at_a_time() -> None:
    small = ("--width", "32", "--layers", "6", "--context", "8", "--rounds", "1")
    table = run("overlap.py", "--ranks", "2", *small)
    row = rf" +({NUMBER}) MiB +{NUMBER} ms +{NUMBER} ms\n"
    found = re.search(rf"step after backward{row}steps in backward{row}", table)
    assert found, table
    assert float(found[2]) < float(found[1]) / 2, table
