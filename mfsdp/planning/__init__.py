"""The planner: which rank owns which parameter, decided once from the whole model.

Pure Python over names, shapes and dtypes; it knows no process group and runs on any machine.
``python -m mfsdp plan --help`` is the same from the command line.
"""

from mfsdp.planning.cost import COST_MODELS, AdamWCost, CostModel, MuonCost, Precision, ShampooCost, SoapCost
from mfsdp.planning.errors import PlanError
from mfsdp.planning.loads import Imbalance, RankLoad
from mfsdp.planning.planner import plan, plan_parameters, plan_specs
from mfsdp.planning.rates import Rates, calibrate
from mfsdp.planning.records import MatrixShard, ParameterSpec, Part, Role
from mfsdp.planning.shard_plan import ShardPlan
from mfsdp.planning.split import Blocks, BlocksOf, EqualBlocks, Flatten, Split, Stack

__all__ = [
    "COST_MODELS",
    "AdamWCost",
    "Blocks",
    "BlocksOf",
    "CostModel",
    "EqualBlocks",
    "Flatten",
    "Imbalance",
    "MatrixShard",
    "MuonCost",
    "ParameterSpec",
    "Part",
    "PlanError",
    "Precision",
    "RankLoad",
    "Rates",
    "Role",
    "ShampooCost",
    "ShardPlan",
    "SoapCost",
    "Split",
    "Stack",
    "calibrate",
    "plan",
    "plan_parameters",
    "plan_specs",
]
