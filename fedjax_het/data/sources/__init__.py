"""Readers of data sets, a module for each source."""
