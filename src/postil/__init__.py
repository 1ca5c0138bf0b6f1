"""Postil reads documents that are longer than a language model reads well.

While the document is prefilled, segment by segment, the model writes a short note about the
question after each one: a margin. The margins then stand right before the question.

    import postil

    model = postil.load()
    book = model.open("contract.pdf")
    print(book.ask("What is the notice period?"))
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postil.documents import Document, read_document
    from postil.errors import (
        ContextOverflow,
        DocumentError,
        ModelNotFound,
        PostilError,
        UnsupportedModel,
    )
    from postil.margins.events import (
        Answer,
        AnswerToken,
        Done,
        Event,
        Margin,
        MarginStarted,
        MarginToken,
        MarginWritten,
        Progress,
        Segment,
        Usage,
    )
    from postil.margins.planner import BALANCED, BATCH, EAGER, Policy
    from postil.notebook.model import Description, Model, load
    from postil.notebook.notebook import Notebook, Stream

# Where the names live, the light modules first. They are imported when a name is first used, since
# torch and transformers take seconds: `postil --help` should not.
_HOMES = (
    "errors",
    "documents",
    "margins.events",
    "margins.planner",
    "notebook.notebook",
    "notebook.model",
)

__all__ = [
    "BALANCED",
    "BATCH",
    "EAGER",
    "Answer",
    "AnswerToken",
    "ContextOverflow",
    "Description",
    "Document",
    "DocumentError",
    "Done",
    "Event",
    "Margin",
    "MarginStarted",
    "MarginToken",
    "MarginWritten",
    "Model",
    "ModelNotFound",
    "Notebook",
    "Policy",
    "PostilError",
    "Progress",
    "Segment",
    "Stream",
    "UnsupportedModel",
    "Usage",
    "load",
    "read_document",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("postil")
    if name in __all__:
        for home in _HOMES:
            if hasattr(module := import_module(f"postil.{home}"), name):
                return getattr(module, name)
    raise AttributeError(f"module 'postil' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
