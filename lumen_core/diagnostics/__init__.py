"""What a user reads to see which versions, kernels and numerics are in force."""
