"""Benchmarks, each a command: `postil bench NAME`."""
