"""Programs of the package for an accelerator, compiled without an accelerator."""
