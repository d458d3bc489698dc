"""Prefix index and node registry, kept in any server that speaks the Redis protocol."""
