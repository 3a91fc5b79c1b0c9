"""``python -m mfsdp``: plans from the command line."""

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from mfsdp.planning.catalogue import catalogue_specs, model_names
from mfsdp.planning.configs import config_specs
from mfsdp.planning.cost import COST_MODELS, CostModel, Precision
from mfsdp.planning.dtypes import parse_dtype
from mfsdp.planning.errors import PlanError
from mfsdp.planning.patterns import by_pattern
from mfsdp.planning.planner import plan, plan_specs
from mfsdp.planning.plot import plot
from mfsdp.planning.rates import Rates, calibrate
from mfsdp.planning.records import ParameterSpec, Role
from mfsdp.planning.shard_plan import ShardPlan
from mfsdp.planning.split import BlocksOf, EqualBlocks, Flatten, SplitRule, Stack, split_by
from mfsdp.planning.summary import Summary

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise PlanError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m mfsdp", description="Who will own what, before you own a cluster.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "plan",
        help="plan a model for a number of ranks",
        usage="%(prog)s (--model NAME | --config FILE | --module PKG.MOD:FACTORY) --world-size N [options]",
    )
    # What is required is checked by _check_required, which names all that is missing at once.
    model = command.add_mutually_exclusive_group()
    model.add_argument("--model", metavar="NAME", help=f"a public model: {', '.join(model_names())}")
    model.add_argument("--config", metavar="FILE", type=Path, help="a config.json in Hugging Face style")
    model.add_argument("--module", metavar="PKG.MOD:FACTORY", help="a function that makes an nn.Module")
    command.add_argument("--world-size", type=int, metavar="N", help="number of ranks")
    command.add_argument("--mesh", metavar="GxS", help="replicas x owners; by default 1 x N")
    command.add_argument("--optimizer", choices=sorted(COST_MODELS), default="muon")
    command.add_argument(
        "--param-dtype", metavar="DTYPE", help="dtype of parameters; by default fp32, or what a module has"
    )
    command.add_argument("--master", metavar="DTYPE", help="dtype of a second copy that is stepped")
    command.add_argument("--bytes-cap", type=int, metavar="BYTES", help="resident bytes a rank may have")
    command.add_argument("--role", action="append", default=[], metavar="PATTERN=ROLE")
    command.add_argument(
        "--split", action="append", default=[], metavar="PATTERN=RULE", help="equal:3, of:128, stack, flatten"
    )
    command.add_argument("--spread-stacks", action="store_true", help="let several ranks own one stack")
    command.add_argument("--rates", type=Path, metavar="FILE", help="what calibrate wrote, for step times")
    command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    command.add_argument("--plot", type=Path, metavar="FILE", help="write a picture as one HTML file")
    command = commands.add_parser("calibrate", help="time a few optimizer steps on this machine")
    command.add_argument("--device", default="cpu")
    command.add_argument("--out", type=Path, required=True, metavar="FILE")
    return parser


def _check_required(arguments: argparse.Namespace) -> None:
    missing = []
    if arguments.world_size is None:
        missing.append("--world-size")
    if not (arguments.model or arguments.config or arguments.module):
        missing.append("one of --model, --config and --module")
    if missing:
        raise PlanError(f"missing: {', and '.join(missing)}.")


def _mesh(text: str | None, world_size: int) -> tuple[int, int]:
    """(replicas, owners)."""
    if world_size < 1:
        raise PlanError(f"--world-size {world_size} must be 1 or more.")
    if text is None:
        return 1, world_size
    sizes = text.lower().split("x")
    if not all(size.isdecimal() for size in sizes) or len(sizes) > 2:
        raise PlanError(f"--mesh {text} is not of the form GxS, for instance 8x8.")
    replicas, owners = (1, int(sizes[0])) if len(sizes) == 1 else (int(sizes[0]), int(sizes[1]))
    if replicas * owners != world_size:
        raise PlanError(f"--mesh {text} has {replicas * owners} ranks, not the {world_size} of --world-size.")
    return replicas, owners


def _pairs(option: str, values: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for value in values:
        pattern, equals, choice = value.rpartition("=")
        if not equals or not pattern:
            raise PlanError(f"{option} {value} is not of the form PATTERN=CHOICE.")
        if pairs.setdefault(pattern, choice) != choice:
            raise PlanError(f"{option}: {pattern!r} is given both {pairs[pattern]!r} and {choice!r}.")
    return pairs


def _roles(values: Sequence[str]) -> dict[str, Role]:
    known = {role.value: role for role in Role}
    pairs = _pairs("--role", values)
    for choice in pairs.values():
        if choice not in known:
            raise PlanError(f"--role: {choice!r} is not one of {', '.join(known)}.")
    return {pattern: known[choice] for pattern, choice in pairs.items()}


def _rule(text: str) -> SplitRule:
    name, _, number = text.partition(":")
    count = int(number) if number.isdecimal() else None
    match name, count:
        case "equal", int():
            return EqualBlocks(count)
        case "of", int():
            return BlocksOf(count)
        case "stack", None if not number:
            return Stack()
        case "flatten", None if not number:
            return Flatten()
        case _:
            raise PlanError(f"--split: {text!r} is not a rule; write equal:N, of:N, stack or flatten.")


def _splits(values: Sequence[str]) -> dict[str, SplitRule]:
    return {pattern: _rule(choice) for pattern, choice in _pairs("--split", values).items()}


@contextmanager
def _foreign_code(text: str) -> Iterator[None]:
    """Code of the user's inside, which may raise anything; here it ends as a line that says where."""
    try:
        yield
    except ImportError as error:
        raise PlanError(f"--module {text}: {error}.") from error
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        raise PlanError(f"--module {text}: {type(error).__name__} in {where}: {error}") from error


def _module(text: str) -> nn.Module:
    """The module that ``pkg.mod:factory`` makes, on the meta device."""
    path, colon, name = text.partition(":")
    if not colon:
        raise PlanError(f"--module {text} is not of the form PKG.MOD:FACTORY.")
    sys.path.insert(0, str(Path.cwd()))
    with _foreign_code(text):
        factory = vars(importlib.import_module(path)).get(name)
    if not callable(factory):
        raise PlanError(f"--module {text}: {path} has no function or class {name!r}.")
    with _foreign_code(text), torch.device("meta"):
        module = factory()
    if not isinstance(module, nn.Module):
        raise PlanError(f"--module {text}: it made a {type(module).__name__}, not an nn.Module.")
    return module


def _overridden(
    specs: Sequence[ParameterSpec], roles: dict[str, Role], splits: dict[str, SplitRule]
) -> list[ParameterSpec]:
    names = [(spec.name, *spec.aliases) for spec in specs]
    role_of, rule_of = by_pattern("--role", roles, names), by_pattern("--split", splits, names)
    found = []
    for spec in specs:
        rule = rule_of.get(spec.name)
        role = role_of.get(spec.name, Role.MATRIX if rule else spec.role)
        found.append(replace(spec, role=role, split=split_by(rule, spec.name, spec.shape) if rule else spec.split))
    return found


def _planned(arguments: argparse.Namespace, cost_model: CostModel) -> ShardPlan:
    replicas, owners = _mesh(arguments.mesh, arguments.world_size)
    roles, splits = _roles(arguments.role), _splits(arguments.split)
    cap, spread = arguments.bytes_cap, arguments.spread_stacks
    dtype = parse_dtype(arguments.param_dtype) if arguments.param_dtype else None
    if arguments.module:
        module, mesh = _module(arguments.module), _Mesh((replicas, owners))
        if dtype is not None:
            module.to(dtype)
        return plan(
            module, mesh, roles=roles, splits=splits, cost_model=cost_model, bytes_cap=cap, spread_stacks=spread
        )
    stored = dtype or torch.float32
    if arguments.config:
        specs = config_specs(arguments.config, stored)
    else:
        specs = catalogue_specs(arguments.model, stored)
    return plan_specs(
        _overridden(specs, roles, splits),
        owners,
        replicas=replicas,
        cost_model=cost_model,
        bytes_cap=cap,
        spread_stacks=spread,
    )


class _Mesh:
    """The shape of a mesh, for a model that no process group exists for."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def _write(option: str, path: Path, text: str) -> None:
    """Write a file that ``option`` names, and say so where it is in nobody's way."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{option} {path}: cannot be written ({error.strerror}).") from None
    print(f"wrote {path}", file=sys.stderr)


def _plan(arguments: argparse.Namespace) -> None:
    _check_required(arguments)
    master = parse_dtype(arguments.master) if arguments.master else None
    cost_model = COST_MODELS[arguments.optimizer](precision=Precision(master=master))
    rates = Rates.load(arguments.rates) if arguments.rates else None
    made = _planned(arguments, cost_model)
    summary = Summary(made, cost_model, rates, capped=arguments.bytes_cap is not None)
    if arguments.plot:
        title = arguments.model or arguments.module or arguments.config.name
        _write("--plot", arguments.plot, plot(made, title))
    print(json.dumps(summary.json(), indent=1) if arguments.json else summary.text())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, or 2 with one line on stderr for bad input."""
    try:
        parsed = _parser().parse_args(arguments)
        if parsed.command == "calibrate":
            rates = calibrate(parsed.device)
            rates.save(parsed.out)
            print(rates)
        else:
            _plan(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, for instance head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    except PlanError as error:
        print(f"mfsdp: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"mfsdp: {error}", file=sys.stderr)
        return 2
    return 0
