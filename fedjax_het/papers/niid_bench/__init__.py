"""NIID-Bench (Li et al., ICDE 2022): four methods under label, feature and quantity skew."""
