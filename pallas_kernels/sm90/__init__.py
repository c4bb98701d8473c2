"""Mosaic GPU kernels, for compute capability 9.0: `wgmma`, TMA and warp specialisation."""
