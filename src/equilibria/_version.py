"""The version, in one place: the package and its build read it from here."""

__version__ = "0.1.0"
