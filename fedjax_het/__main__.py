"""Run `fedjax-het` as `python -m fedjax_het`."""

from fedjax_het.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
