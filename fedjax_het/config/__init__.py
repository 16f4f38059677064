"""Settings of a run: their record, defaults of methods and protocols, and grids of runs."""
