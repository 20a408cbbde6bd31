"""What `kvshuttle doctor` looks at: probes gather facts, checks turn them into findings."""
