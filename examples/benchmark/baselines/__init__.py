"""Other ways to train with Muon on several ranks, for comparison; each gives the same parameters as one process."""

from baselines.all_to_all import AllToAllMuon
from baselines.gather_once import GatherOnceMuon
from baselines.zero1_owner import zero1_owner_muon

__all__ = ["AllToAllMuon", "GatherOnceMuon", "zero1_owner_muon"]
