"""Errors a user can act on: one sentence that says what is wrong, where, and what to do."""


class UserError(ValueError):
    """Something the caller asked for cannot be done; the message is one sentence with the way out."""


class NonFiniteLoss(UserError):
    """The training loss became NaN or infinite; raised at the step it is noticed, before any checkpoint is written."""


class BadSample(UserError):
    """A sample cannot be read; raised in the middle of an epoch, since images are opened when they are needed."""
