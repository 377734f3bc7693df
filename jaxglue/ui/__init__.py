"""The page of runs: their files as panels, served on this machine or written as one file."""
