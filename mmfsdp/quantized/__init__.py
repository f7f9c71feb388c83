"""The formats of quantized matrices, a file for each. core/quantize.py says what a format is, and uses them."""
