"""YAML and JSON documents that remember the line and column of every value."""

from dovetail.documents.document import Document
from dovetail.documents.parser import DEPTH_LIMIT, SIZE_LIMIT_BYTES, parse_document, read_document
from dovetail.documents.validation import validate_document

__all__ = ["DEPTH_LIMIT", "SIZE_LIMIT_BYTES", "Document", "parse_document", "read_document", "validate_document"]
