"""The optimizer step, and the whole training step, of every way to train with Muon, on the ranks of one machine.

    python examples/benchmark/training_step.py --ranks 2 4 8

Step time, collectives, and bytes per rank: those handed to the process group and got from it by the rank with most, and
those at the loopback interface, which all ranks share, as the mean per rank, with headers, barriers, and whatever
other programs send over it meanwhile (of all rounds the one with least is taken).
For ranks with a network between them see cluster.py.
"""

from comparison import CORES, STOCK, add_comparison_arguments, measure, step_table, work
from launching import RANK_THREADS, is_rank
from options import benchmark_parser, positive
from report import Report
from systems import shape_of


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4, 8])
    add_comparison_arguments(parser, rounds=5)
    args = parser.parse_args()
    if is_rank():
        work(args)
        return
    limits = f"{CORES}, and loopback is no network: a byte costs a copy or two. {STOCK}"
    report = Report(args, "Optimizer step and training step on one machine", shape_of(args), limits, RANK_THREADS)
    for ranks in args.ranks:
        report.add(step_table(f"{ranks} ranks, loopback", measure(ranks)))


if __name__ == "__main__":
    main()
