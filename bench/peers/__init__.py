"""Other engines on our workloads, each run in an environment of its own by `bench/compare.py`."""
