"""fedjax_het in the benchmark: the same regime in, the same line out, and what only it can tell."""
