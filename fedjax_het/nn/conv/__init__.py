"""Convolution as a JAX primitive with three implementations."""
