"""Foundations of the package: devices, processes, files, options and errors."""
