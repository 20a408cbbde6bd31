"""`make demo`: a real conversation on real engines, with and without the return."""
