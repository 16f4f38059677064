"""Tools without knowledge of federated learning: validation, errors, files, arrays, registries."""
