"""What every room stands on: devices, processes, files and errors."""
