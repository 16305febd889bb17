"""The other tools beside ours: a file for each tool, and one for each question. See benchmarks/peers.py."""
