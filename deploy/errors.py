"""What a command says instead of a traceback."""


class CommandError(Exception):
    """Ends the command with this message on stderr and `exit_code` (2: it was called or configured wrongly)."""

    exit_code = 1


class UsageError(CommandError):
    exit_code = 2
