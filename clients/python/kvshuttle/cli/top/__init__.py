"""`kvshuttle top`: samples, what they show, how it looks."""
