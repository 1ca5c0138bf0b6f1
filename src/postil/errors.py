"""Every error that Postil raises on purpose. Each message says what to do next."""


class PostilError(Exception):
    """The base of all of them: catch this one to catch every error below."""


class UnsupportedModel(PostilError):
    """The model cannot be used, or not for what was asked of it."""


class ModelNotFound(PostilError):
    """No model of that name could be found, fetched or read."""


class ContextOverflow(PostilError):
    """What was asked does not fit the model's window or the machine's memory."""


class DocumentError(PostilError):
    """A document could not be read, or has nothing in it to read."""


class BackendError(PostilError):
    """A server that was named does not answer as it should."""
