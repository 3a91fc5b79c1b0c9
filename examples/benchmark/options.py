"""The command line of a benchmark: what all of them have, and values that are checked before anything starts."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows a module's docstring as it stands, and knows where the results go."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output", type=Path, metavar="STEM", help="also write STEM.md, STEM.json and STEM.png, as each table is done"
    )
    output.add_argument("--no-plot", action="store_true", help="no STEM.png, which needs matplotlib")
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """What reads a whole number that must not be smaller, for ``type=``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return read


positive = at_least(1)


def multiple_of(heads: int) -> Callable[[str], int]:
    """What reads the width of a model with this many heads, for ``type=``."""

    def read(text: str) -> int:
        if positive(text) % heads:
            raise argparse.ArgumentTypeError(f"{text} is not a multiple of the number of heads, {heads}")
        return int(text)

    return read


def positive_number(text: str) -> float:
    """A number above 0, for ``type=``."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def rate(text: str) -> str:
    """A rate as ``tc`` writes it, for ``type=``."""
    if not re.fullmatch(r"[1-9]\d*[kmg]bit", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 1gbit, 200mbit or 500kbit")
    return text


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """What lies between the ranks."""
    parser.add_argument("--nodes", type=at_least(0), default=0, help="emulated nodes; 0 is loopback")
    parser.add_argument("--rate", type=rate, default="1gbit", help="egress of an emulated node")


def network_of(args: argparse.Namespace) -> str:
    """The network that was chosen, in words."""
    return f"{args.nodes} emulated nodes, {args.rate}" if args.nodes else "loopback"


def _pair(text: str, what: str) -> tuple[int, int]:
    first, _, second = text.partition("x")
    if not (first.isdecimal() and second.isdecimal() and int(first) and int(second)):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(first), int(second)


@dataclass(frozen=True)
class World:
    """Nodes, and the ranks on each."""

    nodes: int
    ranks_per_node: int

    @staticmethod
    def parse(text: str) -> "World":
        """Of ``4x2``; for ``type=``."""
        world = World(*_pair(text, "NODESxRANKS, such as 4x2 for 4 nodes of 2 ranks each"))
        if world.nodes > 200:
            raise argparse.ArgumentTypeError(f"{text!r} is more than 200 nodes")
        return world

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        ranks = "1 rank" if self.ranks_per_node == 1 else f"{self.ranks_per_node} ranks"
        return f"{nodes} of {ranks}"


@dataclass(frozen=True)
class BatchShape:
    """What a rank is given in a step: sequences, and the tokens of each."""

    batch: int
    context: int

    @staticmethod
    def parse(text: str) -> "BatchShape":
        """Of ``4x256``; for ``type=``."""
        return BatchShape(*_pair(text, "BATCHxCONTEXT, such as 4x256 for 4 sequences of 256 tokens"))

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"
