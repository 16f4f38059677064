"""Programs that measure speed and compare bits between versions."""
