"""The executor, which runs a model layer by layer: compiled programs, remat policies, and host offload."""
