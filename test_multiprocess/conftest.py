from test_multiprocess.world import worlds

__all__ = ["worlds"]
