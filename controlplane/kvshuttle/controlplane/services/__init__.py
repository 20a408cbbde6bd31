"""Thin adapters: a message becomes a call, a DomainError becomes a status code."""
