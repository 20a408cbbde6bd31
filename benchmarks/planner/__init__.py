"""Placements compared on recorded sessions, offline."""
