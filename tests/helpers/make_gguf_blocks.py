"""Write tests/golden/gguf-blocks.npz: random blocks of each GGUF storage, and their values by the library `gguf`.

    python tests/helpers/make_gguf_blocks.py

Needs `pip install gguf`, which is no dependency of Hepti.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

#: Where each block has numbers in f16, which random bytes would make infinite.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip
BLOCKS = 6


def main() -> None:
    rng, arrays = np.random.default_rng(5), {}
    for name, halves in HALVES.items():
        kind = GGMLQuantizationType[name]
        raw = rng.integers(0, 256, (BLOCKS, GGML_QUANT_SIZES[kind][1]), np.uint8)
        for at in halves:
            raw[:, at : at + 2] = rng.standard_normal((BLOCKS, 1)).astype("<f2").view(np.uint8)
        if name == "MXFP4":  # an exponent
            raw[:, 0] = rng.integers(118, 132, BLOCKS)
        arrays[name.lower()] = raw
        arrays[f"{name.lower()} values"] = dequantize(raw.copy(), kind).astype(np.float32)
    np.savez_compressed(Path(__file__).parent.parent / "golden" / "gguf-blocks.npz", **arrays)


if __name__ == "__main__":
    main()
