"""Launchers that run a sweep on several machines."""
