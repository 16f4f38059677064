"""FSL's Figure 3: training examples of EMNIST beside the server's drawn glyphs.

python experiments/fsl/fig3.py                  the embedded digits, seconds
python experiments/fsl/fig3.py --preset paper   EMNIST
"""

from pathlib import Path
from runpy import run_path

EXAMPLES = run_path(str(Path(__file__).with_name("examples.py")))
Source = EXAMPLES["Source"]
SIZES = EXAMPLES["GLYPH_SIZES"]
PRESETS = {
    "quick": Source("digits", "glyphs", {"sizes": SIZES["digits"]}),
    "paper": Source("emnist_45", "glyphs", {}),
}


def main(argv=None) -> int:
    return EXAMPLES["main"]("fig3", PRESETS, argv)


if __name__ == "__main__":
    raise SystemExit(main())
