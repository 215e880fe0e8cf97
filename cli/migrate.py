"""Bring a database to the schema this version of Tokenmill was written for."""

from migrations import upgrade

__all__ = ["upgrade"]
