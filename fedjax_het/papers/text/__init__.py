"""Experiments on text."""
