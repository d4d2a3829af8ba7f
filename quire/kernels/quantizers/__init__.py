"""Quantizers: a weight becomes WeightCodes, on load and beforehand with the same bits."""
