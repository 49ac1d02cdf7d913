"""Fitting exit heads: features, losses, measurements, reports."""
