"""One run in several processes, on one host or many: finding each other, agreeing, and noticing a death."""

from jaxglue.distributed.launch import DistributedConfig, Launch, find_launch
from jaxglue.distributed.processes import ALONE, Processes, join_processes, visible_gpus

__all__ = ["ALONE", "DistributedConfig", "Launch", "Processes", "find_launch", "join_processes", "visible_gpus"]
