"""WHAT A FILE SAYS, AND WHERE: YAML and JSON that remember line and column, and whether it has the right form."""

from dovetail.documents.document import Document
from dovetail.documents.read import DEPTH_LIMIT, SIZE_LIMIT_BYTES, parse_document, read_document
from dovetail.documents.validate import validated

__all__ = ["DEPTH_LIMIT", "SIZE_LIMIT_BYTES", "Document", "parse_document", "read_document", "validated"]
