"""`kvshuttle`, the operator's command line."""
