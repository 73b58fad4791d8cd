"""What holds for every smoke test of the benchmarks."""

from __future__ import annotations

import hypothesis

# No test may fail because the machine was busy.
hypothesis.settings.register_profile("benchmarks", deadline=None, max_examples=30)
hypothesis.settings.load_profile("benchmarks")
