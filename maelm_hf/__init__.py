"""MAE-LM encoders for transformers, and probes for any encoder. Importing it registers the Auto classes."""

__version__ = "0.1.0"
