"""Loaded by every Python process that a chaos run starts, and no other: see tests.chaos.hooked."""

import os

if "CHAOS_FOLDER" in os.environ:
    from tests.chaos import hooked

    hooked.install()
