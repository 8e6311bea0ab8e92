"""Trains a DFlash drafter for a target on the user's own machine: data first, made by the target itself."""
