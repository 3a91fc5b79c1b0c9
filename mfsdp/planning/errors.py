"""The one error of the planner."""

__all__ = ["PlanError"]


class PlanError(ValueError):
    """A plan cannot be made, read or used; the message names what is wrong and what to do about it."""
