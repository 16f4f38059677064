"""Tables and figures of four papers, a file each, and programs that measure speed and scale."""
