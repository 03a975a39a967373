"""Low-precision training core: formats, scaling, quantized linear layers. Knows no host framework."""
