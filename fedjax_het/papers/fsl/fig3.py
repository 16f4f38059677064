"""FSL's Figure 3: training examples of EMNIST beside the server's drawn glyphs.

python experiments/fsl/fig3.py                  the embedded digits, seconds
python experiments/fsl/fig3.py --preset paper   EMNIST
"""

from fedjax_het.papers.fsl.server_examples import (
    GLYPH_SIZES,
    ServerExamplesPreset,
    make_examples_program,
)

PRESETS = {
    "quick": ServerExamplesPreset("digits", "glyphs", {"sizes": GLYPH_SIZES["digits"]}),
    "paper": ServerExamplesPreset("emnist_45", "glyphs", {}),
}
main = make_examples_program("fig3", PRESETS)
