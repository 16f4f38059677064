"""What an accelerator would be given to do, compiled without one."""
