"""What mfsdp needs of DTensor's internals: each name is checked here, so that a new torch fails with its name."""

import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch
from expecttest import assert_expected_inline
from torch.distributed.tensor import DTensor, _api, _dispatch, _random, _redistribute, _utils
from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from mfsdp.dtensor import caching, check_version, checkpointing, distribute, install, shapes
from mfsdp.dtensor.redistribute import redistribute_local_tensor


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_dispatcher_hooks() -> None:
    dispatcher = _dispatch.OpDispatcher
    assert parameters(dispatcher._propagate_op_sharding_dispatch_slow_path) == [
        "self", "op_call", "args", "kwargs", "op_info", "try_cache",
    ]  # fmt: skip
    assert parameters(dispatcher._dispatch_get_local_results_slow_path) == ["self", "op_call", "args", "op_info"]
    assert parameters(dispatcher._unwrap_to_op_info_impl) == ["self", "op_call", "args", "kwargs", "create_schema"]
    assert parameters(dispatcher.wrap) == ["res", "spec"]
    assert isinstance(inspect.getattr_static(dispatcher, "wrap"), staticmethod)
    assert callable(torch.Tensor._dtensor__new__)
    assert parameters(dispatcher.unwrap_to_op_info) == ["self", "op_call", "args", "kwargs"]
    assert parameters(ShardingPropagator.propagate_op_sharding_non_cached) == ["self", "op_schema"]
    assert isinstance(DTensor._op_dispatcher._custom_op_handlers, dict)


def test_schema_classes() -> None:
    assert {f.name for f in dataclasses.fields(OutputSharding)} == {
        "output_spec", "redistribute_schema", "needs_redistribute", "use_val_from_redistribute_schema",
    }  # fmt: skip
    assert {"schema", "flat_args_schema", "output_sharding"} <= {f.name for f in dataclasses.fields(OpInfo)}
    assert {"args_schema", "kwargs_schema", "schema_info"} <= {f.name for f in dataclasses.fields(OpSchema)}
    assert {"static_argnum", "static_kwargkey"} <= {f.name for f in dataclasses.fields(RuntimeSchemaInfo)}


def test_redistribute_signature() -> None:
    from mfsdp.dtensor.redistribute import _torch_redistribute

    assert parameters(_torch_redistribute)[:3] == ["local_tensor", "current_spec", "target_spec"]
    assert "async_op" in parameters(_torch_redistribute)
    for module in (_redistribute, _dispatch, _api):
        assert module.redistribute_local_tensor is redistribute_local_tensor


def test_shape_functions() -> None:
    expected = ["global_shape", "mesh_shape", "my_coordinate", "placements", "skip_offset"]
    assert parameters(shapes.torch_local_shape) == expected
    assert _utils._compute_local_shape_and_global_offset is shapes.compute_local_shape_and_global_offset
    assert _api.compute_global_tensor_info is shapes.compute_global_tensor_info


def test_distribute_tensor_is_redirected_in_place() -> None:
    assert parameters(_api.distribute_tensor) == ["tensor", "device_mesh", "placements", "src_data_rank"]
    assert distribute._torch_distribute.__code__ is not _api.distribute_tensor.__code__
    assert torch.distributed.tensor.distribute_tensor is _api.distribute_tensor


def test_compile_cache_hash() -> None:
    assert parameters(caching._torch_stable_hash) == ["self"]
    assert DTensor._stable_hash_for_caching is caching.stable_hash_for_caching


def test_checkpoint_hooks() -> None:
    assert parameters(checkpointing._torch_create_write_items) == ["self", "fqn", "object"]
    assert parameters(checkpointing._torch_create_chunk_list) == ["self"]
    assert DTensor.__create_write_items__ is checkpointing.create_write_items
    assert DTensor.__create_chunk_list__ is checkpointing.create_chunk_list


def test_random_tracker() -> None:
    assert parameters(_random._RNGStateTracker._distribute_region) == ["self", "spec", "generator"]
    assert hasattr(_random, "_rng_tracker")


def test_install_again_changes_nothing() -> None:
    dispatcher = DTensor._op_dispatcher
    before = (dispatcher._propagate_op_sharding_dispatch_slow_path, dict(dispatcher._custom_op_handlers))
    install()
    assert before == (dispatcher._propagate_op_sharding_dispatch_slow_path, dispatcher._custom_op_handlers)


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cu130", "2.14.1", "2.14.0.dev20260801"])
def test_supported_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["2.12.1", "2.15.0", "1.13.0", "3.0.0", "nonsense"])
def test_unsupported_versions(version: str) -> None:
    with pytest.raises(ImportError, match=r">= 2\.13 and < 2\.15"):
        check_version(version)


def test_import_refuses_an_unsupported_torch() -> None:
    script = "import torch; torch.__version__ = '2.12.0'; import mfsdp"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert_expected_inline(
        run.stderr.strip().splitlines()[-1],
        """ImportError: mfsdp works with torch >= 2.13 and < 2.15, and found torch 2.12.0. It extends internals of DTensor that differ between versions: install a supported torch, or an mfsdp release made for yours.""",
    )


def test_dispatch_mode_of_the_counter() -> None:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    assert parameters(TorchDispatchMode.__torch_dispatch__) == ["self", "func", "types", "args", "kwargs"]
    assert issubclass(FakeTensor, torch.Tensor)
