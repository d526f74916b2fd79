"""The errors that this package raises."""


class EmulatorError(Exception):
    """The emulated NPU cannot be loaded, or was asked for something that it does not have."""


class BuildError(EmulatorError):
    """The emulated libraries did not build; the message has the compiler's output."""
