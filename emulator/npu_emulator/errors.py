"""The errors that this package raises."""


class EmulatorError(Exception):
    """The emulated NPU cannot be loaded, or does not have what the caller requested."""


class BuildError(EmulatorError):
    """The emulated libraries could not be built. The message contains the compiler's output."""
