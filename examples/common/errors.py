"""Errors that are the user's to set right."""

from __future__ import annotations


class UserError(Exception):
    """The message says what is wrong and what to do; the program ends with status 2."""


class DataError(UserError, ValueError):
    """The data cannot be used; the message names the file and what is wrong with it."""


class TrainingError(UserError):
    """Training cannot go on."""
