"""Adapters of other libraries, each of which is imported only by its own module."""
