"""What the optimizers here share: they step local tensors, on the ranks that hold them, and on no other."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mfsdp.dtensor import is_local, local_tensor
from mfsdp.optim.group_options import check_names, completed_groups, dtype_name, saved_groups

__all__ = ["LocalUpdate", "OwnerLocalOptimizer", "param_label", "restore_dtypes", "state_like"]


@dataclass(frozen=True, slots=True)
class LocalUpdate:
    """One parameter that this rank updates in this step, as local tensors.

    Attributes:
        param: the local parameter; written in place.
        grad: its gradient, of the same shape; read only.
        state: the optimizer's state for the parameter, by name; tensors are written in place.
        index: position of the parameter in its group.
    """

    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    index: int


class OwnerLocalOptimizer(Optimizer):
    """An optimizer whose step handles the local tensors of owned parameters, and moves nothing.

    A rank that owns nothing of a parameter holds the same state entries for it (empty, in the parameter's
    placement), so that state dicts have equal keys on every rank, and otherwise passes over it. Plain tensors
    and DTensors of which every rank holds something are stepped like owned ones. Only a gradient that
    arrives in another placement than its parameter's is moved to it; those of ``fully_shard`` never do.

    A subclass says what a group must be, what a new parameter's state is and how a group is updated.
    """

    dtype_options: tuple[str, ...] = ()
    """Options that are dtypes, of which a group holds the names."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            self._name_dtypes(group)

    def _name_dtypes(self, group: dict[str, Any]) -> None:
        for option in self.dtype_options:
            group[option] = dtype_name(group[option])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after checking its options and each of its parameters; if it is refused, nothing is added."""
        with ExitStack() as refused:
            groups = len(self.param_groups)
            refused.callback(lambda: self.param_groups.__delitem__(slice(groups, None)))
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            check_names(self, group)
            self._name_dtypes(group)
            self._check_group(group)
            refused.pop_all()

    @abstractmethod
    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise a ``TypeError`` or ``ValueError`` for what is wrong with a group, on every rank alike."""

    @abstractmethod
    def _new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        """The state of a parameter at its first step, the same entries on every rank."""

    @abstractmethod
    def _update_group(
        self, group: dict[str, Any], owned: Sequence[LocalUpdate], elsewhere: Sequence[dict[str, Any]]
    ) -> None:
        """Update what this rank owns of ``group``; ``elsewhere`` has the states of what others update."""

    def _release(self) -> None:
        """Free what only serves within a step; called at the end of each, whether or not it succeeded."""

    def new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        """The state that the first step of a parameter begins with: zeros, in the parameter's placement.

        Args:
            group: options, such as those of a saved group; this optimizer's own are in ``param_groups``.
            param: one of this optimizer's parameters.
        """
        return self._new_state(group, param)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one optimization step; ``closure`` reevaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            for group in self.param_groups:
                self._update_group(group, *self._collect(group, range(len(group["params"]))))
        finally:
            self._release()
        return loss

    @torch.no_grad()
    def step_one(self, group_index: int, param_index: int) -> None:
        """Step one parameter of one group, exactly as :meth:`step` steps it; hooks of steps are not called."""
        group = self.param_groups[group_index]
        try:
            self._update_group(group, *self._collect(group, [param_index]))
        finally:
            self._release()

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's, of data alone: options that are a ``split`` or a function are left out."""
        return saved_groups(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer state; every tensor keeps the dtype that it was saved in.

        Options that the state dict does not have stay as they are, and ``split`` always does.

        Raises:
            ValueError: the state of a parameter lacks an entry: it is another optimizer's.
        """
        state_dict = completed_groups(state_dict, self.param_groups, [self.defaults] * len(self.param_groups))
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            self.check_state(group, saved, state_dict["state"])
        super().load_state_dict(state_dict)
        restore_dtypes(self, state_dict)

    def check_state(self, group: dict[str, Any], saved: dict[str, Any], states: Mapping[Any, Any]) -> None:
        """Check that the state to be loaded for a group has the entries that a step needs, on every rank alike.

        Args:
            group: the optimizer's.
            saved: the options to be loaded for it, with its parameters as keys of ``states``.
            states: saved state by parameter; a parameter that was never stepped has none.

        Raises:
            ValueError: an entry is missing.
        """
        for index, (param, key) in enumerate(zip(group["params"], saved["params"], strict=False)):
            state = states.get(key, {})
            if not state:
                continue
            without_memory = torch.empty_like(param, device="meta", requires_grad=False)
            missing = [name for name in self._new_state(saved, without_memory) if name not in state]
            if missing:
                raise ValueError(
                    f"{type(self).__name__}: the state to be loaded for {param_label(group, index)} has no "
                    f"{missing[0]!r}, only {', '.join(map(repr, state))}. Load the state of the same optimizer with "
                    f"the same options."
                )

    def _collect(self, group: dict[str, Any], indices: Iterable[int]) -> tuple[list[LocalUpdate], list[dict[str, Any]]]:
        owned: list[LocalUpdate] = []
        elsewhere: list[dict[str, Any]] = []
        params = group["params"]
        for index in indices:
            param = params[index]
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state.update(self._new_state(group, param))
            grad = _gradient_like(param)
            if is_local(param):
                local_state = {key: local_tensor(value) for key, value in state.items()}
                owned.append(LocalUpdate(local_tensor(param), local_tensor(grad), local_state, index))
            else:
                elsewhere.append(state)
        return owned, elsewhere


def _gradient_like(param: Tensor) -> Tensor:
    """The gradient of ``param`` in the parameter's placement."""
    grad = param.grad
    assert grad is not None
    if grad.is_sparse:
        raise ValueError("Sparse gradients are not supported; use torch.optim.SparseAdam for this parameter.")
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        return grad.redistribute(placements=param.placements)
    return grad


def state_like(param: Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros in the placement of ``param``, made without communication.

    Args:
        param: a plain tensor or a DTensor.
        shape: logical shape; by default that of ``param``. Another shape needs a parameter that its
            holders hold whole.
        dtype: by default that of ``param``.
    """
    if shape is None:
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    held = shape if is_local(param) else (0, *shape[1:])
    zeros = local_tensor(param).new_zeros(held, dtype=dtype)
    if not isinstance(param, DTensor):
        return zeros
    return DTensor.from_local(
        zeros,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(tuple(shape), device="meta").stride(),
    )


def restore_dtypes(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Undo what loading does to state of another dtype than its parameter's: factors in fp32 of a bf16 matrix.

    Args:
        optimizer: has just loaded ``state_dict``.
        state_dict: what it loaded.
    """
    saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in zip(saved_ids, params, strict=True):
        loaded = optimizer.state.get(param, {})
        for name, saved in state_dict["state"].get(index, {}).items():
            if isinstance(saved, Tensor) and loaded[name].dtype != saved.dtype:
                loaded[name] = saved.to(device=loaded[name].device)


def param_label(group: dict[str, Any], index: int) -> str:
    """What to call a parameter in a message: its name if the group has names, else its position."""
    names = group.get("param_names")
    return f"parameter '{names[index]}'" if names else f"parameter {index} of its group"
