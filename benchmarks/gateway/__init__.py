"""What the gateway costs: to the first token, a token, and in requests a second of one core."""
