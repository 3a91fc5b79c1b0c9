"""The benchmark scripts of the runtime run, and say what they measured."""

import re

import pytest

from test_multiprocess.benchmark_scripts import run

SMALL = ("--width", "32", "--layers", "2", "--context", "8", "--rounds", "1")


@pytest.mark.parametrize("model", ["gpt", "two-matrices"])
def test_both_systems_are_measured(model: str) -> None:
    table = run("runtime.py", "--ranks", "2", "--model", model, *SMALL)
    number = r"[\d.]+"
    assert re.fullmatch(
        rf"{model}, width 32, 2 layers, 2 ranks, loopback\n"
        rf" +ms / step +spread +peak MiB +peak RSS MiB +MiB sent / rank\n"
        rf"fsdp2 +{number} +\d+% +{number} +{number} +{number}\n"
        rf"mfsdp +{number} +\d+% +{number} +{number} +{number}\n"
        rf"ratio +{number} +{number} +{number} +{number}\n"
        rf"owned units: {number} MiB; a gather that pads segments would move {number}x that\n",
        table,
    ), table


def test_every_gather_is_timed_and_the_rule_marked() -> None:
    table = run("gathers.py", "--ranks", "3", "--rounds", "1", "--kib", "16")
    time = r"[\d.]+ \(\d+ %\)"
    rows = re.findall(rf"^\| 16 KiB \| (.+?) \| {time} \* \| {time} \| {time} \| {time} \|$", table, re.M)
    assert rows == ["one owner", "1/2, 1/4, 1/4", "all evenly"], table


def test_without_a_gpu_the_gpu_check_says_so() -> None:
    assert run("gpu_runtime.py") == "no GPU here: nothing was checked\n"
