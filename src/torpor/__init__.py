"""Torpor: idle sessions give their memory and GPU back, and wake with every variable where it was."""

__version__ = "0.1.0"
