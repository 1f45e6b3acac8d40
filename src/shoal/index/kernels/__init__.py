"""The kernels of the device's index."""
