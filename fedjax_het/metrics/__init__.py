"""Metrics of runs: accuracy of clients, convergence, costs, and metrics that users register."""
