"""How fast a device steps parameters: measured once, kept as JSON, used to estimate step times."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from mfsdp.planning.cost import newton_schulz_flops
from mfsdp.planning.errors import PlanError
from mfsdp.planning.records import ParameterSpec, Role

__all__ = ["SHAPES", "Rates", "calibrate"]

SHAPES = ((256, 256), (256, 1024), (512, 512), (512, 2048), (1024, 1024))
"""The matrices that are timed by default, (rows, columns)."""

_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Rates:
    """A device as two straight lines.

    Stepping a matrix takes ``seconds_per_matrix + flops / flops_per_second``; everything else takes
    ``elements / elements_per_second``.

    Args:
        device: what was measured, for people.
        flops_per_second: of a matrix optimizer's step.
        seconds_per_matrix: what each matrix takes however small it is.
        elements_per_second: of AdamW's step.

    Raises:
        PlanError: a rate that is not positive.
    """

    device: str
    flops_per_second: float
    seconds_per_matrix: float
    elements_per_second: float

    def __post_init__(self) -> None:
        if min(self.flops_per_second, self.elements_per_second) <= 0 or self.seconds_per_matrix < 0:
            raise PlanError(f"rates must be positive: {self}.")

    def seconds(self, spec: ParameterSpec, step_flops: int) -> float:
        """The time of stepping all of ``spec``, which takes ``step_flops`` operations, on one rank."""
        if spec.role is not Role.MATRIX:
            return spec.numel / self.elements_per_second if spec.trainable else 0.0
        matrices = sum(count for count, _, _ in spec.matrices()) if spec.trainable else 0
        return matrices * self.seconds_per_matrix + step_flops / self.flops_per_second

    def save(self, path: Path) -> None:
        """Write the rates as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Rates":
        """The rates that :meth:`save` wrote.

        Raises:
            PlanError: the file cannot be read, or is not what ``save`` writes.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise PlanError(f"{path}: cannot be read ({error.strerror}).") from None
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            raise PlanError(f"{path}: not a file of rates ({error}); make one with calibrate.") from None


def _timed(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The least seconds of ``step``, which other work on the machine disturbs least, after one call to warm up."""

    def once() -> float:
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(repeats))


def _parameter(shape: tuple[int, ...], device: torch.device) -> nn.Parameter:
    parameter = nn.Parameter(torch.randn(shape, device=device))
    parameter.grad = torch.randn(shape, device=device)
    return parameter


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept, neither negative, of the least squares line through (x, y), relative to y."""
    weights = [(x, y, 1 / (y * y)) for x, y in points]
    total = sum(w for _, _, w in weights)
    mean_x = sum(w * x for x, _, w in weights) / total
    mean_y = sum(w * y for _, y, w in weights) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in weights)
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in weights) / spread if spread else 0.0
    intercept = mean_y - slope * mean_x
    if slope <= 0 or intercept < 0:
        through_zero = sum(w * x * y for x, y, w in weights) / sum(w * x * x for x, _, w in weights)
        return through_zero, 0.0
    return slope, intercept


def calibrate(
    device: torch.device | str = "cpu", shapes: Sequence[tuple[int, int]] = SHAPES, repeats: int = 5
) -> Rates:
    """Time a few matrices under ``torch.optim.Muon`` and one large vector under ``torch.optim.AdamW``.

    Args:
        device: where to measure; nothing else should be running there.
        shapes: (rows, columns) of the matrices, two of different size at least.
        repeats: each is stepped so often, and the shortest time counts.

    Raises:
        PlanError: too few shapes, or no repeats.
    """
    device = torch.device(device)
    if len(set(shapes)) < 2 or repeats < 1:
        raise PlanError(f"calibration needs 2 shapes or more and 1 repeat or more, not {shapes} and {repeats}.")
    points = []
    for rows, columns in shapes:
        muon = torch.optim.Muon([_parameter((rows, columns), device)])
        points.append((float(newton_schulz_flops(rows, columns, 5)), _timed(muon.step, device, repeats)))
    slope, intercept = _line(points)
    adamw = torch.optim.AdamW([_parameter((_ELEMENTS,), device)])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} x{torch.get_num_threads()}"
    return Rates(name, 1 / slope, intercept, _ELEMENTS / _timed(adamw.step, device, repeats))
