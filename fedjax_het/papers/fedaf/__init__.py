"""FedAF (Wang et al., 2024): its tables and figures."""
