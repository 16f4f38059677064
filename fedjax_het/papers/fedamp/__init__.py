"""FedAMP (Huang et al., AAAI 2021): its tables and figures."""
