"""The one error that this package raises for its user."""


class ClusterError(Exception):
    """The cluster cannot do what was asked; the message is one line for a person."""
