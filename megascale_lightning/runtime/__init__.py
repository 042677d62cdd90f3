"""Runs the roles: all in one process (`local`), or each in a Ray actor. The only layer that may import Ray."""

__all__: list[str] = []
