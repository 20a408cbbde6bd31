"""Generated from proto/kvshuttle/v1 by `make proto`; do not edit."""
