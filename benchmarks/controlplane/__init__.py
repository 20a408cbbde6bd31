"""How fast the control plane is, from outside: see `__main__`."""
