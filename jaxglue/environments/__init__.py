"""Environments for episodes: clients of other packages' tasks, and a sandbox for programs that a model writes.

Their files import nothing of this library: processes of episodes load them by their paths.
"""
