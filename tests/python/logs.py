"""Collects what is logged while a test runs."""

from __future__ import annotations

import logging


class Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
