"""Whether the tests see the lease protocol's rules broken, one after the other."""
