"""The models, cases and workers of `benchmarks/memory_vs_peers.py`."""
