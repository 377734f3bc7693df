"""The benchmarks are scripts that import each other by name."""

from benchmark_scripts import scripts  # noqa: F401 - a fixture of all tests here
