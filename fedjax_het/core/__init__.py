"""Rounds of a federation: schedules on the host, and the programs of clients and server."""
