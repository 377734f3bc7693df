"""The Python door: functions that take settings by the names of flags, and training step by step."""
