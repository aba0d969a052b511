"""The single place that holds the version; setuptools reads it without importing torch."""

__version__ = "0.1.0"
