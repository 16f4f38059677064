"""Metrics of runs: accuracy of clients, convergence, costs, and measures that users register."""
