"""Choice of lanes and of convolution implementations by short timings."""
