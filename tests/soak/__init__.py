"""Random traffic on real engines with both oracles: see `__main__`."""
