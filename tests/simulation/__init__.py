"""The lease protocol on virtual time: see docs/simulation.md."""
