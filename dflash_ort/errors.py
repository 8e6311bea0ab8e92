"""The errors a caller can meet. Each message is one line: what was wrong, what was expected, what to do.

::

    DFlashError
    ├── CheckpointError      a checkpoint cannot be read, or is of a kind that cannot be exported
    ├── BundleError          a bundle directory is missing, damaged, foreign or newer than this program
    ├── ProviderError        ONNX Runtime refused a graph, an option or a provider
    │   └── InexactError     rows of this bundle are not independent on this machine
    ├── RequestError         a prompt, a template or a sampling parameter is not usable
    ├── PolicyError          a controller's name or policy file is not usable
    └── LogError             a log or trace cannot be read
"""


class DFlashError(Exception):
    """Base of every error this package raises on purpose."""


class CheckpointError(DFlashError):
    """A checkpoint cannot be read, or is of a kind that cannot be exported."""


class BundleError(DFlashError):
    """A bundle directory is missing, damaged, foreign, or newer than this program."""


class ProviderError(DFlashError):
    """ONNX Runtime refused a graph, an option or a provider."""


class InexactError(ProviderError):
    """Rows of this bundle are not independent of their neighbours on this machine, so speculation could change the
    text.
    """


class RequestError(DFlashError, ValueError):
    """A prompt, a chat template or a sampling parameter is not usable."""


class PolicyError(DFlashError, ValueError):
    """A controller's name or policy file is not usable."""


class LogError(DFlashError):
    """A log or trace cannot be read."""
