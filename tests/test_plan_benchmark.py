"""The planner's benchmark runs, so that it does not rot."""

from pathlib import Path

from test_multiprocess.benchmark_scripts import report


def test_times(tmp_path: Path) -> None:
    text, (table,) = report("planner.py", tmp_path, "time", "--largest", "1000", "--rounds", "1")
    assert [(row["parameters"], row["shapes"]) for row in table["rows"]] == [(1000, "5"), (1000, "all different")]
    assert "\n- memory of the process: " in text


def test_plans_of_public_models_are_as_even_as_they_can_be(tmp_path: Path) -> None:
    models = ("gpt2-124m", "llama3-8b", "llama3-70b")
    _, (table,) = report("planner.py", tmp_path, "evenness", "--models", *models)
    assert [row["model"] for row in table["rows"]] == [name for name in models for _ in range(4)]
    for row in table["rows"]:
        assert max(row["step"], row["bytes"]) <= 1.05 or "proven to be least" in row["limit"], row
