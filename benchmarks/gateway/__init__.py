"""What the gateway itself costs: to the first token, a token, and in requests a second of a core."""
