"""Runs with several processes: rank and size, collectives with gradients, and a common end."""

from itm_fast.distributed.gathering import (
    copy_from_first,
    gather_columns,
    gather_rows,
    gather_sets,
    none_of,
    sum_of_all,
)
from itm_fast.distributed.launch import Launch, launched
from itm_fast.distributed.world import World, joined

__all__ = [
    "Launch",
    "World",
    "copy_from_first",
    "gather_columns",
    "gather_rows",
    "gather_sets",
    "joined",
    "launched",
    "none_of",
    "sum_of_all",
]
