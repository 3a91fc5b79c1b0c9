"""``python -m mfsdp``: what it prints, what it writes, and how it fails."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import expecttest
import pytest
import torch
from torch import nn

from mfsdp.planning import Role, ShardPlan, plan_specs
from mfsdp.planning.catalogue import catalogue_specs
from mfsdp.planning.cli import main
from mfsdp.planning.cost import MuonCost, Precision
from mfsdp.planning.plot import plot
from mfsdp.planning.rates import Rates, calibrate


def tiny() -> nn.Module:
    """What --module finds here."""
    model = nn.Module()
    model.qkv = nn.Linear(64, 192)
    model.experts = nn.Parameter(torch.empty(8, 64, 32))
    return model


def failing() -> nn.Module:
    """What --module finds here and cannot use."""
    raise KeyError("no such size")


def not_a_module() -> int:
    """What --module should not find."""
    return 3


class TestOutput(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _capture(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        self.capsys, self.folder = capsys, tmp_path

    def output(self, *arguments: str) -> str:
        assert main(["plan", *arguments]) == 0
        text = self.capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 100
        return text.rstrip("\n")

    def test_more_ranks_than_matrices_with_replicas(self) -> None:
        self.assertExpectedInline(
            self.output("--model", "gpt2-124m", "--world-size", "512", "--mesh", "4x128"),
            """\
ShardPlan for 128 ranks x 4 replicas: 148 parameters, 124 M elements, 13 units, cost model muon

role    parameters  elements  resident        step    owners
MATRIX          48    84.9 M   972 MiB  1.52 TFLOP  0-46,127
TAIL            98     121 k  1.85 MiB  1.70 MFLOP     35-47
ROWS             2    39.4 M   601 MiB   551 MFLOP       all

rank        matrices        step  of mean  resident  of mean
0                  1  40.8 GFLOP    3.428  31.7 MiB    2.577
1                  1  40.8 GFLOP    3.428  31.7 MiB    2.577
2                  1  40.8 GFLOP    3.428  31.7 MiB    2.577
3                  1  40.8 GFLOP    3.428  31.7 MiB    2.577
(120 more)
123                0  4.31 MFLOP    0.000  4.70 MiB    0.382
124                0  4.31 MFLOP    0.000  4.70 MiB    0.382
125                0  4.31 MFLOP    0.000  4.70 MiB    0.382
126                0  4.31 MFLOP    0.000  4.70 MiB    0.382
largest over mean: step 3.428, resident 2.577, matrices 2.667

parameter                 role    shape      dtype     n  resident        step    owners
embed.weight              ROWS    50257x768  float32   1   589 MiB   540 MFLOP       all
positions.weight          ROWS    1024x768   float32   1  12.0 MiB  11.0 MFLOP       all
layers.*.attn.qkv.weight  MATRIX  2304x768   float32  12   243 MiB   381 GFLOP     23-34
layers.*.attn.o.weight    MATRIX  768x768    float32  12  81.0 MiB   163 GFLOP     35-46
layers.*.mlp.up.weight    MATRIX  3072x768   float32  12   324 MiB   489 GFLOP  12 ranks
layers.*.mlp.down.weight  MATRIX  768x3072   float32  12   324 MiB   489 GFLOP  12 ranks
layers.*.vectors.*        TAIL    768        float32  72   864 KiB   774 kFLOP     35-46
layers.*.vectors.*        TAIL    2304       float32  12   432 KiB   387 kFLOP     35-46
layers.*.vectors.*        TAIL    3072       float32  12   576 KiB   516 kFLOP     35-46
vectors.*                 TAIL    768        float32   2  24.0 KiB  21.5 kFLOP        47

fullest rank        mean  with largest item     planned  ratio  proven bound
step          11.9 GFLOP         40.8 GFLOP  40.8 GFLOP  1.000    40.8 GFLOP
resident        12.3 MiB           31.1 MiB    31.7 MiB  1.018      31.7 MiB

gather per pass 475 MiB in 13 units, reduce 475 MiB
largest unit (root): gather 150 MiB, reduce 150 MiB
owners per unit 3.8, the one with most has 38% of it (means over units)
all-reduce among 4 replicas: up to 10.2 MiB of gradients per rank, 15.3 MiB sent in a ring

fullest or busiest rank  resident  peak in step  moved in step        step
zero3                    12.3 MiB      41.6 MiB        321 MiB  1.52 TFLOP
zero1-owner               961 MiB       986 MiB        471 MiB  40.8 GFLOP
gather-once              12.3 MiB       357 MiB        321 MiB  1.52 TFLOP
mfsdp                    31.7 MiB      56.4 MiB            0 B  40.8 GFLOP

note: 48 matrices for 128 ranks: 80 ranks without any, idle in the step.
note: the step takes as long as that of layers.0.mlp.up.weight, 3.43 times the mean of all ranks;
  more ranks do not make it faster.
note: what would help: 37 ranks or fewer, or replicas: --mesh 4x32; splits= if
  layers.0.mlp.up.weight is several matrices, which are less work apart.""",
        )

    def test_mixed_precision(self) -> None:
        text = self.output("--model", "qwen3-32b", "--world-size", "64", "--param-dtype", "bf16", "--master", "fp32")
        self.assertExpectedInline(
            text,
            """\
ShardPlan for 64 ranks: 707 parameters, 32.8 G elements, 65 units, cost model muon (master=float32)

role    parameters  elements  resident        step  owners
MATRIX         448    31.2 G   349 GiB  3.57 PFLOP    0-63
TAIL           257     677 k  10.3 MiB  9.48 MFLOP    0-63
ROWS             2    1.56 G  23.2 GiB  21.8 GFLOP     all

rank       matrices        step  of mean  resident  of mean
0                 7  55.8 TFLOP    1.000  5.81 GiB    1.000
1                 7  55.8 TFLOP    1.000  5.81 GiB    1.000
2                 7  55.8 TFLOP    1.000  5.81 GiB    1.000
3                 7  55.8 TFLOP    1.000  5.81 GiB    1.000
(56 more)
60                7  55.8 TFLOP    1.000  5.81 GiB    1.000
61                7  55.8 TFLOP    1.000  5.81 GiB    1.000
62                7  55.8 TFLOP    1.000  5.81 GiB    1.000
63                7  55.8 TFLOP    1.000  5.81 GiB    1.000
largest over mean: step 1.000, resident 1.000, matrices 1.000

parameter                 role    shape        dtype       n  resident        step    owners
embed.weight              ROWS    151936x5120  bfloat16    1  11.6 GiB  10.9 GFLOP       all
layers.*.attn.q.weight    MATRIX  8192x5120    bfloat16   64  30.0 GiB   361 TFLOP  34 ranks
layers.*.attn.k.weight    MATRIX  1024x5120    bfloat16   64  3.75 GiB  7.56 TFLOP  34 ranks
layers.*.attn.v.weight    MATRIX  1024x5120    bfloat16   64  3.75 GiB  7.56 TFLOP  34 ranks
layers.*.attn.o.weight    MATRIX  5120x8192    bfloat16   64  30.0 GiB   361 TFLOP  34 ranks
layers.*.mlp.gate.weight  MATRIX  25600x5120   bfloat16   64  93.8 GiB   945 TFLOP      0-63
layers.*.mlp.up.weight    MATRIX  25600x5120   bfloat16   64  93.8 GiB   945 TFLOP      0-63
layers.*.mlp.down.weight  MATRIX  5120x25600   bfloat16   64  93.8 GiB   945 TFLOP      0-63
layers.*.vectors.*        TAIL    5120         bfloat16  128  10.0 MiB  9.18 MFLOP      0-63
layers.*.vectors.*        TAIL    128          bfloat16  128   256 KiB   229 kFLOP      0-63
vectors.*                 TAIL    5120         bfloat16    1  80.0 KiB  71.7 kFLOP         0
head.weight               ROWS    151936x5120  bfloat16    1  11.6 GiB  10.9 GFLOP       all

fullest rank        mean  with largest item     planned  ratio  proven bound
step          55.8 TFLOP         14.8 TFLOP  55.8 TFLOP  1.000    55.8 TFLOP
resident        5.81 GiB           1.83 GiB    5.81 GiB  1.000      5.81 GiB

gather per pass 61.0 GiB in 65 units, reduce 61.0 GiB
largest unit (root): gather 2.90 GiB, reduce 2.90 GiB
owners per unit 7.1, the one with most has 28% of it (means over units)

fullest or busiest rank  resident  peak in step  moved in step        step
zero3                    5.81 GiB      7.13 GiB       57.2 GiB  3.57 PFLOP
zero1-owner               126 GiB       127 GiB       60.1 GiB  55.8 TFLOP
gather-once              5.81 GiB      65.0 GiB       57.2 GiB  3.57 PFLOP
mfsdp                    5.81 GiB      7.13 GiB            0 B  55.8 TFLOP""",
        )

    def test_cap_in_the_way(self) -> None:
        text = self.output("--model", "qwen3-30b-a3b", "--world-size", "1024", "--optimizer", "muon")
        self.assertExpectedInline(
            "\n".join(text.split("\n\n")[4:5]),
            """\
fullest rank       mean  with largest item    planned  ratio  proven bound
step          558 GFLOP          429 GFLOP  688 GFLOP  1.233     574 GFLOP
resident        344 MiB           96.0 MiB    351 MiB  1.023       344 MiB
step: held back by the default cap on bytes. Without it the ratios are 1.029 for the step and 1.075
  for resident bytes; no plan is below 574 GFLOP.""",
        )

    def test_module_with_logical_matrices(self) -> None:
        text = self.output(
            "--module",
            "tests.test_plan_cli:tiny",
            "--world-size=3",
            "--split",
            "experts=stack",
            "--split=qkv.weight=equal:3",
            "--spread-stacks",
        )
        self.assertExpectedInline(
            text,
            """\
ShardPlan for 3 ranks: 3 parameters, 28.9 k elements, 1 units, cost model muon

role    parameters  elements  resident        step  owners
MATRIX           2    28.7 k   336 KiB  36.7 MFLOP     0-2
TAIL             1       192  3.00 KiB  2.69 kFLOP       1

rank  matrices        step  of mean  resident  of mean
0            1  23.6 MFLOP    1.928   144 KiB    1.274
1            1  6.56 MFLOP    0.536  99.0 KiB    0.876
2            1  6.55 MFLOP    0.536  96.0 KiB    0.850
largest over mean: step 1.928, resident 1.274, matrices 1.000

parameter   role    shape    dtype    resident        step  owner
experts     MATRIX  8x64x32  float32   192 KiB  13.1 MFLOP    1-2
qkv.weight  MATRIX  192x64   float32   144 KiB  23.6 MFLOP      0
qkv.bias    TAIL    192      float32  3.00 KiB  2.69 kFLOP      1

fullest rank        mean  with largest item     planned  ratio  proven bound
step          12.2 MFLOP         23.6 MFLOP  23.6 MFLOP  1.000    23.6 MFLOP
resident         113 KiB            144 KiB     144 KiB  1.000       144 KiB

gather per pass 113 KiB in 1 units, reduce 113 KiB
largest unit (root): gather 113 KiB, reduce 113 KiB
owners per unit 3.0, the one with most has 43% of it (means over units)

fullest or busiest rank  resident  peak in step  moved in step        step
zero3                     121 KiB       233 KiB       74.7 KiB  36.7 MFLOP
zero1-owner               274 KiB       370 KiB       75.2 KiB  23.6 MFLOP
gather-once               121 KiB       281 KiB       74.7 KiB  36.7 MFLOP
mfsdp                     144 KiB       195 KiB            0 B  23.6 MFLOP

note: the step takes as long as that of qkv.weight, 1.93 times the mean of all ranks; more ranks do
  not make it faster.
note: nothing but a smaller matrix would help.""",
        )

    def test_module_with_unnamed_stacks(self) -> None:
        text = self.output("--module", "tests.test_plan_cli:tiny", "--world-size=3", "--role=qkv.weight=tail")
        assert "note: 1 parameter of 3 or more dimensions stepped elementwise, such as experts;" in text

    def test_step_times(self) -> None:
        Rates("a device", 1e12, 1e-5, 1e9).save(self.folder / "rates.json")
        text = self.output("--model", "llama3-8b", "--world-size", "64", "--rates", str(self.folder / "rates.json"))
        (line,) = [line for line in text.splitlines() if line.startswith("step on")]
        self.assertExpectedInline(
            line, """step on a device: 11.01 s on the busiest rank, 10.42 s if it were even (1.057 times)"""
        )


class TestFiles:
    def test_json_holds_the_plan(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["--model", "llama3-8b", "--world-size", "64", "--mesh", "2x32", "--json"]
        assert main(["plan", *arguments, "--param-dtype", "bf16", "--master", "fp32"]) == 0
        found = json.loads(capsys.readouterr().out)
        again = ShardPlan.from_json(json.dumps(found["plan"]))
        cost_model = MuonCost(precision=Precision(master=torch.float32))
        specs = catalogue_specs("llama3-8b", torch.bfloat16)
        assert again == plan_specs(specs, 32, replicas=2, cost_model=cost_model)
        assert found["evenness"]["step_flops"]["ratio"] == pytest.approx(1.0, abs=0.05)
        assert [scheme["name"] for scheme in found["comparison"]][-1] == "mfsdp"

    def test_plot_is_one_well_formed_file_with_every_matrix(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "plan.html"
        assert main(["plan", "--model", "gpt2-124m", "--world-size", "8", "--plot", str(path)]) == 0
        assert capsys.readouterr().err == f"wrote {path}\n"
        html = path.read_text()
        assert "http" not in html
        assert "<script" not in html
        assert "src=" not in html
        HTMLParser(convert_charrefs=True).feed(html)
        charts = [f"<svg{chart.split('</svg>')[0]}</svg>" for chart in html.split("<svg")[1:]]
        assert len(charts) == 2
        for chart in charts:
            blocks = list(ElementTree.fromstring(chart).iter("rect"))
            titles = [block.findtext("title") or "" for block in blocks]
            matrices = [spec.name for spec in catalogue_specs("gpt2-124m") if spec.role is Role.MATRIX]
            for name in matrices:
                assert any(name in title for title in titles), name
            assert all(float(block.get("height", "-1")) >= 0 for block in blocks)
            assert all(float(block.get("y", "-1")) > 0 for block in blocks)

    def test_plot_escapes_names(self) -> None:
        assert "<b>" not in plot(plan_specs(catalogue_specs("gpt2-124m"), 2), "<b>")

    def test_calibration_is_used_and_kept(self, tmp_path: Path) -> None:
        rates = calibrate(shapes=((16, 16), (64, 128)), repeats=1)
        rates.save(tmp_path / "rates.json")
        assert Rates.load(tmp_path / "rates.json") == rates
        (spec,) = [spec for spec in catalogue_specs("gpt2-124m") if spec.name == "layers.0.attn.o.weight"]
        assert rates.seconds(spec, 2 * 10**9) > rates.seconds(spec, 10**9) > 0

    def test_as_a_program(self) -> None:
        command = [sys.executable, "-m", "mfsdp", "plan", "--model", "gpt2-124m", "--world-size", "0"]
        bad = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (bad.returncode, bad.stdout) == (2, "")
        assert bad.stderr == "mfsdp: --world-size 0 must be 1 or more.\n"

    def test_a_reader_that_stops_reading_is_no_error(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "mfsdp", "plan", "--model", "gpt2-124m", "--world-size", "8"]
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writer)
        assert (ended.returncode, ended.stderr) == (0, "")


class TestErrors(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _capture(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        self.capsys, self.folder = capsys, tmp_path

    def errors(self, *commands: str) -> str:
        lines = []
        for command in commands:
            assert main(["plan", *command.replace("DIR", str(self.folder)).split()]) == 2, command
            captured = self.capsys.readouterr()
            assert captured.out == ""
            assert captured.err.count("\n") == 1
            lines.append(re.sub(r", line \d+", ", line N", captured.err.replace(str(self.folder), "DIR")))
        return "".join(lines).rstrip("\n")

    def test_models(self) -> None:
        (self.folder / "config.json").write_text('{"model_type": "bert"}')
        (self.folder / "short.json").write_text('{"model_type": "llama", "vocab_size": 8}')
        found = self.errors(
            "",
            "--world-size 8",
            "--model gpt5 --world-size 8",
            "--model gpt2-124m --config DIR/config.json --world-size 8",
            "--config DIR/config.json --world-size 8",
            "--config DIR/short.json --world-size 8",
            "--config DIR/absent.json --world-size 8",
            "--module tests.test_plan_cli --world-size 8",
            "--module tests.test_plan_cli:absent --world-size 8",
            "--module tests.absent:model --world-size 8",
            "--module tests.test_plan_cli:not_a_module --world-size 8",
            "--module tests.test_plan_cli:failing --world-size 8",
        )
        self.assertExpectedInline(
            found,
            """\
mfsdp: missing: --world-size, and one of --model, --config and --module.
mfsdp: missing: one of --model, --config and --module.
mfsdp: unknown model 'gpt5'; the catalogue has gpt2-124m, llama3-8b, llama3-70b, qwen3-14b, qwen3-32b, qwen3-30b-a3b.
mfsdp: argument --config: not allowed with argument --model
mfsdp: DIR/config.json: model_type 'bert' is of no known family; known are gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe. Plan the module itself with --module.
mfsdp: DIR/short.json: 'hidden_size' is missing; it must be a positive integer.
mfsdp: DIR/absent.json: cannot be read (No such file or directory).
mfsdp: --module tests.test_plan_cli is not of the form PKG.MOD:FACTORY.
mfsdp: --module tests.test_plan_cli:absent: tests.test_plan_cli has no function or class 'absent'.
mfsdp: --module tests.absent:model: No module named 'tests.absent'.
mfsdp: --module tests.test_plan_cli:not_a_module: it made a int, not an nn.Module.
mfsdp: --module tests.test_plan_cli:failing: KeyError in test_plan_cli.py, line N: 'no such size'""",
        )

    def test_ranks_and_options(self) -> None:
        found = self.errors(
            "--model gpt2-124m",
            "--model gpt2-124m --world-size 0",
            "--model gpt2-124m --world-size -3",
            "--model gpt2-124m --world-size many",
            "--model gpt2-124m --world-size 8 --mesh 2x3",
            "--model gpt2-124m --world-size 8 --mesh 2x2x2",
            "--model gpt2-124m --world-size 8 --mesh 0x8",
            "--model gpt2-124m --world-size 8 --bytes-cap -5",
            "--model gpt2-124m --world-size 8 --bytes-cap 5",
            "--model gpt2-124m --world-size 8 --param-dtype int8",
            "--model gpt2-124m --world-size 8 --optimizer sgd",
            "--model gpt2-124m --world-size 8 --rates DIR/absent.json",
            "--model gpt2-124m --world-size 8 --plot DIR/absent/plan.html",
        )
        self.assertExpectedInline(
            found,
            """\
mfsdp: missing: --world-size.
mfsdp: --world-size 0 must be 1 or more.
mfsdp: --world-size -3 must be 1 or more.
mfsdp: argument --world-size: invalid int value: 'many'
mfsdp: --mesh 2x3 has 6 ranks, not the 8 of --world-size.
mfsdp: --mesh 2x2x2 is not of the form GxS, for instance 8x8.
mfsdp: --mesh 0x8 has 0 ranks, not the 8 of --world-size.
mfsdp: bytes_cap=-5 must not be negative.
mfsdp: bytes_cap=5: too large by itself: layers.0.mlp.up.weight (28311552), layers.0.mlp.down.weight (28311552), layers.1.mlp.up.weight (28311552) and 143 more (bytes in brackets). The smallest cap that works on 8 ranks is 206499840.
mfsdp: unknown dtype 'int8'; known are fp64, fp32, fp16, bf16, float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz.
mfsdp: argument --optimizer: invalid choice: 'sgd' (choose from 'adamw', 'muon', 'shampoo', 'soap')
mfsdp: DIR/absent.json: cannot be read (No such file or directory).
mfsdp: --plot DIR/absent/plan.html: cannot be written (No such file or directory).""",
        )

    def test_patterns(self) -> None:
        prefix = "--model gpt2-124m --world-size 8"
        found = self.errors(
            f"{prefix} --role *.attn.qqq.weight=tail",
            f"{prefix} --role *.attn.*=tail --role *.qkv.*=matrix",
            f"{prefix} --role *.attn.*=owner",
            f"{prefix} --role tail",
            f"{prefix} --split *.qkv.weight=equal:3 --split *.attn.qkv.*=of:64",
            f"{prefix} --split *.qkv.weight=equal:7",
            f"{prefix} --split *.qkv.weight=third",
        )
        self.assertExpectedInline(
            found,
            """\
mfsdp: --role: nothing matches '*.attn.qqq.weight'. Patterns are matched against full parameter names such as 'embed.weight'.
mfsdp: --role: the patterns '*.attn.*' and '*.qkv.*' both match layers.0.attn.qkv.weight and choose tail and matrix. Make them disjoint.
mfsdp: --role: 'owner' is not one of matrix, tail, rows.
mfsdp: --role tail is not of the form PATTERN=CHOICE.
mfsdp: --split: the patterns '*.qkv.weight' and '*.attn.qkv.*' both match layers.0.attn.qkv.weight and choose EqualBlocks(count=3, dim=0) and BlocksOf(size=64, dim=0). Make them disjoint.
mfsdp: splits: layers.0.attn.qkv.weight: EqualBlocks(count=7, dim=0) cannot cut the 2304 of dimension 0 of (2304, 768) evenly.
mfsdp: --split: 'third' is not a rule; write equal:N, of:N, stack or flatten.""",
        )
