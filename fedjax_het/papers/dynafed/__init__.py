"""DynaFed (Pi et al., CVPR 2023): its tables and figures."""
