"""Every private name of torch that ``mfsdp/fsdp`` uses: if torch changes one, this says which and where it is used.

The names are read from the sources, so none can be used without being checked here; what is expected of
each is written below.
"""

import ast
import inspect
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Backend
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import (
    _fsdp_common,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
    _fully_shard,
)

import mfsdp.fsdp
from mfsdp.fsdp.owner_param import OwnerParam

SOURCES = sorted(Path(mfsdp.fsdp.__file__).parent.rglob("*.py"))


def imported_from_torch() -> list[tuple[str, str, str]]:
    """(module, name, file) of everything that mfsdp/fsdp imports from torch."""
    return [
        (node.module, alias.name, source.name)
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch")
        for alias in node.names
    ]


def is_private(module: str, name: str) -> bool:
    return any(part.startswith("_") for part in (*module.split("."), name))


PRIVATE = sorted({(module, name) for module, name, _ in imported_from_torch() if is_private(module, name)})


@pytest.mark.parametrize(("module", "name"), PRIVATE)
def test_an_imported_name_is_there(module: str, name: str) -> None:
    users = sorted({file for m, n, file in imported_from_torch() if (m, n) == (module, name)})
    assert hasattr(import_module(module), name), f"torch {torch.__version__} has no {module}.{name}, used by {users}"


FSDP = "torch.distributed.fsdp._fully_shard."
SIGNATURES = {
    FSDP + "_fsdp_collectives._get_gradient_divide_factors": (
        "reduce_scatter_group, all_reduce_group, reduce_dtype, device_type, factor, force_sum_reduction_for_comms"
    ),
    FSDP + "_fsdp_common._from_local_no_grad": "local_tensor, sharding_spec",
    FSDP + "_fsdp_common._disable_functorch_if_active": "func",
    FSDP + "_fsdp_common.is_bw": "",
    FSDP + "_fsdp_init._get_device_from_mesh": "mesh",
    FSDP + "_fsdp_init._get_managed_modules": "root_modules, ignored_params, is_composable_fn, get_state_fn",
    FSDP + "_fsdp_init._get_mesh_info": "mesh, dp_mesh_dims",
    FSDP + "_fsdp_init._get_post_forward_mesh_info": "reshard_after_forward, mesh_info",
    FSDP + "_fsdp_init._init_default_mesh": "mesh_dim_names",
    FSDP + "_fsdp_init._validate_module": "module, func_name",
    FSDP + "_fsdp_param._get_orig_param_uid": "param",
    FSDP + "_fsdp_param_group._get_param_module_infos": "params, modules",
    "torch._inductor.custom_graph_pass.get_custom_graph_passes": "custom_pass",
    "torch._inductor.fx_passes.control_dependencies.preserve_node_ordering": "graph, additional_deps_map, verbose",
    "torch._inductor.lowering.add_layout_constraint": "fn, constraint",
    "torch._inductor.lowering.constrain_to_fx_strides": "fx_node, args, kwargs",
    "torch._inductor.lowering.register_lowering": (
        "aten_fn, broadcast, type_promotion_kind, convert_input_to_bool, lowering_dict"
    ),
    "torch._prims_common.make_contiguous_strides_for": "shape, row_major",
    "torch.distributed.distributed_c10d._coalescing_manager": "group, device, async_ops",
    "torch.distributed.utils._get_root_modules": "modules",
}


@pytest.mark.parametrize("path", SIGNATURES)
def test_a_function_takes_what_we_pass(path: str) -> None:
    module, _, name = path.rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters
    assert ", ".join(parameters) == SIGNATURES[path], f"the signature of {path} has changed"


def test_every_imported_function_has_its_signature_checked() -> None:
    functions = {
        f"{module}.{name}" for module, name in PRIVATE if inspect.isfunction(getattr(import_module(module), name))
    }
    assert functions == set(SIGNATURES)


METHODS: dict[type, dict[str, str]] = {
    # overridden by OwnerParamGroup: who calls them is FSDP2's state
    _fsdp_param_group.FSDPParamGroup: {
        "__init__": (
            "self, params, modules, mesh_info, post_forward_mesh_info, device, shard_placement_fn, mp_policy, "
            "offload_policy"
        ),
        "lazy_init": "self",
        "unshard": "self, async_op",
        "wait_for_unshard": "self",
        "reshard": "self",
        "pre_backward": "self, default_prefetch, unused",
        "post_backward": "self, unused",
        "finalize_backward": "self",
        "_reset_iter_state": "self",
        "_register_post_backward_hook": "self, args, kwargs",
        "_to_sharded": "self",
        "_to_unsharded": "self",
        "_with_fqn": "self, label",
    },
    _fsdp_param_group.FSDPCommContext: {
        "get_all_gather_streams": "self, async_op, training_state",
        "lazy_init": "self, device",
    },
    # overridden by OwnerParam, or called by it and its group
    _fsdp_param.FSDPParam: {
        "__init__": (
            "self, param, module_info, mesh_info, post_forward_mesh_info, device, shard_placement_fn, mp_policy, "
            "offload_policy"
        ),
        "_init_sharded_param": "self, param, device, shard_placement_fn, mesh_info",
        "_init_extensions": "self",
        "_setattr_on_modules": "self, param",
        "init_dtype_attrs": "self, mp_policy",
        "reset_sharded_param": "self",
        "free_unsharded_param": "self",
        "to_sharded": "self",
        "to_unsharded": "self",
        "to_accumulated_grad_if_needed": "self",
        "accumulate_unsharded_grad_if_needed": "self",
    },
    _fsdp_state.FSDPState: {
        "_root_post_backward_final_callback": "self",
        "_reset_iter_state": "self",
        "_init_shared_state": "self",
    },
}


@pytest.mark.parametrize(
    ("owner", "method"), [(owner, method) for owner, methods in METHODS.items() for method in methods]
)
def test_a_method_is_called_as_we_expect(owner: type, method: str) -> None:
    assert method in vars(owner), f"{owner.__name__}.{method} is gone"
    parameters = inspect.signature(inspect.unwrap(vars(owner)[method])).parameters
    assert ", ".join(parameters) == METHODS[owner][method], f"{owner.__name__}.{method} has changed"


ATTRIBUTES: dict[type, tuple[str, ...]] = {
    _fsdp_param_group.FSDPParamGroup: (
        *("fsdp_params", "mesh_info", "device", "device_handle", "mp_policy", "modules", "comm_ctx"),
        *("_training_state", "_module_fqn", "_post_forward_indices", "_all_reduce_hook"),
        *("_all_gather_comm", "_reduce_scatter_comm", "reduce_grads", "all_reduce_grads"),
        *("reshard_after_backward", "gradient_divide_factor", "unshard_in_backward"),
    ),
    _fsdp_param_group.FSDPCommContext: (
        *("device_handle", "reduce_scatter_stream", "reduce_scatter_max_input_buffers", "post_forward_order"),
    ),
    _fsdp_param.FSDPParam: (
        *("_module_info", "device", "offload_to_cpu", "grad_offload_event", "unsharded_accumulated_grad"),
        *("_param_fqn", "all_gather_outputs"),
    ),
    _fsdp_state.FSDPState: ("_fsdp_param_groups", "_comm_ctx", "_states_to_backward_prefetch"),
}


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in ATTRIBUTES.items() for name in names])
def test_an_attribute_is_set_where_we_expect(owner: type, name: str) -> None:
    tree = ast.parse(inspect.getsource(owner).strip())
    assigned = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    assert name in assigned, f"{owner.__name__} no longer sets self.{name}"


def test_states_of_training_and_sharding_are_known() -> None:
    assert [state.name for state in _fsdp_common.TrainingState] == ["FORWARD", "PRE_BACKWARD", "POST_BACKWARD", "IDLE"]
    assert [state.name for state in _fsdp_param.ShardedState] == ["SHARDED", "SHARDED_POST_FORWARD", "UNSHARDED"]


def test_the_end_of_backward_calls_groups_that_are_not_done_yet() -> None:
    """OwnerParamGroup leaves ``IDLE`` behind where uses are outstanding, to be called again."""
    calls: list[str] = []

    class Group:
        def __init__(self, name: str, state: Any) -> None:
            self.name, self._training_state = name, state

        def post_backward(self) -> None:
            calls.append(f"post_backward {self.name}")

        def finalize_backward(self) -> None:
            calls.append(f"finalize_backward {self.name}")

    state = _fsdp_state.FSDPState()
    state._comm_ctx.lazy_init(torch.device("cpu"))
    state._state_ctx.all_states.append(state)
    state._fsdp_param_groups = [
        Group("done", _fsdp_common.TrainingState.POST_BACKWARD),
        Group("idle", _fsdp_common.TrainingState.IDLE),
    ]
    state._root_post_backward_final_callback()
    assert calls == ["post_backward idle", "finalize_backward done", "finalize_backward idle"]


def test_the_post_backward_node_calls_post_backward_of_what_it_is_given() -> None:
    """``_Use`` stands in for a group there."""
    calls: list[str] = []

    class Use:
        def post_backward(self) -> None:
            calls.append("post_backward")

    register = _fsdp_param_group.FSDPParamGroup._register_post_backward_hook
    x = torch.ones(2, requires_grad=True)
    (y,), kwargs = register(Use(), (x,), {})  # type: ignore[arg-type]
    assert not calls
    y.sum().backward()
    assert calls == ["post_backward"]
    # arguments come back as they are where there is nothing to register: this is how uses are counted
    args, kwargs = (torch.ones(2),), {}
    same_args, same_kwargs = register(Use(), args, kwargs)  # type: ignore[arg-type]
    assert same_args is args
    assert same_kwargs is kwargs


def test_objects_have_what_is_used_of_them() -> None:
    module = nn.Linear(2, 2)
    assert dist.ProcessGroup._get_backend
    assert isinstance(Backend.supports_coalescing, property)
    with torch.autograd._unsafe_preserve_version_counter(module.bias.detach()):
        pass
    assert callable(torch_fsdp.fully_shard.state)  # type: ignore[attr-defined]
    for attribute in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
        assert attribute in inspect.getsource(_fully_shard)
    assert isinstance(module._parameters, dict)
    assert module.weight._post_accumulate_grad_hooks is None
    assert module.weight.untyped_storage()._cdata
    assert {"_get_fsdp_state", "reset_iter_state", "unshard", "reshard"} <= set(vars(FSDPModule))


def assigned_attributes(method: Any) -> set[str]:
    """The attributes of ``self`` that a method sets."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    stores = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in stores if isinstance(node.value, ast.Name) and node.value.id == "self"}


def test_an_owner_param_has_what_fsdp_param_has() -> None:
    """FSDP2's hooks read attributes that ``_init_sharded_param`` sets, and that of ``OwnerParam`` replaces it."""
    of_slices = {  # what describes a rank's rows, which only methods read that OwnerParam or its group replace
        "_shard_mesh",
        "_sharded_param_data",
        "contiguous_sharded_stride",
        "fsdp_placement",
        "padded_sharded_param_size",
    }
    theirs = assigned_attributes(_fsdp_param.FSDPParam._init_sharded_param)
    ours = assigned_attributes(OwnerParam._init_sharded_param)
    lacking = theirs - ours - of_slices
    assert not lacking, f"torch {torch.__version__}: FSDPParam._init_sharded_param sets {sorted(lacking)} as well"


def test_what_graph_style_asks_of_autograd_is_there() -> None:
    assert torch._C._current_graph_task_id() == -1
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with torch.autograd.graph.saved_tensors_hooks(len, len):
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) == (len, len)
    assert torch._neg_view(torch.ones(2)).is_neg()


def test_what_graph_style_asks_of_inductor_is_there() -> None:
    from torch._inductor import config, graph, ir, lowering
    from torch._inductor.custom_graph_pass import get_custom_graph_passes

    for create in (ir._CollectiveKernel.create_out_of_place, ir._CollectiveKernel.create_inplace):
        assert list(inspect.signature(create).parameters)[:2] == ["kernel", "inputs"]
    assert {"operations", "additional_star_deps"} <= assigned_attributes(graph.GraphLowering.__init__)
    assert torch.ops._c10d_functional.wait_tensor.default in lowering.lowerings
    assert next(iter(inspect.signature(ir.FallbackKernel.create).parameters)) == "kernel"
    assert not get_custom_graph_passes(None)
    assert get_custom_graph_passes(config.post_grad_custom_post_pass) is not None
    assert torch._dynamo.config.trace_autograd_ops in (True, False)
