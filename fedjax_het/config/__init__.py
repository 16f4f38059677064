"""The settings of a run: the record, its defaults from methods and protocols, and grids of runs."""
