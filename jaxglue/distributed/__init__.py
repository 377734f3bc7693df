"""One run in several processes, on one host or many: finding each other, agreeing, and noticing a death."""

from jaxglue.distributed.process_info import DistributedConfig, ProcessInfo, find_process_info
from jaxglue.distributed.processes import SINGLE_PROCESS, Processes, join_processes, visible_gpus

__all__ = [
    "SINGLE_PROCESS",
    "DistributedConfig",
    "ProcessInfo",
    "Processes",
    "find_process_info",
    "join_processes",
    "visible_gpus",
]
