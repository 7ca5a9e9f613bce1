"""The one kind of error that a subcommand reports to its user."""


class CommandError(Exception):
    """A wrong input; its one-line message names the argument or JSON key and says what to do."""
