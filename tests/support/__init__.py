"""What the tests share: small problems, builders, runs, and one NumPy loop as oracle."""
