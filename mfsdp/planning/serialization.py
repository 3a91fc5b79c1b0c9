"""Plans as JSON text.

The format is versioned as ``[major, minor]``. A minor version only adds fields that have a default, so every
older minor version of the same major version loads.

1.0: the first format.
1.1: ``trainable``, ``split`` and ``parts`` of an entry.
"""

import json
from typing import TYPE_CHECKING, Any

from mfsdp.planning.dtypes import dtype_name, parse_dtype
from mfsdp.planning.errors import PlanError
from mfsdp.planning.records import MatrixShard, Part, Role
from mfsdp.planning.split import Split

if TYPE_CHECKING:
    from mfsdp.planning.shard_plan import ShardPlan

__all__ = ["FORMAT", "VERSION", "dump", "load", "to_fields"]

FORMAT = "mfsdp.ShardPlan"
VERSION = (1, 1)


def to_fields(entry: MatrixShard) -> dict[str, Any]:
    """The fields of ``entry`` as JSON values."""
    return {
        "name": entry.name,
        "role": entry.role.value,
        "owner": entry.owner,
        "shape": list(entry.shape),
        "dtype": dtype_name(entry.dtype),
        "resident_bytes": entry.resident_bytes,
        "step_flops": entry.step_flops,
        "unit": entry.unit,
        "aliases": list(entry.aliases),
        "trainable": entry.trainable,
        "split": None if entry.split is None else _split_fields(entry.split),
        "parts": [[part.owner, part.start, part.stop] for part in entry.parts],
    }


def _split_fields(split: Split) -> dict[str, Any]:
    return {
        "stack": split.stack,
        "rows": split.rows,
        "columns": split.columns,
        "blocks": list(split.blocks),
        "dim": split.dim,
    }


def _split(fields: dict[str, Any] | None) -> Split | None:
    if fields is None:
        return None
    blocks = tuple(fields["blocks"])
    return Split(fields["stack"], fields["rows"], fields["columns"], blocks, fields["dim"])


def _from_fields(fields: dict[str, Any]) -> MatrixShard:
    return MatrixShard(
        name=fields["name"],
        role=Role(fields["role"]),
        owner=fields["owner"],
        shape=tuple(fields["shape"]),
        dtype=parse_dtype(fields["dtype"]),
        resident_bytes=fields["resident_bytes"],
        step_flops=fields["step_flops"],
        unit=fields["unit"],
        aliases=tuple(fields["aliases"]),
        # since version 1.1
        trainable=fields.get("trainable", True),
        split=_split(fields.get("split")),
        parts=tuple(Part(owner, start, stop) for owner, start, stop in fields.get("parts", ())),
    )


def dump(plan: "ShardPlan") -> str:
    """The JSON text of ``plan``, the same for equal plans: one line per parameter."""
    head = {
        "format": FORMAT,
        "version": list(VERSION),
        "world_size": plan.world_size,
        "replicas": plan.replicas,
        "cost_model": plan.cost_model,
    }
    lines = ",\n  ".join(json.dumps(to_fields(entry)) for entry in plan.entries.values())
    return f'{json.dumps(head)[:-1]}, "entries": [\n  {lines}\n]}}\n'


def _check_version(document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanError(f'this is not a plan: its "format" is not {FORMAT!r}.')
    match document.get("version"):
        case [int(major), int(minor)]:
            if major != VERSION[0] or minor > VERSION[1]:
                raise PlanError(
                    f"the plan has format version {major}.{minor}; this version of mfsdp reads "
                    f"{VERSION[0]}.0 to {VERSION[0]}.{VERSION[1]}. Plan again, or read it with the version "
                    f"that wrote it."
                )
        case other:
            raise PlanError(f"the plan's version must be [major, minor], not {other!r}.")


def load(text: str) -> tuple[list[MatrixShard], int, int, str]:
    """Entries, world size, replicas and cost model of the plan in ``text``.

    Raises:
        PlanError: ``text`` is not a plan, is damaged, or was written in a newer format.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"this is not a plan: it is not JSON ({error}).") from None
    _check_version(document)
    try:
        entries = [_from_fields(fields) for fields in document["entries"]]
        return entries, document["world_size"], document["replicas"], document["cost_model"]
    except KeyError as error:
        raise PlanError(f"the plan is damaged: {error} is missing.") from None
    except TypeError as error:
        raise PlanError(f"the plan is damaged: {error}.") from None
