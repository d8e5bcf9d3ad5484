"""Who talks to whom in a synchronisation."""

from hetjax.topology.reducers import REDUCERS, Reducer, all_reduce

__all__ = ["REDUCERS", "Reducer", "all_reduce"]
