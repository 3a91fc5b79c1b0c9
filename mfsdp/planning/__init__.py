"""The planner: which rank owns which parameter, decided once from the whole model.

Pure Python over names, shapes and dtypes; it knows no process group and runs on any machine.
"""

from mfsdp.planning.cost import CostModel, MuonCost
from mfsdp.planning.errors import PlanError
from mfsdp.planning.loads import Imbalance, RankLoad
from mfsdp.planning.planner import plan, plan_parameters, plan_specs
from mfsdp.planning.records import MatrixShard, ParameterSpec, Role
from mfsdp.planning.shard_plan import ShardPlan

__all__ = [
    "CostModel",
    "Imbalance",
    "MatrixShard",
    "MuonCost",
    "ParameterSpec",
    "PlanError",
    "RankLoad",
    "Role",
    "ShardPlan",
    "plan",
    "plan_parameters",
    "plan_specs",
]
