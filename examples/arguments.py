"""The arguments of train_lm.py: what there is to choose, and what can be known to be wrong before anything starts.

Run as a script it only checks them, for ``NPROC`` ranks, and imports nothing that takes time; ci/train does so
before it starts the ranks.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

LEARNING_RATES = {"muon": 0.04, "shampoo": 0.003, "soap": 0.0003, "adamw": 0.0001}
"""Of the matrices, by optimizer: the best of those tried on this example."""

BASELINES = ("mfsdp", "fsdp2", "ddp")
"""What can shard the model."""

HELP_WAS_SHOWN = 3
"""The exit code of this script after --help: nothing is wrong, and nothing is to be started."""

_DESCRIPTION = """\
Train a small byte-level GPT with every weight matrix whole on one rank.

The same run by PyTorch's own means: --baseline fsdp2 (FSDP2 with torch.optim.Muon) and --baseline ddp (DDP,
with torch.optim.Muon on full matrices).
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse(argv: Sequence[str] | None = None, ranks: int = 1) -> argparse.Namespace:
    """The arguments of a run; exits with one line and code 2 if they are wrong.

    Args:
        argv: by default the command line's.
        ranks: how many there will be.
    """
    parser = _Parser(prog="train_lm", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=200)
    add("--seed", type=int, default=0)
    add("--data", help="text: a file or a folder (default: the Python standard library's sources)")
    add("--optimizer", choices=list(LEARNING_RATES), default="muon", help="what steps the matrices")
    add("--overlap", action="store_true", help="step in backward, as gradients arrive (mfsdp only)")
    add("--baseline", choices=BASELINES, default="mfsdp", help="what shards the model")
    add("--compile", choices=["none", "block", "graph"], default="none", help="torch.compile each block, or the model")
    add("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the computation; parameters are fp32")
    add(
        "--ns-dtype",
        choices=["bf16", "fp32"],
        help="of Muon's Newton-Schulz iterations (default: bf16, as torch.optim.Muon's; fp32 on processors without it)",
    )
    add("--lr", type=float, help="learning rate of the matrices (default: what suits the optimizer here)")
    add("--other-lr", type=float, default=0.003, help="learning rate of everything else, which AdamW steps")
    add("--warmup", type=int, default=10, help="steps in which the learning rates rise; then they fall to 0")
    add("--batch", type=int, default=24, help="sequences per step, over all ranks together")
    add("--context", type=int, default=128, help="bytes in a sequence")
    add("--width", type=int, default=192)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=6)
    add("--report-every", type=int, default=20, help="steps from one progress line to the next")
    add("--checkpoint", metavar="DIR", help="folder of the run's checkpoints, step-100 and so on")
    add("--save-every", type=int, metavar="N", help="save every N steps, and at the end")
    add("--keep", type=int, metavar="N", help="after a save, remove all but the newest N (default: keep all)")
    add("--resume", action="store_true", help="go on from the newest complete checkpoint, on any number of ranks")
    args = parser.parse_args(argv)
    try:
        check(args, ranks)
    except ValueError as error:
        parser.error(str(error))
    if args.lr is None:
        args.lr = LEARNING_RATES[args.optimizer]
    return args


def check(args: argparse.Namespace, ranks: int) -> None:
    """Raise a ValueError for arguments that contradict each other, the number of ranks, or the disk."""
    for name in ("steps", "batch", "context", "width", "layers", "heads", "report_every", "save_every", "keep"):
        if vars(args)[name] is not None and vars(args)[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, but is {vars(args)[name]}.")
    if args.batch % ranks:
        raise ValueError(f"--batch {args.batch} must be a multiple of the number of ranks, {ranks}.")
    if args.width % args.heads:
        raise ValueError(f"--width {args.width} must be a multiple of --heads {args.heads}.")
    if args.baseline in ("fsdp2", "ddp") and (args.overlap or args.optimizer not in ("muon", "adamw")):
        raise ValueError("--overlap and --optimizer shampoo and soap are mfsdp's; the baselines are torch's own.")
    if args.ns_dtype is not None and args.optimizer != "muon":
        raise ValueError(f"--ns-dtype is an option of --optimizer muon; {args.optimizer} has no such iterations.")
    if args.ns_dtype == "fp32" and args.baseline != "mfsdp":
        raise ValueError("--ns-dtype fp32 is for --baseline mfsdp: torch.optim.Muon iterates in bf16.")
    if args.checkpoint is None and (args.save_every is not None or args.resume):
        raise ValueError("--save-every and --resume need --checkpoint DIR, the folder of the run's checkpoints.")
    if args.keep is not None and args.save_every is None:
        raise ValueError("--keep needs --save-every N: without it nothing is saved.")
    if args.compile == "graph" and (args.baseline != "mfsdp" or args.overlap):
        raise ValueError("--compile graph is for --baseline mfsdp, without --overlap; --compile block is for all.")
    if args.data is not None and not Path(args.data).exists():
        raise ValueError(f"--data {args.data}: there is no such file or folder.")


if __name__ == "__main__":
    try:
        parse(ranks=int(os.environ["NPROC"]))
    except SystemExit as ending:
        sys.exit(ending.code or HELP_WAS_SHOWN)
