"""Readers of data sets, one module per source."""
