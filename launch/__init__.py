"""Training entry points (`lumen-train`, `lumen-bench`) over the Hydra tree in `configs/`."""
