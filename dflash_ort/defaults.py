"""Defaults that the command line shows and the engine uses."""

DEFAULT_CONTROLLER = "adaptive"
