"""Tables and figures of the four papers."""
