"""FSL (Mai et al., 2022): its tables and figures."""
